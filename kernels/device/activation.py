"""Activations as device functions. `c` is the scalar curve, `g` the gate, `l` the linear part:
`act = c(min(g, LIMIT)) * (bounded(clamp(l, -LIMIT, LIMIT)) + OFFSET)`, or `c(g)` where there is no linear part.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

_INV_SQRT_2 = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_GELU_CUBIC = tl.constexpr(0.044715)
_LOG2_E = tl.constexpr(1.4426950408889634)


class Options(NamedTuple):
    """An activation, as the constexpr `ACT` of kernels."""

    GATED: bool
    CHANNEL_STEP: int  # 2 where gate and linear channels alternate
    CURVE: str  # a branch of `curve`
    ALPHA: float  # of `x * sigmoid(ALPHA * x)` and `ALPHA * tanh(x / ALPHA) * sigmoid(x)`
    LIMIT: float | None  # None: no clamp
    OFFSET: float
    LINEAR_SCALE: float | None  # of the tanh of the linear part; None: no tanh


# Not a property: the key of a kernel in Triton's cache covers the source of this function, not that of a property.
@triton.constexpr_function
def halves(act: Options) -> int:
    """2 where a row of `h` is a half of gates and a half of linear channels, else 1."""
    return 2 if act.GATED and act.CHANNEL_STEP == 1 else 1


@triton.jit
def sigmoid(x, SCALE: tl.constexpr):
    """`sigmoid(SCALE * x)`, fp32.

    NVIDIA's instructions for `2^u` and `1 / v` alone: `tl.sigmoid` guards them, with eight more, against subnormal
    results. Here a subnormal `2^u` does not change `1 + 2^u`, and a sigmoid below 2^-126 may be zero.
    """
    if is_cuda():
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * (-SCALE * _LOG2_E)], dtype=tl.float32, is_pure=True, pack=1
        )
        s = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        s = tl.sigmoid(x * SCALE)
    return s


@triton.jit
def bounded(x, BOUND: tl.constexpr):
    """`(BOUND * tanh(x / BOUND), its derivative)`, fp32; near zero by the series, where the quotient cancels."""
    u = x * (1 / BOUND)
    u2 = u * u
    q = tl.exp(-2 * tl.abs(u))
    t = (1 - q) / (1 + q)
    t = tl.where(u < 0, -t, t)
    near = u * (1 + u2 * (-0.333333333 + u2 * (0.133333333 + u2 * (-0.0539682540 + u2 * 0.0218694885))))
    t = tl.where(tl.abs(u) < 0.25, near, t)
    return BOUND * t, 1 - t * t


@triton.jit
def curve(x, CURVE: tl.constexpr, ALPHA: tl.constexpr):
    """`(c(x), c'(x))`, fp32."""
    if CURVE == "sigmoid":
        s = sigmoid(x, ALPHA)
        c = x * s
        slope = s + c * (1 - s) * ALPHA  # (x s(ax))' = s + x a s (1 - s)
    elif CURVE == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * _INV_SQRT_2))
        c = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * _INV_SQRT_2PI
    elif CURVE == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
        cubic = x * x * _GELU_CUBIC
        s = sigmoid(x + x * cubic, _SQRT_8_OVER_PI)
        c = x * s
        slope = s + c * (1 - s) * (1 + 3 * cubic) * _SQRT_8_OVER_PI
    elif CURVE == "relu":
        c = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif CURVE == "situ":
        s = sigmoid(x, 1.0)
        t, t_slope = bounded(x, ALPHA)
        c = t * s
        slope = t_slope * s + c * (1 - s)
    else:
        tl.static_assert(CURVE == "relu2")
        c = tl.where(x <= 0, 0.0, x)
        slope = 2 * c
        c = c * c
    return c, slope


@triton.jit
def activate(g, l, ACT: tl.constexpr):
    """`(act, d act / dg, d act / dl)`, fp32; without a linear part, `l` and the last one are unused.

    A value equal to its limit still passes a gradient, as in torch.clamp.
    """
    g_slope = 1.0
    l_slope = 1.0
    if ACT.GATED and ACT.LIMIT is not None:
        g_slope = tl.where(g <= ACT.LIMIT, 1.0, 0.0)
        l_slope = tl.where(tl.abs(l) <= ACT.LIMIT, 1.0, 0.0)
        # Not tl.minimum, which on a GPU turns NaN into the limit.
        g = tl.where(g > ACT.LIMIT, ACT.LIMIT, g)
        l = tl.where(l > ACT.LIMIT, ACT.LIMIT, tl.where(l < -ACT.LIMIT, -ACT.LIMIT, l))
    if ACT.GATED and ACT.LINEAR_SCALE is not None:
        l, bounded_slope = bounded(l, ACT.LINEAR_SCALE)
        l_slope *= bounded_slope
    c, slope = curve(g, ACT.CURVE, ACT.ALPHA)
    if ACT.GATED:
        m = l + ACT.OFFSET if ACT.OFFSET != 0 else l  # adding 0 is an instruction: it makes 0 of -0
        act, by_gate, by_linear = c * m, slope * m * g_slope, c * l_slope
    else:
        act, by_gate, by_linear = c, slope, slope
    return act, by_gate, by_linear
