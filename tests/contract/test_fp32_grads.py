"""16-bit weights with a float32 `.grad`, by `MainGradBuffer` or `FP32Accumulation`: zeros set by hand, inference_mode,
torch.compile, and optimizers that step another one. Beside the same loop in plain PyTorch, or without the setting.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fusedmlp
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

OWNER = pytest.mark.parametrize("owner", ["buffer", "FP32Accumulation"])


def made(owner, by=torch.optim.AdamW, inner=False, **options):
    """A layer, its optimizer, and what owns the gradients; `inner`: it gets the optimizer inside of that one."""
    torch.manual_seed(0)
    layer = fusedmlp.GroupedMLP(3, 8, 6, dtype=torch.bfloat16, **options)
    optimizer = by(layer.parameters(), lr=1e-2)
    return layer, optimizer, owned(owner, layer, optimizer.base if inner else optimizer)


def owned(owner, layer, optimizer):
    if owner == "buffer":
        return fusedmlp.MainGradBuffer(layer.parameters())
    return FP32Accumulation(layer, optimizer) if owner == "FP32Accumulation" else None


def micro_batch(layer, seed, rows=6, run=None):
    torch.manual_seed(seed)
    x = torch.randn(rows, 8, dtype=torch.bfloat16)
    (layer if run is None else run)(x, torch.tensor([2, 0, rows - 2])).float().square().sum().backward()


def flat(tensors):
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def grads(layer):
    return [param.grad for param in layer.parameters()]


def beside_plain(owner, run, **options):
    """Compare what `run(layer, optimizer, what owns the gradients)` returns with the same in plain PyTorch."""
    actual, expected = (run(*made(who, **options)) for who in (owner, "plain PyTorch"))
    assert (actual - expected).norm() < 1e-2 * expected.norm()


@OWNER
def test_16_bit_zeros_set_by_hand_are_stepped_from_and_added_to(owner):
    """`get_state_dict` of distributed checkpoints makes the optimizer's state by a step from them."""

    def run(layer, optimizer, _):
        for step in range(4):
            optimizer.zero_grad()
            micro_batch(layer, step)
            if step == 1:
                for param in layer.parameters():
                    param.grad = None
                    param.grad = torch.zeros_like(param)
            optimizer.step()
        return flat(layer.parameters())

    beside_plain(owner, run)
    layer, optimizer, _kept = made(owner)
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    micro_batch(layer, 9)
    ones = [grad.clone() for grad in grads(layer)]
    optimizer.zero_grad()
    micro_batch(layer, 9)
    for grad, added in zip(grads(layer), ones, strict=True):
        assert grad.dtype == torch.float32
        assert added.dtype == (torch.bfloat16 if owner == "buffer" else torch.float32)  # a buffer leaves what was set
        torch.testing.assert_close(added.float(), 1 + grad, rtol=2e-2, atol=2e-2)


def test_a_sparse_gradient_stays_sparse():
    weights = []
    for owner in ("FP32Accumulation", "plain PyTorch"):
        torch.manual_seed(0)
        table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)  # refuses dense gradients
        _kept = owned(owner, table, optimizer)
        for factor in (1.0, 2**-10):
            (table(torch.tensor([1, 3])).float() * factor).sum().backward()
        if owner == "FP32Accumulation":
            assert torch.equal(table.weight.grad.to_dense()[1], torch.full((2,), 1 + 2**-10))
        optimizer.step()
        weights.append(table.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("owner", ["buffer", "FP32Accumulation", "plain PyTorch"])
def test_backward_dw_and_steps_in_inference_mode(owner):
    found = []
    for within in (torch.inference_mode, nullcontext):
        layer, optimizer, _kept = made(owner, delay_wgrad=True)
        for step in range(3):
            optimizer.zero_grad()
            for i in range(2):
                micro_batch(layer, 2 * step + i)
                with within():
                    layer.backward_dw()
            assert not any(grad.is_inference() for grad in grads(layer))
            with within():
                optimizer.step()
        found.append(flat([*grads(layer), *layer.parameters()]))
    assert torch.equal(*found)


COMPILED = {  # rows of the micro-batches, the first one that is compiled, and what else is
    "sizes differ": ((6, 8), 0, False),
    "from the second micro-batch on": ((6, 6), 1, False),
    "the step": ((6, 6), 2, True),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@OWNER
@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case, owner):
    rows, first, step_too = COMPILED[case]
    torch._dynamo.reset()

    def run(layer, optimizer, kept):
        compiles = (lambda f: f) if kept is None else partial(torch.compile, backend="eager")
        fast, step = compiles(layer), compiles(optimizer.step) if step_too else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            for i, count in enumerate(rows):
                micro_batch(layer, i, count, run=layer if i < first else fast)
            found = flat(grads(layer))
            step()
        return torch.cat([found, flat(layer.parameters())])

    beside_plain(owner, run, by=torch.optim.SGD)


class Twice(torch.optim.Optimizer):
    """Steps from the gradient at a point beside the weights, as SAM does, by another optimizer."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base = torch.optim.AdamW(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def leave(self):
        self.before = [param.detach().clone() for param in self.param_groups[0]["params"]]
        for param in self.param_groups[0]["params"]:
            param.add_(0.1 * param.grad / param.grad.norm())
        self.zero_grad()

    @torch.no_grad()
    def come_back(self):
        for param, before in zip(self.param_groups[0]["params"], self.before, strict=True):
            param.copy_(before)
        self.base.step()

    def step(self, closure):
        self.leave()
        with torch.enable_grad():
            closure()
        self.come_back()


@pytest.mark.parametrize("inner", [False, True], ids=["given the wrapper", "given the optimizer inside"])
@OWNER
@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_steps_another_one(closure, owner, inner):
    def run(layer, optimizer, _):
        for step in range(3):
            optimizer.zero_grad()
            micro_batch(layer, step)
            if closure:
                optimizer.step(partial(micro_batch, layer, step))
            else:
                optimizer.leave()
                micro_batch(layer, step)
                optimizer.come_back()
        return flat(layer.parameters())

    beside_plain(owner, run, by=Twice, inner=inner)
