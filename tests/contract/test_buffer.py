"""MainGradBuffer: its layout, what its methods do to `.grad`, and the mistakes that it leaves no room for."""

import copy
import pickle

import pytest
import torch
from support.loops import DTYPES, Model, backward, sums
from torch.nn import Parameter

from fusedmlp import GroupedMLP, MainGradBuffer


def ramp(*sizes):
    """Parameters, and their buffer with gradients 3, 0, 4, 0, ... in it."""
    params = [Parameter(torch.zeros(size)) for size in sizes]
    buffer = MainGradBuffer(params)
    for param in params:
        param.grad = torch.tensor([3.0, 0, 4, 0]).repeat(param.numel() // 4)
    return params, buffer


def test_views_of_one_flat_tensor():
    params = [Parameter(torch.randn(3, 5)), Parameter(torch.randn(7))]
    buffer = MainGradBuffer(params)
    assert buffer.flat.dim() == 1
    assert buffer.flat.is_contiguous()
    for value, param in enumerate(params, start=1):
        assert param.main_grad.shape == param.shape
        assert param.main_grad.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
        assert param.main_grad.storage_offset() % 64 == 0
        param.grad.fill_(value)
    assert buffer.flat.sum() == 15 + 14
    torch.testing.assert_close(buffer.norm(), torch.tensor((15 + 28) ** 0.5))


def test_clip_norm_sees_what_was_set_by_hand():
    (param,), buffer = ramp(4)
    assert buffer.clip_norm_(10.0) == 5
    assert buffer.norm() == 5
    buffer.clip_norm_(1.0)
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0, 0.8, 0]))
    assert param.grad is param.main_grad


def test_zero_grad_moves_no_memory():
    (param,), buffer = ramp(4)
    assert buffer.norm() == 5
    buffer.zero_grad()
    assert param.grad is None
    assert (param.main_grad == torch.tensor([3.0, 0, 4, 0])).all()  # nothing reads it
    assert buffer.norm() == 0
    assert param.grad is None
    assert not buffer.flat.any()
    assert param.grad is param.main_grad


def test_flat_is_edited_in_place():
    (param,), buffer = ramp(4)
    buffer.flat /= 2
    assert (param.grad == torch.tensor([1.5, 0, 2, 0])).all()
    with pytest.raises(AttributeError, match="expected to be written in place; got another tensor"):
        buffer.flat = buffer.flat / 2


def test_a_tensor_put_into_grad_stays_until_the_buffer_is_read():
    param = Parameter(torch.ones(4))
    buffer = MainGradBuffer([param])
    mine = param.grad = torch.full((4,), 2.0)
    param.sum().backward()
    assert param.grad is mine
    assert (mine == 3).all()
    assert buffer.norm() == 6
    assert param.grad is param.main_grad


def test_a_gradient_that_is_kept_is_written_by_the_next_step():
    """As under DDP with gradient_as_bucket_view: the page says to clone."""
    param = Parameter(torch.ones(4))
    MainGradBuffer([param]).norm()
    buffer = MainGradBuffer([other := Parameter(torch.ones(4))])
    other.sum().backward()
    kept, cloned = other.grad, other.grad.clone()
    buffer.zero_grad()
    (5 * other).sum().backward()
    assert (kept == 5).all()
    assert (cloned == 1).all()


def test_when_the_buffer_goes_gradients_are_as_without():
    param = Parameter(torch.ones(4))
    MainGradBuffer([param])
    param.sum().backward()
    param.sum().backward()
    assert (param.grad == 2).all()


def test_low_precision_parameters_have_gradients_in_the_dtype_of_the_buffer():
    param = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    buffer = MainGradBuffer([param])
    param.sum().backward()
    assert param.grad.dtype == torch.float32
    buffer.detach()
    assert param.grad.dtype == torch.bfloat16
    assert MainGradBuffer([param], dtype=torch.bfloat16).flat.dtype == torch.bfloat16
    param.sum().backward()
    assert (param.grad == 2).all()


