"""Rows in the fields of TransformerEngine's `Float8BlockwiseQTensor`, by a stand-in with the same fields."""

import pytest
import torch
from support.blockwise_rows import Rows
from support.eight_bit import magnitudes
from torch.nn import Parameter

import fusedmlp
from fusedmlp.integrations.transformer_engine import plain_rows
from fusedmlp.operators.torch_quantize import quantize

COUNTS, H, F = [130, 0, 141, 1], 256, 128
R = sum(COUNTS) + 1


def rows(seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(R, H, generator=generator) * magnitudes((R, H), generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_that_were_sent(dtype):
    x = rows(dtype=dtype)
    got = plain_rows(Rows(x))
    assert type(got) is torch.Tensor
    assert got.dtype == dtype
    sent = quantize(x.float(), "fp8_block", (1, 128)).dequantize((1, 128))
    assert torch.equal(got.double(), sent)
    assert plain_rows(x) is x


def test_a_layer_multiplies_them_unrounded():
    """With fp8_block a second quantization changes nothing; the gradient of x flows into what made the rows."""
    x, dy = rows(), rows(1)
    generator = torch.Generator().manual_seed(2)
    shapes = (4, 2 * F, H), (4, H, F)
    weights = [Parameter((torch.randn(*shape, generator=generator) / 16).bfloat16()) for shape in shapes]
    sent = quantize(x.float(), "fp8_block", (1, 128)).dequantize((1, 128), torch.bfloat16)
    results = []
    for given in (x, sent, Rows(x)):
        leaf = given.requires_grad_()
        y = fusedmlp.grouped_mlp(plain_rows(leaf), *weights, COUNTS, recipe="fp8_block")
        results.append([y, *torch.autograd.grad(y, [leaf, *weights], dy)])
    in_bf16, expected, got = results
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)
    assert torch.equal(got[0], in_bf16[0])  # fc1 multiplies the same values as with rows that it quantizes itself
    assert got[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"_fp8_dtype": "DType.kFloat8E5M2"}, TypeError, r"expected .* e4m3.*; got a Rows of DType\.kFloat8E5M2"),
        ({"_is_2D_scaled": True}, TypeError, "_is_2D_scaled=True"),
        ({"_is_2D_scaled": None}, TypeError, "_is_2D_scaled=None"),  # as of an MXFP8Tensor, without it
        ({"_rowwise_data": None}, TypeError, "got a Rows of columns alone"),
        ({"_rowwise_scale_inv": torch.ones(3, R)}, ValueError, rf"got \({R}, {H}\), and scales \(3, {R}\)"),
        ({"_rowwise_scale_inv": torch.ones(2, R - 1)}, ValueError, rf"at least {R}\]"),
        ({"_rowwise_data": torch.zeros(R, 200).byte()}, ValueError, "multiple of 128"),
    ],
)
def test_other_fields_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        plain_rows(Rows(rows(), **fields))
