"""The zero gradient that a fused backward leaves in `.grad` for owners whose hooks want one."""

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmlp
from fusedmlp.contract.dummy import has_dummy_wgrad

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)


@pytest.fixture
def dense(monkeypatch):
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", "1")


@pytest.fixture(params=["0", "1"], ids=["expanded", "dense"])
def either(request, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", request.param)


def fused(layer, seed=1):
    """Run a backward into main_grad; return the fresh dummies that it leaves."""
    for param in layer.params:
        param.grad = None
    layer.backward(seed)
    return layer.grads()


def is_zero(dummies, params):
    return all(torch.equal(d, torch.zeros_like(p)) for d, p in zip(dummies, params, strict=True))


class LargeOutputs(TorchDispatchMode):
    """Records the names of operators with new outputs of at least `size` bytes."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage.nbytes() >= self.size and storage.data_ptr() not in given:
                    self.names.append(str(func))
        return out


@LAYERS
def test_it_is_zero_and_of_the_parameters_shape(kind, packed, either, nan_in_empty, make_layer):
    layer = make_layer(kind, packed)
    layer.attach(False)
    for seed in range(3):
        dummies = fused(layer, seed)
        assert is_zero(dummies, layer.params)
        for dummy, param in zip(dummies, layer.params, strict=True):
            assert (dummy.shape, dummy.dtype, dummy.device) == (param.shape, param.dtype, param.device)
            assert not dummy.requires_grad


@LAYERS
def test_expanded_its_storage_has_one_element(kind, packed, make_layer):
    layer = make_layer(kind, packed)
    layer.attach(False)
    for dummy in fused(layer):
        assert dummy.untyped_storage().nbytes() == dummy.element_size()


@pytest.mark.parametrize(("switch", "expected"), [("0", False), ("1", True)])
def test_expanded_no_operator_makes_anything_of_a_weights_size(switch, expected, monkeypatch, make_layer):
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", switch)
    layer = make_layer("mlp", hidden=32, ffn=32)
    layer.attach(False)
    held = [fused(layer)]  # while they are held, the pool of dense dummies must allocate
    for param in layer.params:
        param.grad = None
    x, dy = layer.batch(2)
    y = layer(x)
    with LargeOutputs(min(p.nbytes for p in layer.params)) as large:
        y.backward(dy)
    assert bool(large.names) == expected, large.names
    assert is_zero(held[0] + layer.grads(), 2 * layer.params)


def test_expanded_a_step_runs_no_fill(make_layer):
    """After the first backward of a process, a dummy costs no kernel, not even on its one element."""
    layer = make_layer()
    layer.attach(False)
    fused(layer)
    for param in layer.params:
        param.grad = None
    x, dy = layer.batch(2)
    y = layer(x)
    with LargeOutputs(0) as outputs:
        y.backward(dy)
    assert any("grouped_mlp_backward_" in name for name in outputs.names)
    assert not [
        n for n in outputs.names if any(word in n for word in ("zero", "fill", "empty", "full", "copy", "clone"))
    ]


@pytest.mark.parametrize("delayed", [False, True])
def test_an_existing_grad_is_moved_to_main_grad(delayed, either, make_layer, assert_close):
    """Plain PyTorch has left it there, and an owner that goes by the flag would drop it."""
    layer = make_layer()
    before = layer.attach(False)
    mine = [torch.full_like(p, 5.0) for p in layer.params]
    for param, grad in zip(layer.params, mine, strict=True):
        param.grad = grad
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    if queue is not None:
        queue.run()
    assert is_zero(layer.grads(), layer.params)
    assert all(torch.equal(grad, torch.full_like(grad, 5.0)) for grad in mine)
    assert all(param.grad_added_to_main_grad is True for param in layer.params)
    assert_close(layer.main_grads(), [b + w + 5 for b, w in zip(before, layer.wgrads(), strict=True)])


def test_micro_batches_keep_it_zero(either, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(1, 2, 3)
    assert is_zero(layer.grads(), layer.params)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1, 2, 3), strict=True)])


@pytest.mark.parametrize("write", ["add_", "mul_", "copy_", "clip"])
def test_expanded_writing_into_it_raises(write, make_layer):
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


def test_expanded_zeroing_keeps_it_zero(make_layer):
    layer = make_layer()
    layer.attach(False)
    fused(layer)
    torch.optim.SGD(layer.params).zero_grad(set_to_none=False)
    assert is_zero(layer.grads(), layer.params)
    assert is_zero(fused(layer), layer.params)


@pytest.mark.parametrize("write", ["fill_", "element", "detach", "grad.data = ..."])
def test_a_write_that_pytorch_lets_through_poisons_no_other_and_not_the_next(write, either, make_layer):
    layer = make_layer(packed=False)
    layer.attach(False)
    dummy, *others = fused(layer)
    {
        "fill_": dummy.fill_,  # PyTorch lets this one write to an expanded tensor
        "element": dummy[0, 0].fill_,
        "detach": dummy.detach()[0, 0].fill_,
        "grad.data = ...": lambda value: setattr(dummy, "data", torch.full_like(dummy, value)),
    }[write](1)
    assert dummy[0, 0] == 1
    assert not has_dummy_wgrad(layer.params[0])  # it is a gradient now, and must not be dropped
    assert is_zero(others, layer.params[1:])
    assert is_zero(fused(layer), layer.params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_follows_a_module_to_another_dtype(dtype, either, make_layer):
    layer = make_layer()
    layer.attach(False)
    for grads in ("there", "dropped"):
        fused(layer)
        for param in layer.params if grads == "dropped" else []:
            param.grad = None
        module = torch.nn.ParameterList(layer.params)
        module.to(dtype)
        assert is_zero([p.grad for p in layer.params if p.grad is not None], layer.params[: 2 * (grads == "there")])
        module.to(torch.float32)
        assert is_zero(fused(layer), layer.params)


@pytest.mark.parametrize("packed", [True, False])
def test_a_parameter_with_one_element(packed, either, make_layer):
    weights = [Parameter(torch.ones(1, 1, 1))] if packed else [Parameter(torch.ones(1, 1))]
    other = [Parameter(torch.ones(1, 1, 1))] if packed else [Parameter(torch.ones(1, 1))]
    for param in weights + other:
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    x = torch.tensor([[2.0], [3.0]])
    for group in (weights, other):
        fusedmlp.grouped_linear(x, group[0] if packed else group, [2]).sum().backward()
    (a,), (b,) = weights, other
    assert a.grad.item() == b.grad.item() == 0
    a.grad.add_(1)  # a dense dummy is no larger here, so it is writable
    assert b.grad.item() == 0
    a.grad = None
    fusedmlp.grouped_linear(x, weights[0] if packed else weights, [2]).sum().backward()
    assert a.grad.item() == b.grad.item() == 0
    assert a.main_grad.item() == 10
    assert b.main_grad.item() == 5


def test_it_has_the_dtype_that_grad_must_have(either, make_layer):
    layer = make_layer(dtype=torch.bfloat16)
    layer.attach(False)
    fc1, fc2 = layer.params
    fc1.grad_dtype = torch.float32
    layer.backward()
    assert (fc1.grad.dtype, fc2.grad.dtype) == (torch.float32, torch.bfloat16)
    assert is_zero(layer.grads(), [p.detach().to(g.dtype) for p, g in zip(layer.params, layer.grads(), strict=True)])


def test_dense_it_is_dense_and_writable(dense, make_layer):
    layer = make_layer()
    layer.attach(False)
    for dummy in fused(layer):
        assert dummy.is_contiguous()
        assert dummy.untyped_storage().nbytes() == dummy.nbytes
        dummy.add_(1)
    torch.optim.SGD(layer.params).zero_grad(set_to_none=False)
    torch.nn.utils.clip_grad_norm_(layer.params, 1.0)
    assert is_zero(layer.grads(), layer.params)


@pytest.mark.parametrize("hold", ["tensor", "view", "data", "detached", "numpy", "element"])
def test_dense_one_that_somebody_holds_is_not_reused(dense, hold, make_layer):
    layer = make_layer("linear", hidden=6, ffn=7)
    layer.attach(False)
    holders = {
        "tensor": lambda t: t,
        "view": lambda t: t[1:].transpose(1, 2),
        "data": lambda t: t.data,
        "detached": lambda t: t.detach(),
        "numpy": lambda t: t.numpy(),
        "element": lambda t: t[0, 0, 0],
    }
    (first,) = fused(layer)
    held, pointer = holders[hold](first), first.data_ptr()
    del first
    (second,) = fused(layer)
    assert second.data_ptr() != pointer
    if hold != "numpy":
        held.fill_(9)
    assert is_zero([second], layer.params)
    del held, second
    for _ in range(3):
        assert is_zero(fused(layer), layer.params)


def test_dense_live_parameters_never_share_memory(dense, make_layer):
    layers = [make_layer("mlp", packed=False) for _ in range(3)]
    for layer in layers:
        layer.attach(False)
    for _ in range(2):
        dummies = [d for layer in layers for d in fused(layer)]
        assert len({d.untyped_storage().data_ptr() for d in dummies}) == len(dummies)
        for i, dummy in enumerate(dummies):
            dummy.fill_(i + 1)
        assert [d.unique().tolist() for d in dummies] == [[i + 1.0] for i in range(len(dummies))]
        del dummies, dummy


def test_the_switch_refuses_other_values(monkeypatch, make_layer):
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", "yes")
    layer = make_layer()
    layer.attach(False)
    with pytest.raises(ValueError, match=r"FUSEDMLP_DENSE_DUMMY: expected 0 or 1; got 'yes'"):
        layer.backward()
