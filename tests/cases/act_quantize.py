"""The activation between 8-bit GEMMs by itself: copies against quantized results of the 16-bit passes and of PyTorch.

The passes fc1_act and dgrad_act get identities for weights, so their `h` and `d` are what they read.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch

from cases import experts, quantize
from cases.experts import DEVICE
from cases.factory import GATED
from fusedmlp.activation import Activation
from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_, grouped_dgrad_act_quantize_
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.operators import torch_activation
from fusedmlp.operators.triton_impl import act_options

# Outputs of backward; the row copy of `a`, "a rows", is the forward's.
OUTPUTS = ("dh rows", "dh tokens", "a tokens", "dh", "a")


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    counts: tuple[int, ...] = (130, 0, 70, 1)
    padding: int = 5
    F: int = 128
    activation: str = "swiglu"
    options: dict = field(default_factory=dict)
    probs: bool = True
    outputs: tuple[str, ...] = OUTPUTS

    @property
    def kind(self):
        return Activation(self.activation, **self.options)

    @property
    def G(self):
        return 2 * self.F if self.activation in GATED else self.F

    def copies(self, C):
        """The case of `quantize` with copies of a matrix of C columns."""
        return quantize.Case(self.recipe, counts=self.counts, padding=self.padding, C=C)


def inputs(case, seed=0):
    """`h`, `d` and `probs`: `d` has any magnitude, and padding rows are NaN."""
    generator = torch.Generator().manual_seed(seed)
    owned, num_rows = sum(case.counts), sum(case.counts) + case.padding
    made = SimpleNamespace(
        h=2.0 * torch.randn(num_rows, case.G, generator=generator).bfloat16(),
        d=quantize.values(num_rows, case.F, torch.bfloat16, seed),
        probs=torch.rand(num_rows, generator=generator),
    )
    for t in (made.h, made.d, made.probs):
        t[owned:] = torch.nan
    return made


def by_torch(case, given, dtype=torch.bfloat16):
    """`a`, `dh` and `dprobs` of owned rows as the `torch` implementation computes them; unrounded in float64."""
    owned, wide = sum(case.counts), torch.promote_types(dtype, torch.float32)
    h, d = given.h[:owned].to(wide), given.d[:owned].to(wide)
    p = given.probs[:owned, None].to(wide) if case.probs else torch.ones(owned, 1, dtype=wide)
    act, dh = torch.empty_like(d), torch.empty_like(h)
    torch_activation.backward(case.kind, h, d * p, act, dh)
    return {"a": (act * p).to(dtype), "dh": dh.to(dtype), "dprobs": (d * act).sum(1)}


def by_16_bits(case, given):
    """The same by the kernels of layers in 16 bits, of all rows."""
    act, num_rows = act_options(case.kind.encoded), given.h.shape[0]
    schedule = experts.tiles_of(case.counts, num_rows, DEVICE)
    eyes = [torch.eye(n).bfloat16().repeat(len(case.counts), 1, 1) for n in (case.G, case.F)]
    eye_G, eye_F = (experts.place(eye, "packed", DEVICE) for eye in eyes)
    probs = given.probs.to(DEVICE) if case.probs else None
    h, dh = torch.empty(2, num_rows, case.G, dtype=torch.bfloat16, device=DEVICE)
    forward, a = torch.empty(2, num_rows, case.F, dtype=torch.bfloat16, device=DEVICE)
    grouped_fc1_act_(h, forward, given.h.to(DEVICE), eye_G, schedule, act, probs_R=probs)
    partial = grouped_dgrad_act_(dh, a, given.d.to(DEVICE), h, eye_F, schedule, act, probs_R=probs)
    assert torch.equal(forward.view(torch.int16), a.view(torch.int16))
    return {"a": a.cpu(), "dh": dh.cpu(), **({} if partial is None else {"dprobs": partial.sum(0).cpu()})}


def run(case, given):
    """All outputs by name, on the CPU, of which an absent one is unwritten, and the launches."""
    num_rows = given.h.shape[0]
    schedule = experts.tiles_of(case.counts, num_rows, DEVICE)
    num_tiles, act = schedule.max_tiles(128), act_options(case.kind.encoded)

    def unwritten(C):
        return [Quantized(*(t.to(DEVICE) for t in copy)) for copy in quantize.unwritten(case.copies(C), num_tiles)]

    made = dict(
        zip(("a rows", "a tokens", "dh rows", "dh tokens"), [*unwritten(case.F), *unwritten(case.G)], strict=True)
    )
    for name, C in (("a", case.F), ("dh", case.G)):
        made[name] = torch.full((num_rows, C), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    probs = given.probs.to(DEVICE) if case.probs else None
    *copies, dh, a = (made[name] if name in case.outputs else None for name in OUTPUTS)
    h, d = given.h.to(DEVICE), given.d.to(DEVICE)
    with recording() as log, np.errstate(invalid="ignore", over="ignore"):  # the interpreter computes with numpy
        grouped_act_quantize_(made["a rows"], h, schedule, act, case.recipe, probs_R=probs)
        made["partial"] = grouped_dgrad_act_quantize_(
            *copies, d, h, schedule, act, case.recipe, probs_R=probs, dh_RG=dh, a_RF=a
        )
    assert (made["partial"] is None) == (not case.probs)
    found = {name: None if t is None else _to_cpu(t) for name, t in made.items()}
    return found, [launch for launch in log if launch.name.endswith("act_quantize")]


def _to_cpu(t):
    return t.cpu() if torch.is_tensor(t) else Quantized(*(part.cpu() for part in t))


def check_copies(case, found, rounded):
    """All bytes of the copies, which are those of `rounded`: `a` and `dh` of owned rows in 16 bits."""
    num_tiles = found["a tokens"].elements.shape[0]
    for of, C in (("a", case.F), ("dh", case.G)):
        copies = case.copies(C)
        pairs = zip(
            ("rows", "tokens"),
            quantize.expected(rounded[of], copies, num_tiles),
            quantize.unwritten(copies, num_tiles),
            strict=True,
        )
        for kind, full, none in pairs:
            name = f"{of} {kind}"
            want = full if name in (*case.outputs, "a rows") else none
            for what, got, wanted in zip(Quantized._fields, found[name], want, strict=True):
                different = got.view(torch.uint8) != wanted.view(torch.uint8)
                assert not different.any(), f"{name}, {what}: {int(different.sum())} bytes differ"


def check_rounded(case, found, rounded):
    """`a` and `dh` in 16 bits, zero at padding rows; nothing where they are not asked for."""
    owned = sum(case.counts)
    for of in ("a", "dh"):
        if of in case.outputs:
            assert (found[of][owned:] == 0).all(), f"{of}: padding rows"
            different = found[of][:owned].view(torch.int16) != rounded[of][:owned].view(torch.int16)
            assert not different.any(), f"{of}: {int(different.sum())} elements differ"
        else:
            assert found[of].isnan().all()


def check_dprobs(case, found, given):
    """Sums within the rounding of float32 of the sum of magnitudes, zero at padding rows."""
    if not case.probs:
        return
    owned = sum(case.counts)
    assert (found["partial"][:, owned:] == 0).all()
    exact, p = by_torch(case, given, torch.float64), given.probs[:owned, None].double()
    size = (given.d[:owned].double() * exact["a"] / p).abs().sum(1)
    error = (found["partial"].sum(0)[:owned].double() - exact["dprobs"]).abs()
    assert (error <= size * 2.0**-18).all(), f"dprobs: {float((error / size).max())} of the sum of magnitudes"


def check_close(case, found, given):
    """`a` and `dh` against the `torch` implementation: an ulp of bfloat16, and what fp32 leaves of a cancelled sum."""
    owned, want = sum(case.counts), by_torch(case, given)
    h, d = given.h[:owned].float(), given.d[:owned].float()
    gate, linear = case.kind.split(h) if case.kind.gated else (h, torch.zeros(()))
    size = (1 + gate.abs()) * (1 + linear.abs() + abs(case.kind.linear_offset))
    sizes = {"a": size, "dh": size * d.abs()}
    for of in ("a", "dh"):
        allowed = sizes[of] * 2.0**-20
        if of == "dh" and case.kind.gated:
            allowed = torch.empty_like(h)
            for part in case.kind.split(allowed):
                part.copy_(sizes[of] * 2.0**-20)
        error = (found[of][:owned].float() - want[of].float()).abs()
        assert (error <= want[of].float().abs() * 2.0**-7 + allowed).all(), of


def check(case, given=None):
    """Every byte against the kernels of 16 bits, values against PyTorch."""
    given = given or inputs(case)
    found, launches = run(case, given)
    rounded = by_16_bits(case, given)
    check_copies(case, found, {of: rounded[of] for of in ("a", "dh")})
    check_rounded(case, found, rounded)
    check_dprobs(case, found, given)
    if {"a", "dh"} <= {*case.outputs}:
        check_close(case, found, given)
    return found, launches


def without(case, name):
    """The case without one output."""
    return replace(case, outputs=tuple(each for each in case.outputs if each != name))
