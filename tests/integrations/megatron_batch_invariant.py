"""A whole MoE layer of Megatron-core with `batch_invariant_mode`: sequences alone and in a batch. Runs in a `world`."""

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
from integrations.megatron_layers import as_if_fetched, eight_bit_config, make_config, moe_layer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import token_dispatcher

import fusedmlp

SEQUENCES, LENGTH = 50, 3  # alone, experts have one to three rows; together, enough for 8 bits without the mode
MODE = {"attention_backend": AttnBackend.flash, "flash_attention_version": 3, "batch_invariant_mode": True}
MODE |= {"attention_dropout": 0.0}


def differences():
    """By recipe and mode: how many sequences have other outputs, or other gradients of their input, in a batch."""
    megatron_world.model_parallel()
    token_dispatcher.maybe_move_tensor_to_cpu = as_if_fetched
    found = {}
    for recipe, mode in (("", True), ("", False), ("mxfp8", True), ("mxfp8", False)):
        size = (64, 32) if recipe else (34, 21)
        sizes = dict(zip(("hidden_size", "moe_ffn_hidden_size"), size, strict=True))
        options = sizes | (MODE if mode else {})
        layer = moe_layer(eight_bit_config(recipe, **options) if recipe else make_config(**options), ours=True)
        torch.manual_seed(3)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        layer.router.gating = lambda x, layer=layer: linear(x, layer.router.weight)
        hidden = layer.config.hidden_size
        x, dy = torch.randn(LENGTH, SEQUENCES, hidden), torch.randn(LENGTH, SEQUENCES, hidden)
        every = step(layer, x, dy)
        other = [0, 0]
        for i in range(SEQUENCES):
            alone = step(layer, x[:, i : i + 1], dy[:, i : i + 1])
            for j, (got, expected) in enumerate(zip(alone, every, strict=True)):
                other[j] += not torch.equal(got[:, 0], expected[:, i])
        found[f"{recipe} {mode}"] = other
    return found


def linear(x, weight):
    """The router's product, which is not Megatron's own on a CPU: its rows do not depend on each other either."""
    rows = x.reshape(-1, x.shape[-1])
    y = fusedmlp.grouped_linear(rows, weight[None], [len(rows)], batch_invariant=True, accumulate_wgrad="off")
    return y.view(*x.shape[:-1], -1)


def step(layer, x, dy):
    rows = x.clone().requires_grad_()
    y, _ = layer(rows)
    y.backward(dy)
    return y.detach(), rows.grad
