"""Quantization in PyTorch, against TransformerEngine's definitions written a second time, for single numbers."""

import math

import numpy as np
import pytest
import torch

from fusedmlp.operators.torch_quantize import MAX, quantize

FLOAT_MAX = float(np.finfo(np.float32).max)
BLOCKS = {"fp8_block": [(1, 128), (128, 1), (128, 128)], "mxfp8": [(1, 32), (32, 1)]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inverse_of_fp8_block(amax):
    """`1 / scale`: the largest power of two up to 448 / amax in float32."""
    if amax == 0 or math.isinf(amax):
        return 1.0
    with np.errstate(over="ignore"):
        ratio = float(np.float32(448) / np.float32(amax))
    return 2.0 ** (math.frexp(min(ratio, FLOAT_MAX))[1] - 1)


def byte_of_mxfp8(amax):
    """The smallest exponent, plus 127, of a power of two from amax / 448 on, in float32."""
    scale = float(np.float32(amax) * np.float32(1 / 448))
    return next((byte for byte in range(254) if 2.0 ** (byte - 127) >= scale), 254)


# Finite numbers from 0 to 448, by their bytes: 3 bits of mantissa, exponents from -6 on, subnormals below.
E4M3 = np.array([(8 + byte % 8) * 2.0 ** (byte // 8 - 10) if byte >= 8 else byte * 2.0**-9 for byte in range(0x7F)])


def e4m3(values):
    """Bytes of the nearest e4m3 numbers, the even one of two; the largest for what is beyond."""
    size = np.minimum(np.abs(values.astype(np.float64)), MAX)
    above = np.searchsorted(E4M3, size)
    below = np.maximum(above - 1, 0)
    down, up = size - E4M3[below], E4M3[np.minimum(above, 0x7E)] - size
    byte = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return np.where(np.isnan(values), 0x7F, byte | np.signbit(values) * 0x80)


def magnitudes():
    """10,000 random float32 of all exponents, and around every power of two times 448 and every power of two."""
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 10_000, dtype=np.uint32)
    edges = [np.float32(c * 2.0**k) for c in (1, 448) for k in range(-149, 128) if c * 2.0**k <= FLOAT_MAX]
    near = [np.nextafter(edge, np.float32(to)) for edge in edges for to in (0, np.inf)]
    special = [0.0, 3e38, FLOAT_MAX, np.inf, 1e-45, 1.17e-38]
    return np.concatenate([bits.view(np.float32), np.array([*edges, *near, *special], np.float32)])


def blocks_of(amax, width):
    """`[len(amax), width]`: rows with one element of that magnitude, of either sign, among zeros."""
    rows = torch.zeros(len(amax), width)
    rows[torch.arange(len(amax)), torch.arange(len(amax)) % width] = torch.from_numpy(amax)
    return rows * (1 - 2 * (torch.arange(len(amax)) % 2))[:, None]


def test_scales_of_fp8_block():
    amax = magnitudes()
    scales = quantize(blocks_of(amax, 128), "fp8_block", (1, 128)).scales
    assert scales.dtype == torch.float32
    expected = torch.tensor([1 / inverse_of_fp8_block(float(a)) for a in amax], dtype=torch.float64)
    assert torch.equal(scales[:, 0].double(), expected)


def test_scales_of_mxfp8():
    amax = magnitudes()
    scales = quantize(blocks_of(amax, 32), "mxfp8", (1, 32)).scales
    assert scales.dtype == torch.float8_e8m0fnu
    assert scales.view(torch.uint8)[:, 0].tolist() == [byte_of_mxfp8(float(a)) for a in amax]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "block"), [(name, block) for name in BLOCKS for block in BLOCKS[name]])
def test_elements(recipe, block, dtype):
    """Rows of different size, ties, subnormals, zeros of both signs, infinities and NaN; blocks that are cut short."""
    x = torch.randn(160, 144, generator=torch.Generator().manual_seed(0))
    x *= torch.exp2(torch.arange(-80.0, 80)[:, None] / 4)
    x[:, 3:7] = torch.tensor([MAX, 1.0625, -1.1875, 2.0**-10])  # the second and third lie between two numbers
    x[40:80] = 0.0
    x[60:70, ::2] = -0.0
    x[80, 5], x[90, 100], x[100, 0], x[110] = torch.inf, -torch.inf, torch.nan, torch.nan
    x = x.to(dtype)
    elements, scales = quantize(x, recipe, block)
    assert elements.shape == x.shape
    m, n = block
    assert scales.shape == (math.ceil(160 / m), math.ceil(144 / n))
    inverse = np.empty(x.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * m, i * m + m), slice(j * n, j * n + n)
            values = x[own].float()
            amax = float(values[~values.isnan()].abs().max()) if (~values.isnan()).any() else 0.0
            of_block = inverse_of_fp8_block(amax) if recipe == "fp8_block" else 2.0 ** (127 - byte_of_mxfp8(amax))
            assert float(scales[i, j].float()) == 1 / of_block
            inverse[own] = of_block
    expected = e4m3(x.float().numpy() * inverse)
    np.testing.assert_array_equal(elements.view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_values_are_close_and_a_second_quantization_changes_nothing(recipe):
    """An element loses at most half of its last bit, or of the smallest number; values in 8 bits are kept."""
    x = torch.randn(2, 70, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    block = BLOCKS[recipe][0]
    quantized = quantize(x, recipe, block)
    values = quantized.dequantize(block)
    scales = quantized.scales.float().double().repeat_interleave(block[1], -1)[..., : x.shape[-1]]
    assert ((values - x.double()).abs() <= torch.maximum(x.double().abs() / 16, scales * 2.0**-10)).all()
    again = quantize(values.float(), recipe, block)
    assert torch.equal(again.dequantize(block), values)
