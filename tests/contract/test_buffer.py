"""MainGradBuffer: its layout, and what its methods do to `.grad`."""

import pytest
import torch
from support.loops import Model, backward
from torch.nn import Parameter

from fusedmlp import MainGradBuffer


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
    buffer = MainGradBuffer([param])
    param.sum().backward()
    kept, cloned = param.grad, param.grad.clone()
    buffer.zero_grad()
    (5 * param).sum().backward()
    assert (kept == 5).all()
    assert (cloned == 1).all()


def test_when_the_buffer_goes_gradients_are_as_without():
    param = Parameter(torch.ones(4))
    _kept = MainGradBuffer([param])
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


def test_any_number_of_optimizers_made_before_or_after():
    model = Model(torch.bfloat16)
    first = torch.optim.SGD(model.router.parameters(), lr=0.1)
    _kept = MainGradBuffer(model.parameters())
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
    _kept = MainGradBuffer([param])
    param.square().sum().backward(create_graph=True)
    assert param.grad.requires_grad
    param.grad.sum().backward()
    assert (param.grad == 4).all()
