"""fc1 of 8-bit operands with the activation and its quantization, against the launches that it stands for: every bit
of `h` and of the row copy. `h` is compared with float64, too.
"""

from dataclasses import dataclass, field

import torch

from cases import experts, gemm_quantized, quantize
from cases.experts import DEVICE
from cases.factory import GATED
from fusedmlp.activation import Activation
from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_
from fusedmlp.kernels.fc1_act.quantized_launch import grouped_fc1_act_quantized_
from fusedmlp.kernels.gemm.launch import grouped_gemm_quantized_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.operators.triton_impl import act_options


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    counts: tuple[int, ...] = (70, 0, 150, 1, 33)
    padding: int = 9
    F: int = 256
    H: int = 224
    activation: str = "swiglu"
    options: dict = field(default_factory=dict)
    bias: bool = False
    biases: str = "packed"  # where biases lie, of `experts.PLACES`
    probs: bool = True

    @property
    def of_gemm(self):
        """The case of its GEMM alone."""
        G = 2 * self.F if self.activation in GATED else self.F
        return gemm_quantized.Case(
            self.recipe, self.counts, self.padding, N=G, K=self.H, bias=self.bias, biases=self.biases
        )


def run(case, inputs, at_once):
    """`(h, row copy)` of one launch or of two, on the CPU, of which nothing was written before; and the launches."""
    num_rows, schedule = inputs.x.elements.shape[0], inputs.schedule()
    act = act_options(Activation(case.activation, **case.options).encoded)
    h = torch.full((num_rows, case.of_gemm.N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    copied = quantize.Case(case.recipe, case.counts, case.padding, C=case.F)
    a, _ = quantize.unwritten(copied, schedule.max_tiles(TILE_ROWS))
    a, x, w = (Quantized(*(t.to(DEVICE) for t in each)) for each in (a, inputs.x, inputs.w))
    own = {"bias_EG" if at_once else "bias_EN": experts.place(inputs.bias, case.biases, DEVICE) if case.bias else None}
    probs = {"probs_R": inputs.probs.to(DEVICE) if case.probs else None}
    with recording() as log:
        if at_once:
            grouped_fc1_act_quantized_(h, a, x, w, schedule, act, case.recipe, **own, **probs)
        else:
            grouped_gemm_quantized_(h, x, w, schedule, case.recipe, **own)
            grouped_act_quantize_(a, h, schedule, act, case.recipe, **probs)
    return h.cpu(), Quantized(*(t.cpu() for t in a)), [launch for launch in log if launch.name != "plan"]


def check(case):
    inputs = gemm_quantized.Inputs(case.of_gemm)
    h, a, launches = run(case, inputs, at_once=True)
    want_h, want_a, _ = run(case, inputs, at_once=False)
    owned, (launch,) = sum(case.counts), [each for each in launches if each.chosen]
    assert (launch.name, launch.path) == (f"grouped_fc1_act_{case.recipe}", "warp_specialized")
    assert (h[owned:] == 0).all()
    expected, allowed = inputs.reference()
    error = (h[:owned].double() - expected).abs()
    assert (error <= allowed).all(), f"h: error {float((error / allowed).max()):.3g} times what is allowed"
    for name, got, want in (("h", h, want_h), *zip(("elements", "scales"), a, want_a, strict=True)):
        different = got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)
        assert not different.any(), f"{name}: {int(different.sum())} bytes differ"
    return inputs, launch
