"""Products of e4m3 operands with a scale for 32 elements along what is contracted (recipe mxfp8), in plain Triton.

Operands and scales lie as `operands/quantized.py` says.
"""

import triton
import triton.language as tl

from ..operands import quantized
from .quantization import power_of_2
from .tiles import INTERPRETED

CHUNK = tl.constexpr(quantized.CHUNK)
BLOCK = tl.constexpr(32)  # elements that share a scale


@triton.jit
def load_scales(scales_ptr, chunk):
    """Scales of 128 elements along what is contracted, `[128, 4]`, of a chunk's 128 lines: rows of a row copy or of
    weights, or columns of a token copy.
    """
    line, block = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK // BLOCK)[None, :]
    place = line % 32 * 16 + line // 32 * 4 + block
    return tl.load(scales_ptr + chunk.to(tl.int64) * (CHUNK * CHUNK // BLOCK) + place)


@triton.jit
def dot_scaled(a_MK, a_scales, b_KN, b_scales, acc):
    """`acc + a @ b` in fp32, with scales `[M, K / 32]` of `a` and `[N, K / 32]` of `b`. Not every Triton's interpreter
    has this product, so it gets fp32.
    """
    if INTERPRETED:
        a, b = _dequantized(a_MK, a_scales), _dequantized(tl.trans(b_KN), b_scales)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    else:
        acc = tl.dot_scaled(a_MK, a_scales, "e4m3", b_KN, b_scales, "e4m3", acc)
    return acc


@triton.jit
def _dequantized(x_MK, scales):
    """fp32 values, exactly."""
    M: tl.constexpr = x_MK.shape[0]
    K: tl.constexpr = x_MK.shape[1]
    blocks = tl.reshape(x_MK.to(tl.float32), (M, K // BLOCK, BLOCK))
    return tl.reshape(blocks * power_of_2(scales.to(tl.int32))[:, :, None], (M, K))
