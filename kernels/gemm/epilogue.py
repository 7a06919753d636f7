"""Arithmetic of a subtile in the epilogue of gemm, for both kernels, which load and store."""

import triton
import triton.language as tl

from ..device.tiles import round_to


@triton.jit
def add_bias(y_MN, bias_1N, scale_M1, DTYPE: tl.constexpr):
    """Add the bias, if there is one, times each row's scale, if there is one, and round to the dtype of `y`."""
    if bias_1N is not None:
        if scale_M1 is not None:
            bias_1N = bias_1N * scale_M1
        y_MN += bias_1N
    return round_to(y_MN, DTYPE)
