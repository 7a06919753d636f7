"""16-bit weights with a float32 `.grad`, by `MainGradBuffer` or `FP32Accumulation`: checkpoints, inference_mode,
torch.compile, and optimizers that step another one. Beside the same loop in plain PyTorch, or without the setting.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fusedmlp
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

OWNERS = ("buffer", "FP32Accumulation")


def made(owner, packed=True, seed=0, by=torch.optim.AdamW, dtype=torch.bfloat16):
    """A layer, its optimizer, and what owns the gradients."""
    torch.manual_seed(seed)
    layer = fusedmlp.GroupedMLP(3, 8, 6, dtype=dtype, packed=packed)
    optimizer = by(layer.parameters(), lr=1e-2)
    return layer, optimizer, owned(owner, layer, optimizer)


def owned(owner, layer, optimizer):
    if owner == "buffer":
        return fusedmlp.MainGradBuffer(layer.parameters())
    return FP32Accumulation(layer, optimizer) if owner == "FP32Accumulation" else None


def micro_batch(layer, seed, rows=6):
    torch.manual_seed(seed)
    x = torch.randn(rows, 8, dtype=layer.fc1(None, None).weight[0].dtype)
    layer(x, torch.tensor([2, 0, rows - 2])).float().square().sum().backward()


def trained(layer, optimizer, steps, within=nullcontext, without=()):
    """The weights after steps of two micro-batches; `without`: steps whose gradients are zeros set by hand."""
    for step in steps:
        optimizer.zero_grad()
        for i in range(2):
            micro_batch(layer, 2 * step + i)
        if step in without:
            for param in layer.parameters():
                param.grad = None
                param.grad = torch.zeros_like(param)
        with within():
            optimizer.step()
    return torch.cat([param.detach().float().flatten() for param in layer.parameters()])


def close(actual, expected):
    assert (actual - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*to (save|load) in a single process")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("owner", OWNERS)
def test_a_checkpoint_resumes(owner, packed, tmp_path):
    """`get_state_dict` makes the optimizer's state by a step from `param.grad = torch.zeros_like(param)`."""
    layer, optimizer, _kept = made(owner, packed)
    trained(layer, optimizer, range(3))
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(layer, optimizer), strict=True)), checkpoint_id=tmp_path)
    other, other_optimizer, _also_kept = made(owner, packed, seed=5)
    state = dict(zip(names, get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert torch.equal(trained(other, other_optimizer, range(3, 6)), trained(layer, optimizer, range(3, 6)))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("owner", OWNERS)
def test_16_bit_zeros_set_by_hand_are_stepped_from_and_added_to(owner, packed):
    layer, optimizer, _kept = made(owner, packed)
    plain, plain_optimizer, _ = made("plain PyTorch", packed)
    close(trained(layer, optimizer, range(4), without=(1,)), trained(plain, plain_optimizer, range(4), without=(1,)))
    optimizer.zero_grad()
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    micro_batch(layer, 9)
    ones = [param.grad.clone() for param in layer.parameters()]
    optimizer.zero_grad()
    micro_batch(layer, 9)
    for param, added in zip(layer.parameters(), ones, strict=True):
        assert param.grad.dtype == torch.float32
        assert added.dtype == (torch.bfloat16 if owner == "buffer" else torch.float32)  # a buffer leaves what was set
        torch.testing.assert_close(added.float(), 1 + param.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("owner", OWNERS)
def test_the_gradient_of_plain_pytorch_is_summed_in_float32(owner):
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    layer = torch.nn.ParameterList([weight])
    _kept = owned(owner, layer, torch.optim.SGD([weight], 0.1))
    for factor in (1.0, 2**-10):  # the sum has more bits than bf16
        (weight * factor).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 1 + 2**-10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["off", "grad"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("owner", OWNERS)
def test_what_came_before_zero_grad_is_not_added_to(owner, delayed, mode, dtype):
    """In modes that leave `main_grad` alone, of layers whose buffer made it `.grad`, too."""
    if owner == "FP32Accumulation":
        dtype = torch.float16 if dtype is torch.float32 else dtype  # it has nothing to do for float32
    grads = []
    for who in (owner, "plain PyTorch"):
        layer, optimizer, _kept = made(who, dtype=dtype)
        micro_batch(layer, 0)
        optimizer.zero_grad()
        queue = fusedmlp.WgradQueue() if delayed else None
        x, weights = torch.ones(6, 8, dtype=dtype), [layer.fc1.weight, layer.fc2.weight]
        y = fusedmlp.grouped_mlp(x, *weights, [2, 0, 4], accumulate_wgrad=mode, wgrad_queue=queue)
        y.float().square().sum().backward()
        if queue is not None:
            queue.run()
        grads.append(torch.cat([param.grad.float().flatten() for param in layer.parameters()]))
    close(*grads)


def test_a_sparse_gradient_stays_sparse():
    weights = []
    for owner in ("FP32Accumulation", "plain PyTorch"):
        torch.manual_seed(0)
        table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)  # refuses dense gradients
        _kept = owned(owner, table, optimizer)
        for factor in (1.0, 2**-10):
            (table(torch.tensor([1, 3])).float() * factor).sum().backward()
        grad = table.weight.grad
        if owner == "FP32Accumulation":
            assert torch.equal(grad.to_dense()[1], torch.full((2,), 1 + 2**-10))
        optimizer.step()
        weights.append(table.weight.detach().float())
    close(*weights)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_step_in_inference_mode(owner):
    layer, optimizer, _kept = made(owner)
    plain, plain_optimizer, _ = made(owner)
    got = trained(layer, optimizer, range(3), within=torch.inference_mode)
    assert torch.equal(got, trained(plain, plain_optimizer, range(3)))


def test_a_buffer_made_in_inference_mode_is_refused():
    layer = fusedmlp.GroupedMLP(3, 8, 6)
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"^MainGradBuffer: .* outside of torch\.inference_mode"),
    ):
        fusedmlp.MainGradBuffer(layer.parameters())


@pytest.mark.parametrize("owner", [*OWNERS, "plain PyTorch"])
def test_backward_dw_in_inference_mode(owner):
    grads = []
    for within in (torch.inference_mode, nullcontext):
        torch.manual_seed(0)
        layer = fusedmlp.GroupedMLP(3, 8, 6, dtype=torch.bfloat16, delay_wgrad=True)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        kept = owned(owner, layer, optimizer)
        for seed in range(2):
            micro_batch(layer, seed)
            with within():
                layer.backward_dw()
        assert not any(param.grad.is_inference() for param in layer.parameters())
        grads.append([param.grad.clone() for param in layer.parameters()])
        optimizer.step()
        del kept
    torch.testing.assert_close(*grads, rtol=0, atol=0)


COMPILED = {  # rows of the micro-batches, the first one that is compiled, and what else is
    "sizes differ": ((6, 8), 0, False),
    "from the second micro-batch on": ((6, 6), 1, False),
    "the step": ((6, 6), 2, True),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case, owner, packed):
    rows, first, step_too = COMPILED[case]
    results = []
    for backend in ("eager", None):
        torch._dynamo.reset()
        layer, optimizer, _kept = made(owner, packed, by=torch.optim.SGD)
        fast = layer if backend is None else torch.compile(layer, backend=backend)
        step = torch.compile(optimizer.step, backend=backend) if backend and step_too else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            for i, count in enumerate(rows):
                torch.manual_seed(i)
                x = torch.randn(count, 8, dtype=torch.bfloat16)
                y = (layer if i < first else fast)(x, torch.tensor([2, 0, count - 2]))
                y.float().square().sum().backward()
            grads = [param.grad.float().flatten() for param in layer.parameters()]
            step()
        results.append(torch.cat([*grads, *(param.detach().float().flatten() for param in layer.parameters())]))
    close(*results)


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


@pytest.mark.parametrize("given", ["the wrapper", "the optimizer inside"])
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_steps_another_one(closure, owner, given):
    weights = []
    for who in (owner, "plain PyTorch"):
        torch.manual_seed(0)
        layer = fusedmlp.GroupedMLP(3, 8, 6, dtype=torch.bfloat16)
        optimizer = Twice(layer.parameters(), lr=1e-2)
        _kept = owned(who, layer, optimizer if given == "the wrapper" else optimizer.base)
        for step in range(3):
            optimizer.zero_grad()
            micro_batch(layer, step)
            if closure:
                optimizer.step(lambda step=step, layer=layer: micro_batch(layer, step))
            else:
                optimizer.leave()
                micro_batch(layer, step)
                optimizer.come_back()
        weights.append(torch.cat([param.detach().float().flatten() for param in layer.parameters()]))
    close(*weights)
