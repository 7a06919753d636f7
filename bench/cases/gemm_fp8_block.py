"""The M-ragged GEMM of 8-bit operands (recipe fp8_block) by itself, against float64 of the dequantized operands."""

from dataclasses import dataclass

import torch

from bench.cases import experts, quantize
from bench.cases.experts import DEVICE
from fusedmlp.doctor import reference as oracle
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import grouped_gemm_fp8_block_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.operators import torch_quantize

RECIPE, BLOCK = "fp8_block", 128
# Of a sum's terms: a GPU's `wgmma` of 8 bits keeps 13 bits of the fraction, the emulator's that of fp32.
FRACTION = 2.0**-12 if DEVICE == "cuda" else 2.0**-20


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...] = (70, 0, 150, 1, 33)
    padding: int = 9
    N: int = 288
    K: int = 208
    bias: bool = False
    scale: bool = False
    biases: str = "packed"  # where biases lie, of `experts.PLACES`
    dprobs: bool = False


class Inputs:
    """Quantized operands on the CPU, with NaN in what must not be read: padding rows, tiles past the last."""

    def __init__(self, case):
        self.case = case
        generator = torch.Generator().manual_seed(0)
        owned, E = sum(case.counts), len(case.counts)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        def scaled(t):
            """Blocks of magnitudes that differ, so that no scale can stand in for another."""
            blocks = [-(-size // BLOCK) for size in t.shape[-2:]]
            if t.dim() == 2:
                blocks[0] = t.shape[0]
            exponent = torch.randint(-3, 4, (*t.shape[:-2], *blocks), generator=generator)
            for dim in (-2, -1):
                size = t.shape[dim]
                if exponent.shape[dim] != size:
                    exponent = exponent.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
            return torch.ldexp(t, exponent)

        x = scaled(normal(owned, case.K)).bfloat16()
        self.w = torch_quantize.quantize(scaled(normal(E, case.N, case.K)), RECIPE, (BLOCK, BLOCK))
        self.bias = normal(E, case.N).bfloat16()
        self.probs = torch.rand(owned + case.padding, generator=generator)
        self.probs[owned:] = torch.nan
        self.partial = normal(3, owned + case.padding)
        rows, num_tiles = owned + case.padding, self.schedule().max_tiles(BLOCK)
        copied = quantize.Case(RECIPE, case.counts, case.padding, case.K)
        self.x, _ = quantize.expected(x, copied, num_tiles)
        self.x.elements[owned:].view(torch.uint8)[:] = 0x7F  # NaN
        used = sum(-(-count // BLOCK) for count in case.counts)
        self.x.scales[used:] = torch.nan
        assert self.x.elements.shape == (rows, case.K)
        self.x_values = torch_quantize.quantize(x, RECIPE, (1, BLOCK)).dequantize((1, BLOCK))
        self.w_values = self.w.dequantize((BLOCK, BLOCK))

    def schedule(self):
        case = self.case
        return experts.tiles_of(case.counts, sum(case.counts) + case.padding, DEVICE)

    def reference(self):
        """`(y, the most that it may be off)` in float64, of owned rows."""
        case = self.case
        y = oracle.gemm(self.x_values, self.w_values, case.counts)
        terms = oracle.gemm(self.x_values.abs(), self.w_values.abs(), case.counts)
        if case.bias:
            bias = self.bias.double().repeat_interleave(torch.tensor(case.counts), 0)
            y = y + (self.probs[: sum(case.counts), None].double() * bias if case.scale else bias)
        half_ulp = torch.ldexp(torch.ones_like(y), torch.frexp(y)[1] - 9)  # of bf16, which has 8 bits
        return y, half_ulp + FRACTION * terms


def run(inputs):
    """`(y of all rows, dprobs or None, launch)`."""
    case = inputs.case
    rows = inputs.x.elements.shape[0]
    y = torch.full((rows, case.N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((rows,), torch.nan, device=DEVICE) if case.dprobs else None
    x, w = (Quantized(*(t.to(DEVICE) for t in each)) for each in (inputs.x, inputs.w))
    with recording() as log:
        grouped_gemm_fp8_block_(
            y,
            x,
            w,
            inputs.schedule(),
            bias_EN=experts.place(inputs.bias, case.biases, DEVICE) if case.bias else None,
            scale_R=inputs.probs.to(DEVICE) if case.scale else None,
            dprobs=Dprobs(inputs.partial.to(DEVICE), None, out) if case.dprobs else None,
        )
    launches = [launch for launch in log if launch.chosen]
    return y.cpu(), None if out is None else out.cpu(), launches


def check(case):
    inputs = Inputs(case)
    y, dprobs, (launch,) = run(inputs)
    assert (launch.name, launch.path) == ("grouped_gemm_fp8_block", "warp_specialized")
    owned = sum(case.counts)
    assert (y[owned:] == 0).all()
    expected, allowed = inputs.reference()
    error = (y[:owned].double() - expected).abs()
    assert (error <= allowed).all(), f"error {float((error / allowed).max()):.3g} times what is allowed"
    if case.dprobs:
        torch.testing.assert_close(dprobs, inputs.partial.sum(0))
    return inputs, launch
