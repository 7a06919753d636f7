"""Kernels whose MMAs truncate sums as tensor cores of sm_90 do: tolerances allow that, and little more.

Each check fails when MMAs keep two bits fewer, or three where PyTorch's own fp32 sums are allowed for, too: a CPU can
lose twice as much in these as another.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import accumulation, cases, gemm_quantized, wgrad, wgrad_quantized
from cases.factory import wgrad_segment
from emulation.layers import emulated
from gpu.checks import ALLOWED
from ptx_emulator.library import SUMS_OF_SM_90, Order
from support.eight_bit import distances
from support.eight_bit_layer import Layer as EightBitLayer

HARDWARE = Order("early", **SUMS_OF_SM_90)
FEWER, FEWEST = (replace(HARDWARE, **{name: bits - fewer for name, bits in SUMS_OF_SM_90.items()}) for fewer in (2, 3))
N, K = cases.ALIGNED
TIGHT = 1 / 4  # of the bound: the least that the largest error is


@contextmanager
def truncated(order, **options):
    with mock.patch.object(accumulation, "TRUNCATES", True), emulated("sm_90", "long", orders=[order], **options):
        yield


def errors(segment, warp_specialized):
    """The largest errors of wgrad by HARDWARE and by FEWER, as shares of the bound of their elements."""
    with truncated(HARDWARE):
        bound, exact = wgrad.lost([segment]), segment.product(torch.float64)
    for order in (HARDWARE, FEWER):
        _, experts = wgrad.main_grad("packed", len(exact), N, K)
        with truncated(order, warp_specialized=warp_specialized):
            path = wgrad.run(experts, [segment], accumulate=False, packed=True)  # no epilogue rounds
        assert (path == "warp_specialized") == warp_specialized
        error = (torch.stack(experts).double() - exact).abs()
        yield float(torch.where(error == 0, 0.0, error / bound).max())


@pytest.mark.parametrize("sign", ["either sign", "same sign"])
@pytest.mark.parametrize("warp_specialized", [False, True], ids=["default", "warp_specialized"])
@pytest.mark.parametrize("precision", [cases.BF16, cases.FP16])
def test_bound_of_wgrad(precision, warp_specialized, sign):
    segment = wgrad_segment((520, 0, 331), N, K, cases.DTYPES[precision])
    if sign == "same sign":
        segment = replace(segment, dy=segment.dy.abs(), x=segment.x.abs())
    hardware, fewer = errors(segment, warp_specialized)
    assert TIGHT <= hardware <= 1 < fewer


def test_bound_of_wgrad_in_fp32():
    """Each multiply-add rounds, and the order is not that of PyTorch."""
    segment = wgrad_segment((520, 0, 331), N, K)
    hardware, _ = errors(segment, warp_specialized=False)
    assert TIGHT <= hardware <= 1


@pytest.mark.parametrize("order", [HARDWARE, FEWER], ids=["hardware", "fewer bits"])
def test_bound_of_layers_in_8_bits(order):
    layer = EightBitLayer()
    with truncated(order):
        got = layer.results(recipe="fp8_block", wgrad="bf16", impl="triton")
    farthest = max(distances(got, layer.expected("fp8_block", "bf16", fused_bias=True)).values())
    assert (TIGHT <= farthest / ALLOWED <= 1) == (order is HARDWARE)


def named(name, precision):
    return next(case for case in cases.cases() if (case.name, case.precision, case.shape) == (name, precision, "long"))


@pytest.mark.parametrize(
    ("name", "precision", "warp_specialized"),
    [("wgrad tall", cases.FP16, False), ("wgrad tall", cases.BF16, True), ("wgrad tall segments", cases.BF16, True)],
)
def test_rule_of_wgrad(name, precision, warp_specialized):
    case = named(name, precision)
    with truncated(HARDWARE, warp_specialized=warp_specialized):
        case.run()
    with truncated(FEWEST, warp_specialized=warp_specialized), pytest.raises(AssertionError, match="dw: error"):
        case.run()


def test_rule_without_the_bound():
    """It does not allow the sums of a tensor core. An H200 had the same error."""
    with emulated("sm_90", "long", orders=[HARDWARE]), pytest.raises(AssertionError, match=r"dw: error 1\.4\de-06"):
        named("wgrad tall segments", cases.BF16).run()


EIGHT_BIT = {
    "either sign": {},
    "magnitudes that differ by 2^10 in a tile": {"spread": 10},
    "and of the same sign": {"spread": 10, "positive": True},
}


@pytest.mark.parametrize("options", EIGHT_BIT.values(), ids=EIGHT_BIT)
def test_bound_of_wgrad_in_8_bits(options):
    case = wgrad_quantized.Case("fp8_block", segments=((300,),), N=128, K=256, **options)
    with truncated(HARDWARE):
        assert TIGHT <= wgrad_quantized.check(case) <= 1
    with truncated(FEWER), pytest.raises(AssertionError, match="times what is allowed"):
        wgrad_quantized.check(case)


def test_bound_of_gemm_in_8_bits():
    case = gemm_quantized.Case("fp8_block", counts=(70, 0, 33), N=160)
    with truncated(HARDWARE):
        gemm_quantized.check(case)
    with truncated(FEWER), pytest.raises(AssertionError, match="times what is allowed"):
        gemm_quantized.check(case)
