"""The usual loop with a `MainGradBuffer`, whose memory `.grad` is."""

import pytest
import torch
from support.loops import DTYPES, OPTIMIZERS, Model, assert_same, backward, set_grads, sums, twins

import fusedmlp


@pytest.mark.parametrize("zero_grad", ["set_to_none", "in place", "of the model", "buffer.zero_grad()"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@DTYPES
def test_the_usual_loop(dtype, make_optimizer, zero_grad):
    (reference, expected), (model, optimizer) = twins(dtype, make_optimizer)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    zero = {
        "set_to_none": optimizer.zero_grad,
        "in place": lambda: optimizer.zero_grad(set_to_none=False),
        "of the model": model.zero_grad,
        "buffer.zero_grad()": buffer.zero_grad,
    }[zero_grad]
    for step in range(3):
        seeds = range(3 * step, 3 * step + 3)
        zero()
        for seed in seeds:
            backward(model, seed)
        grads = sums(reference, seeds)
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is param.main_grad
            assert param.grad.dtype == torch.float32
            torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.05)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1.0
        torch.testing.assert_close(buffer.norm(), torch.tensor(1.0))
        set_grads(reference, [p.grad * (norm + 1e-6) for p in model.parameters()], max_norm=1.0)
        optimizer.step()
        expected.step()
        assert_same(model, reference, dtype)
        assert all(p.grad is p.main_grad for p in model.parameters())
    zero()
    assert buffer.norm() == 0


def test_sums_of_many_micro_batches_are_those_of_float32_for_plain_weights_too():
    """A router's sum in bf16 would stop growing at 256 times what is added."""
    model = Model(torch.bfloat16)
    _kept = fusedmlp.MainGradBuffer(model.parameters())
    for _ in range(600):
        backward(model, 1)
    expected = [600 * g for g in sums(Model(torch.bfloat16, "off"), [1])]
    for param, want in zip(model.parameters(), expected, strict=True):
        assert (param.grad - want).abs().max() <= 2e-2 * want.abs().max()


def test_a_module_that_moves_takes_its_gradients_out_of_the_buffer():
    model = Model()
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    model.bfloat16()
    for use in (buffer.norm, lambda: buffer.clip_norm_(1.0), lambda: buffer.flat):
        with pytest.raises(RuntimeError, match=r"params\[0\]: expected the main_grad that this buffer gave it"):
            use()
