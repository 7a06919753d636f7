"""MainGradBuffer: layout, clipping, and stepping any torch optimizer from it."""

import pytest
import torch
from torch.nn import Parameter

from fusedmlp import GroupedMLP, MainGradBuffer, grouped_linear


def test_views_of_one_flat_buffer():
    params = [Parameter(torch.randn(3, 5)), Parameter(torch.randn(7))]
    buffer = MainGradBuffer(params)
    assert buffer.flat.dim() == 1
    assert buffer.flat.is_contiguous()
    for param in params:
        assert param.main_grad.shape == param.shape
        assert param.main_grad.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
        assert param.main_grad.storage_offset() % 64 == 0
        assert param.grad_added_to_main_grad is False
    params[0].main_grad.fill_(1)
    params[1].main_grad.fill_(2)
    assert buffer.flat.sum() == 15 + 14
    torch.testing.assert_close(buffer.norm(), torch.tensor((15 + 28) ** 0.5))


def test_zero_clears_flags_and_gradients():
    param = Parameter(torch.randn(4))
    buffer = MainGradBuffer([param])
    param.main_grad.fill_(3)
    param.grad_added_to_main_grad, param.grad = True, torch.ones(4)
    buffer.zero_()
    assert buffer.flat.count_nonzero() == 0
    assert param.grad_added_to_main_grad is False
    assert param.grad is None


def test_clip_norm():
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    param.main_grad.copy_(torch.tensor([3.0, 0, 4, 0]))
    assert buffer.clip_norm_(10.0) == 5
    assert buffer.norm() == 5
    buffer.clip_norm_(1.0)
    torch.testing.assert_close(param.main_grad, torch.tensor([0.6, 0, 0.8, 0]))


def test_detach_and_flag_by_choice():
    param = Parameter(torch.zeros(4))
    MainGradBuffer([param], grad_added_to_main_grad=False).detach()
    assert not hasattr(param, "main_grad")
    buffer = MainGradBuffer([param])
    assert hasattr(param, "grad_added_to_main_grad")
    buffer.detach()
    assert not hasattr(param, "grad_added_to_main_grad")


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("flag", [True, False])
def test_a_plain_loop_steps_any_optimizer_from_it(make_optimizer, flag):
    torch.manual_seed(0)
    plain, fused = (GroupedMLP(3, 4, 5, bias=True) for _ in range(2))
    fused.load_state_dict(plain.state_dict())
    buffer = MainGradBuffer(fused.parameters(), grad_added_to_main_grad=flag)
    optimizers = [make_optimizer(module.parameters(), lr=0.1) for module in (plain, fused)]
    for _ in range(3):
        batches = [torch.randn(6, 4) for _ in range(2)]
        optimizers[0].zero_grad()
        buffer.zero_()
        for x in batches:
            for module in (plain, fused):
                module(x, [1, 2, 3]).square().sum().backward()
        optimizers[0].step()
        with buffer.as_grad():
            optimizers[1].step()
        assert all(p.grad is None for p in fused.parameters())
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), msg=name)


def test_as_grad_counts_everything_once():
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    param.main_grad.fill_(1)
    param.grad = torch.full((4,), 10.0)  # left by a layer that does not fuse
    with buffer.as_grad():
        assert (param.grad == 11).all()
    param.grad = torch.zeros(()).expand(4)  # a dummy
    with buffer.as_grad():
        assert (param.grad == 11).all()


def test_low_precision_parameters_get_gradients_of_their_dtype():
    param = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    buffer = MainGradBuffer([param])
    assert param.main_grad.dtype == torch.float32
    with buffer.as_grad():
        assert param.grad.dtype == torch.bfloat16
    buffer.detach()
    assert MainGradBuffer([param], dtype=torch.bfloat16).flat.dtype == torch.bfloat16


def test_what_would_change_the_gradients_under_as_grad_is_refused():
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    param.main_grad.fill_(3)
    for method in (buffer.zero_, buffer.norm, lambda: buffer.clip_norm_(1.0), lambda: buffer.as_grad().__enter__()):
        with buffer.as_grad(), pytest.raises(RuntimeError, match=r"expected a call outside of as_grad\(\)"):
            method()
        assert (param.main_grad == 3).all()
    buffer.clip_norm_(3.0)
    torch.testing.assert_close(param.main_grad, torch.full((4,), 1.5))


def test_detach_takes_dummies_away_but_no_gradient():
    dummy, real = Parameter(torch.zeros(2, 3, 4)), Parameter(torch.zeros(4))
    buffer = MainGradBuffer([dummy, real])
    grouped_linear(torch.ones(2, 4), dummy, [1, 1]).sum().backward()
    assert not any(dummy.grad.stride())
    real.grad = torch.ones(4)
    buffer.detach()
    assert dummy.grad is None
    assert (real.grad == 1).all()


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


def test_norm_and_clipping_see_what_is_in_grad():
    module = GroupedMLP(2, 4, 5, bias=True)
    buffer = MainGradBuffer(module.parameters())
    (module(torch.randn(6, 4), [2, 4]).sum() * 1000).backward()
    assert buffer.clip_norm_(1.0) > 1
    with buffer.as_grad():
        total = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()]))
    torch.testing.assert_close(total, torch.tensor(1.0))


def test_torch_refuses_to_swap_a_parameter_of_a_buffer():
    param = Parameter(torch.ones(3))
    MainGradBuffer([param])
    with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
        torch.utils.swap_tensors(param, Parameter(torch.zeros(3)))


@pytest.mark.parametrize("how", ["another owner", "detach"])
@pytest.mark.parametrize("call", ["zero_", "norm", "as_grad"])
def test_a_main_grad_that_was_taken_away_is_noticed(how, call):
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(4))]
    buffer = MainGradBuffer(params)
    if how == "another owner":
        params[1].main_grad = torch.zeros(4)
    else:
        buffer.detach()
    calls = {"zero_": buffer.zero_, "norm": buffer.norm, "as_grad": lambda: buffer.as_grad().__enter__()}
    place, what = ("0" if how == "detach" else "1"), ("another" if how == "another owner" else "none")
    with pytest.raises(
        RuntimeError, match=rf"params\[{place}\]: expected the main_grad .* got {what}, .* new MainGradBuffer"
    ):
        calls[call]()


def test_flat_is_edited_in_place():
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    param.main_grad.fill_(3)
    buffer.flat /= 2
    assert (param.main_grad == 1.5).all()
    with pytest.raises(AttributeError, match="expected to be written in place; got another tensor"):
        buffer.flat = buffer.flat / 2
