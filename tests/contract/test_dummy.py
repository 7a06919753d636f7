"""The zero gradient that a fused backward leaves in `.grad` for owners whose hooks want one."""

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, plus
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmlp
from fusedmlp.contract.dummy import has_dummy_wgrad


def fused(layer, seed=1):
    """Run a backward into main_grad; return the fresh dummies that it leaves."""
    for param in layer.params:
        param.grad = None
    layer.backward(seed)
    return layer.grads()


def is_zero(dummies, params):
    return all(torch.equal(d, torch.zeros_like(p)) for d, p in zip(dummies, params, strict=True))


class Names(TorchDispatchMode):
    """Records the name of each operator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@PACKED
def test_it_is_zero_and_of_the_parameters_shape(packed, make_layer):
    layer = make_layer("mlp", packed)
    layer.attach(False)
    for seed in range(3):
        dummies = fused(layer, seed)
        assert is_zero(dummies, layer.params)
        for dummy, param in zip(dummies, layer.params, strict=True):
            assert (dummy.shape, dummy.dtype, dummy.device) == (param.shape, param.dtype, param.device)
            assert not dummy.requires_grad
            assert dummy.untyped_storage().nbytes() == dummy.element_size()
        torch.optim.SGD(layer.params).zero_grad(set_to_none=False)
        assert is_zero(layer.grads(), layer.params)


def test_it_costs_no_kernel(make_layer):
    """After the first backward of a process, not even one on its one element; test_stock_pytorch.py has its memory."""
    torch.use_deterministic_algorithms(False)  # which would fill memory that is not initialised
    layer = make_layer()
    layer.attach(False)
    held = fused(layer)
    for param in layer.params:
        param.grad = None
    x, dy = layer.batch(2)
    y = layer(x)
    with Names() as names:
        y.backward(dy)
    assert any("grouped_mlp_backward_" in name for name in names.found)
    words = ("zero", "fill", "empty", "full", "copy", "clone")
    assert not any(word in name for name in names.found for word in words)
    assert is_zero(held + layer.grads(), 2 * layer.params)


@DELAYED
def test_an_existing_grad_is_moved_to_main_grad(delayed, make_layer, assert_close):
    """Plain PyTorch has left it there, and an owner that goes by the flag would drop it."""
    layer = make_layer()
    before, mine = layer.attach(False), [torch.full_like(p, 5.0) for p in layer.params]
    for param, grad in zip(layer.params, mine, strict=True):
        param.grad = grad
    layer.backward(1, 2, 3, delayed=delayed)
    assert is_zero(layer.grads(), layer.params)
    assert all(torch.equal(grad, torch.full_like(grad, 5.0)) for grad in mine)
    assert all(param.grad_added_to_main_grad is True for param in layer.params)
    assert_close(layer.main_grads(), plus(before, mine, layer.wgrads(1, 2, 3)))


@pytest.mark.parametrize("write", ["add_", "mul_", "copy_", "clip"])
def test_it_refuses_most_writes(write, make_layer):
    layer = make_layer()
    layer.attach(False)
    dummies = fused(layer)
    writes = {
        "add_": lambda: dummies[0].add_(1),
        "mul_": lambda: dummies[0].mul_(2),
        "copy_": lambda: dummies[0].copy_(layer.params[0].detach()),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(layer.params, 1.0),
    }
    with pytest.raises(RuntimeError, match=r"single memory location|internal overlap"):
        writes[write]()
    assert is_zero(layer.grads(), layer.params)
    assert is_zero(fused(layer), layer.params)


@pytest.mark.parametrize("write", ["fill_", "element", "detach", "grad.data = ..."])
def test_a_write_that_pytorch_lets_through_poisons_no_other_and_not_the_next(write, make_layer):
    layer = make_layer(packed=False)
    layer.attach(False)
    dummy, *others = fused(layer)
    {
        "fill_": dummy.fill_,  # PyTorch lets this one write to an expanded tensor
        "element": dummy[0, 0].fill_,
        "detach": dummy.detach()[0, 0].fill_,
        "grad.data = ...": lambda value: setattr(dummy, "data", torch.full_like(dummy, value)),
    }[write](1)
    assert not has_dummy_wgrad(layer.params[0])  # it is a gradient now, and must not be dropped
    assert is_zero(others, layer.params[1:])
    assert is_zero(fused(layer), layer.params)
    assert dummy[0, 0] == 1  # which somebody may hold


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_follows_a_module_to_another_dtype(dtype, make_layer):
    layer = make_layer()
    layer.attach(False)
    for dropped in (False, True):
        fused(layer)
        for param in layer.params if dropped else []:
            param.grad = None
        module = torch.nn.ParameterList(layer.params)
        module.to(dtype)
        assert dropped or is_zero(layer.grads(), layer.params)
        module.to(torch.float32)
        assert is_zero(fused(layer), layer.params)


def test_a_parameter_with_one_element():
    """A dummy is no larger here, so it is writable."""
    a, b = (Parameter(torch.ones(1, 1, 1)) for _ in range(2))
    x = torch.tensor([[2.0], [3.0]])
    for param in (a, b):
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
        fusedmlp.grouped_linear(x, param, [2]).sum().backward()
    assert a.grad.item() == b.grad.item() == 0
    a.grad.add_(1)
    assert b.grad.item() == 0
    a.grad = None
    fusedmlp.grouped_linear(x, a, [2]).sum().backward()
    assert a.grad.item() == b.grad.item() == 0
    assert (a.main_grad.item(), b.main_grad.item()) == (10, 5)


def test_it_has_the_dtype_that_grad_must_have(make_layer):
    layer = make_layer(dtype=torch.bfloat16)
    layer.attach(False)
    fc1, fc2 = layer.params
    fc1.grad_dtype = torch.float32
    layer.backward()
    assert (fc1.grad.dtype, fc2.grad.dtype) == (torch.float32, torch.bfloat16)
    assert is_zero(layer.grads(), [fc1.detach().float(), fc2])
