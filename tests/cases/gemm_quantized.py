"""The M-ragged GEMM of 8-bit operands by itself, against float64 of the dequantized operands."""

from dataclasses import dataclass

import torch

from bench.oracle import reference as oracle
from cases import accumulation, experts, quantize, quantize_weights
from cases.experts import DEVICE
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import grouped_gemm_quantized_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.tiles.table import Path, Recipe
from fusedmlp.operators import torch_quantize
from fusedmlp.recipe import BLOCKS

# Products whose sum is then scaled, outside of the tensor cores; 0: all
PROMOTED = {"fp8_block": BLOCKS["fp8_block"], "mxfp8": 0}


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    counts: tuple[int, ...] = (70, 0, 150, 1, 33)
    padding: int = 9
    N: int = 288
    K: int = 224
    bias: bool = False
    scale: bool = False
    biases: str = "packed"  # where biases lie, of `experts.PLACES`
    dprobs: bool = False
    path: Path = "warp_specialized"


class Inputs:
    """Quantized operands on the CPU, with NaN in what must not be read: padding rows, tiles past the last."""

    def __init__(self, case):
        self.case, block = case, BLOCKS[case.recipe]
        generator = torch.Generator().manual_seed(0)
        owned, E = sum(case.counts), len(case.counts)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        def scaled(t):
            """Blocks of magnitudes that differ, so that no scale can stand in for another."""
            blocks = [-(-size // block) for size in t.shape[-2:]]
            if t.dim() == 2 or case.recipe == "mxfp8":
                blocks[0] = t.shape[-2]
            exponent = torch.randint(-3, 4, (*t.shape[:-2], *blocks), generator=generator)
            for dim in (-2, -1):
                size = t.shape[dim]
                if exponent.shape[dim] != size:
                    exponent = exponent.repeat_interleave(block, dim).narrow(dim, 0, size)
            return torch.ldexp(t, exponent)

        x = scaled(normal(owned, case.K)).bfloat16()
        w = scaled(normal(E, case.N, case.K)).bfloat16()
        self.w, _ = quantize_weights.expected(w, quantize_weights.Case(case.recipe, tuple(w.shape)))
        self.bias = normal(E, case.N).bfloat16()
        self.probs = torch.rand(owned + case.padding, generator=generator)
        self.probs[owned:] = torch.nan
        self.partial = normal(3, owned + case.padding)
        rows, num_tiles = owned + case.padding, self.schedule().max_tiles(TILE_ROWS)
        copied = quantize.Case(case.recipe, case.counts, case.padding, case.K)
        self.x, _ = quantize.expected(x, copied, num_tiles)
        self.x.elements[owned:].view(torch.uint8)[:] = 0x7F  # NaN
        used = sum(-(-count // TILE_ROWS) for count in case.counts)
        self.x.scales[used:].view(torch.uint8)[:] = 0xFF  # NaN, in fp32 and in E8M0
        assert self.x.elements.shape == (rows, case.K)
        by_row, of_w = (1, block), (block, block) if case.recipe == "fp8_block" else (1, block)
        self.x_values = torch_quantize.quantize(x, case.recipe, by_row).dequantize(by_row)
        self.w_values = torch_quantize.quantize(w, case.recipe, of_w).dequantize(of_w)

    def schedule(self):
        case = self.case
        return experts.tiles_of(case.counts, sum(case.counts) + case.padding, DEVICE)

    def reference(self):
        """`(y, the most that it may be off)` in float64, of owned rows."""
        case = self.case
        y = oracle.gemm(self.x_values, self.w_values, case.counts)
        lost = [
            accumulation.lost(x.T, w.T, accumulation.sums_of(8), PROMOTED[case.recipe])
            for x, w in zip(self.x_values.split(case.counts), self.w_values, strict=True)
        ]
        allowed = torch.cat(lost)
        if case.bias:
            bias = self.bias.double().repeat_interleave(torch.tensor(case.counts), 0)
            bias = self.probs[: sum(case.counts), None].double() * bias if case.scale else bias
            y = y + bias
            allowed += 2.0**-23 * (y.abs() + bias.abs())  # two roundings in fp32
        half_ulp = torch.ldexp(torch.ones_like(y), torch.frexp(y)[1] - 9)  # of bf16, which has 8 bits
        return y, half_ulp + allowed


def run(inputs):
    """`(y of all rows, dprobs or None, launch)`."""
    case = inputs.case
    rows = inputs.x.elements.shape[0]
    y = torch.full((rows, case.N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((rows,), torch.nan, device=DEVICE) if case.dprobs else None
    x, w = (Quantized(*(t.to(DEVICE) for t in each)) for each in (inputs.x, inputs.w))
    with recording() as log:
        grouped_gemm_quantized_(
            y,
            x,
            w,
            inputs.schedule(),
            case.recipe,
            bias_EN=experts.place(inputs.bias, case.biases, DEVICE) if case.bias else None,
            scale_R=inputs.probs.to(DEVICE) if case.scale else None,
            dprobs=Dprobs(inputs.partial.to(DEVICE), None, out) if case.dprobs else None,
        )
    launches = [launch for launch in log if launch.chosen]
    return y.cpu(), None if out is None else out.cpu(), launches


def check(case):
    inputs = Inputs(case)
    y, dprobs, (launch,) = run(inputs)
    suffix = "_triton" if case.path == "pointer" else ""
    assert (launch.name, launch.path) == (f"grouped_gemm_{case.recipe}{suffix}", case.path)
    owned = sum(case.counts)
    assert (y[owned:] == 0).all()
    expected, allowed = inputs.reference()
    error = (y[:owned].double() - expected).abs()
    assert (error <= allowed).all(), f"error {float((error / allowed).max()):.3g} times what is allowed"
    if case.dprobs:
        torch.testing.assert_close(dprobs, inputs.partial.sum(0))
    return inputs, launch