@pytest.mark.parametrize("rounds", [True, False])
def test_rounds_for_step(rounds):
    """An optimizer that takes float32 gradients beside 16-bit parameters gets the exact ones."""
    seen = []

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            seen.append(self.param_groups[0]["params"][0].grad.clone())

    param = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    buffer = MainGradBuffer([param], rounds_for_step=rounds)
    buffer.flat.fill_(1 + 2**-10)
    Optimizer([param]).step()
    assert seen[0].dtype == (torch.bfloat16 if rounds else torch.float32)
    assert (param.grad == 1 + 2**-10).all()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda p: [], "expected at least one parameter; got none"),
        (lambda p: [p, p], "expected each parameter once"),
        (lambda p: [p * 1], r"params\[0\]: expected a leaf that requires grad"),
        (lambda p: [p.detach()], r"params\[0\]: expected a leaf that requires grad"),
        (lambda p: [p, Parameter(torch.empty(2, device="meta"))], r"params\[1\]: expected memory; got a meta tensor"),
    ],
)
def test_wrong_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        MainGradBuffer(params(Parameter(torch.zeros(4))))


def test_wrong_dtype_and_second_owner():
    param = Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 or params\[0\]'s torch.float32; got torch.b"):
        MainGradBuffer([param], dtype=torch.bfloat16)
    MainGradBuffer([param])
    with pytest.raises(ValueError, match="got that of another owner"):
        MainGradBuffer([param])


def test_torch_refuses_to_swap_a_parameter_of_a_buffer():
    param = Parameter(torch.ones(3))
    MainGradBuffer([param])
    with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
        torch.utils.swap_tensors(param, Parameter(torch.zeros(3)))


def test_a_parameter_is_not_pickled_and_its_copy_has_no_memory():
    param = Parameter(torch.ones(3))
    MainGradBuffer([param])
    with pytest.raises(RuntimeError, match="pickle: expected a parameter without main_grad"):
        pickle.dumps(param)
    assert not hasattr(copy.deepcopy(param), "main_grad")


@pytest.mark.parametrize("how", ["another owner", "detach"])
def test_a_main_grad_that_was_taken_away_is_noticed(how):
    params, buffer = ramp(4, 4)
    if how == "another owner":
        params[1].main_grad = torch.zeros(4)
    else:
        buffer.detach()
    place, what = ("0" if how == "detach" else "1"), ("another" if how == "another owner" else "none")
    with pytest.raises(
        RuntimeError, match=rf"params\[{place}\]: expected the main_grad .* got {what}, .* new MainGradBuffer"
    ):
        buffer.norm()


# Mistakes of loops


def test_a_collective_over_grad_reaches_the_step(make_layer, assert_close):
    """`.grad` is real memory, not an expanded zero past which a collective would write."""
    layer = make_layer()
    MainGradBuffer(layer.params)
    layer.backward(1)
    for param in layer.params:
        assert param.grad.is_contiguous()
        param.grad.mul_(2)  # as all_reduce does in place
    assert_close(layer.grads(), [2 * w for w in layer.wgrads(1)])


@DTYPES
def test_a_step_by_hand_moves_weights(dtype):
    model = Model(dtype)
    MainGradBuffer(model.parameters())
    backward(model, 1)
    before = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(0.1 * param.grad)
    assert not any(torch.equal(param, b) for param, b in zip(model.parameters(), before, strict=True))


def test_master_weights_read_the_gradient_of_this_step():
    model = Model(torch.bfloat16)
    buffer = MainGradBuffer(model.parameters())
    for seed in (1, 2):
        buffer.zero_grad()
        backward(model, seed)
        for param, want in zip(model.parameters(), sums(Model(torch.bfloat16, "off"), [seed]), strict=True):
            assert param.grad is param.main_grad
            torch.testing.assert_close(param.grad, want, rtol=2e-2, atol=5e-2)


def test_any_number_of_optimizers_made_before_or_after():
    model = Model(torch.bfloat16)
    first = torch.optim.SGD(model.router.parameters(), lr=0.1)
    MainGradBuffer(model.parameters())
    second = torch.optim.AdamW(model.experts.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(2):
        for optimizer in (first, second):
            optimizer.zero_grad()
        backward(model, step)
        for optimizer in (first, second):
            optimizer.step()
            assert all(param.grad.dtype == torch.float32 for param in model.parameters())
    assert not any(torch.equal(param, b) for param, b in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_leaves_grad_to_pytorch():
    param = Parameter(torch.ones(4))
    MainGradBuffer([param])
    param.square().sum().backward(create_graph=True)
    assert param.grad.requires_grad
    param.grad.sum().backward()
    assert (param.grad == 4).all()


def test_two_layers_of_one_module_and_a_plain_use(assert_close):
    module = GroupedMLP(2, 4, 5, bias=True)
    buffer = MainGradBuffer(module.parameters())
    (module(torch.randn(6, 4), [2, 4]).sum() * 1000).backward()
    assert buffer.clip_norm_(1.0) > 1
    total = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()]))
    torch.testing.assert_close(total, torch.tensor(1.0))
