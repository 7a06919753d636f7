"""Arithmetic of a subtile in the epilogue of fc1, for both kernels, which load, store and multiply by `probs`."""

import triton
import triton.language as tl

from ..device import activation
from ..device.tiles import load_bias, round_to, to_fp32


@triton.jit
def pre_activation(h_MG, l_MF, bias, column_1G, num_gates, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """Add the expert's bias, if there is one, and round to the dtype of `h`.

    Where a row has two halves, `num_gates` wide, `h_MG` is gates and `l_MF` linear channels; otherwise `h_MG` has all.
    """
    if bias is not None:
        h_MG += load_bias(bias, column_1G, num_gates)
    h_MG = round_to(h_MG, DTYPE)
    if activation.halves(ACT) == 2:
        if bias is not None:
            l_MF += load_bias(bias + num_gates, column_1G, num_gates)
        l_MF = round_to(l_MF, DTYPE)
    else:
        l_MF = h_MG
    return h_MG, l_MF


@triton.jit
def activate(h_MG, l_MF, ACT: tl.constexpr):
    """`act` in fp32 of the results of `pre_activation`."""
    g, l = to_fp32(h_MG), to_fp32(l_MF)
    if ACT.CHANNEL_STEP == 2:
        g, l = tl.split(tl.reshape(g, (g.shape[0], g.shape[1] // 2, 2)))
    a, _, _ = activation.activate(g, l, ACT)
    return a
