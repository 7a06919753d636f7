"""Ways in which weights change between two calls of a layer."""

import torch


def unseen(weight):
    """Change a weight as FSDP2 does when it gathers it anew: at the same address, without a new version."""
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        weight.mul_(2)


def through_data(weight):
    weight.data.mul_(2)


def in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def moved(weight):
    weight.data = weight.data * 2
