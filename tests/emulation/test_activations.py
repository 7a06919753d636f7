"""The sigmoid, which kernels compute by special instructions on NVIDIA GPUs, at the ends of its range."""

import pytest
import torch
import triton
import triton.language as tl
from ptx_emulator.driver import gpu

from fusedmlp.kernels.device import activation

SIZE = 512


@triton.jit
def _curve(x_ptr, c_ptr, slope_ptr, ALPHA: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    c, slope = activation.curve(tl.load(x_ptr + at), "sigmoid", ALPHA)
    tl.store(c_ptr + at, c)
    tl.store(slope_ptr + at, slope)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_sigmoid_of_small_large_and_huge(target, alpha):
    x = torch.cat([torch.linspace(-200, 200, SIZE - 6), torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4, -1e30])])
    c, slope = torch.full((2, SIZE), float("nan"))
    with gpu(target):
        _curve[(1,)](x, c, slope, alpha, SIZE)
    exact = x.double().requires_grad_()
    expected = exact * torch.sigmoid(alpha * exact)
    expected.sum().backward()
    torch.testing.assert_close(c.double(), expected.detach(), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(slope.double(), exact.grad, rtol=1e-5, atol=1e-5)
