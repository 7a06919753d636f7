"""docs/faq.md quotes errors as the code raises them."""

import re
from pathlib import Path

import pytest
import torch

import fusedmlp

X, COUNTS = torch.randn(6, 16), [4, 2]


def layer(**options):
    return fusedmlp.GroupedMLP(2, 16, 32, **options)


def train(experts, counts=COUNTS, x=X):
    experts(x, counts).square().mean().backward()
    return experts


def owned():
    """A layer whose `main_grad` somebody owns, as Megatron does."""
    experts = layer()
    for param in experts.parameters():
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    return experts


def steps_from_a_dummy(folder):
    torch.optim.AdamW(train(owned()).parameters()).step()


def steps_past_a_queue(folder):
    experts = train(layer(delay_wgrad=True))
    try:
        torch.optim.AdamW(experts.parameters()).step()
    finally:
        experts.wgrad_queue.clear()


def reduces_in_16_bits(folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        experts = layer(dtype=torch.bfloat16)
        buffer = fusedmlp.MainGradBuffer(experts.parameters())  # noqa: F841 - kept until it raises
        torch.nn.parallel.DistributedDataParallel(experts)(X.bfloat16(), COUNTS)
    finally:
        torch.distributed.destroy_process_group()


def has_a_hook(folder):
    experts = owned()
    experts.fc1.weight.register_hook(lambda grad: None)
    train(experts)


def looks_at_fc1(folder):
    experts = layer()
    experts.fc1.register_full_backward_hook(lambda layer, dx, dy: None)
    train(experts)


# By its place on the page, what raises each error.
RAISED = (
    steps_from_a_dummy,
    steps_past_a_queue,
    lambda folder: train(layer(accumulate_wgrad="main_grad")),
    reduces_in_16_bits,
    lambda folder: train(layer(), [4, 3]),
    lambda folder: train(layer(), x=X.bfloat16()),
    lambda folder: fusedmlp.grouped_mlp(X, torch.randn(2, 32, 16), torch.randn(2, 16, 32), COUNTS),
    lambda folder: train(layer(impl="triton")),
    has_a_hook,
    looks_at_fc1,
)


@pytest.mark.parametrize(("place", "raises"), list(enumerate(RAISED)))
def test_frequent_errors_are_quoted_as_raised(place, raises, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    page = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(quoted) == len(RAISED)
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        raises(tmp_path)
    assert " ".join(quoted[place].split()) == f"{raised.type.__name__}: {raised.value}"
