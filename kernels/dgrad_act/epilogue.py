"""Arithmetic of a subtile in the epilogue of dgrad, for both kernels, which load and store."""

import triton
import triton.language as tl

from ..device import activation


@triton.jit
def backward(da_MF, g, l, dprobs, probs_M1, ACT: tl.constexpr):
    """`(da, a, d act / dg, d act / dl, dprobs)` in fp32 from `da` and `h`; `dh` is `da` times a derivative.

    With `probs`, add `da * act` to each row's `dprobs`, `[M, 1]` or `[M]`, and multiply `da` and `a` by `probs`.
    """
    act, by_gate, by_linear = activation.activate(g, l, ACT)
    if probs_M1 is not None:
        if len(dprobs.shape) == 2:
            # Not a sum along axis 1: for sm_100, Triton 3.7.1 would look for another layout of `da`, and fail.
            dprobs += tl.sum(tl.reshape(da_MF * act, (da_MF.shape[0], 1, da_MF.shape[1])), axis=2)
        else:
            dprobs += tl.sum(da_MF * act, axis=1)
        da_MF *= probs_M1
        act *= probs_M1
    return da_MF, act, by_gate, by_linear, dprobs
