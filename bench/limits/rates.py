"""Constants of GPUs for `model`, each with its source and uncertainty. Nothing here was measured by this project.

Sources say which constants are fitted, within the limits of the hardware, to estimates from listings of older kernels:
beside its steps, a tile took 13,000 cycles in fc1, 2,200 in the GEMM, 17,000 in dgrad, 8,500 in wgrad, and 4,600 in a
kernel with joined loops over steps and tiles.
"""

from __future__ import annotations

from typing import NamedTuple


class Constant(NamedTuple):
    """A number and how far off it may be."""

    value: float
    within: float  # share of the value
    source: str


class Rates(NamedTuple):
    """Cycles are of a multiprocessor."""

    clock: float  # Hz
    tensor: float  # bf16 FLOP a cycle and multiprocessor
    l2: float  # bytes a cycle and multiprocessor, while all of them load or store
    memory: float  # sustained share of the datasheet's bandwidth
    issue: float  # instructions a cycle and scheduler (of four), apart from waits
    barrier: float  # cycles, of the whole block
    wait: float  # cycles of one in a step; most often its data is there
    store: float  # cycles to hand one to the TMA unit, fence and election included, or to issue it
    store_wait: float  # cycles until a store has read its buffer, beside the time of its bytes; any other wait
    trip: float  # cycles of a load from L2 that a warp waits for
    first_load: float  # cycles from the issue of a TMA load to the step that uses it, memory and L2 mixed


_COMMON = {
    "memory": Constant(0.90, 0.05, "large copies on H100 and H200 are commonly reported at 88 to 93%"),
    "issue": Constant(0.9, 0.15, "fitted; two warps a scheduler, elementwise code without loads from memory"),
    "barrier": Constant(20, 0.5, "fitted; when all warps come at about the same time"),
    "wait": Constant(10, 0.5, "estimate: one try that succeeds"),
    "store": Constant(40, 0.5, "fitted; fence, elected thread and commit"),
    "store_wait": Constant(130, 0.4, "fitted; some hundred cycles from issue until shared memory is read"),
    "trip": Constant(700, 0.3, "estimate: under 300 cycles from an idle L2, more than twice as many from a busy one"),
    "first_load": Constant(1000, 0.3, "estimate: 600 to 700 from L2 and over 1,000 from memory, when busy"),
}
RATES: dict[str, dict[str, Constant]] = {
    "sm_90": {
        "clock": Constant(1.7e9, 0.1, "estimate: power keeps products below the 1.83 GHz of the datasheet's peak"),
        "tensor": Constant(4096, 0.0, "datasheet: 989.4 TFLOP/s by 132 multiprocessors at 1.83 GHz"),
        "l2": Constant(38, 0.15, "estimate: 8.5 TB/s for 132 multiprocessors; a port is 64 bytes wide"),
    }
    | _COMMON,
    "sm_100": {
        "clock": Constant(1.7e9, 0.1, "estimate, as sm_90; the datasheet's peak is at 1.86 GHz"),
        "tensor": Constant(8192, 0.0, "datasheet: 2,250 TFLOP/s by 148 multiprocessors at 1.86 GHz"),
        # Tiles of 128 x 256 of one CTA have 85 FLOP a byte: 67 bytes a cycle at 1.7 GHz and 148 multiprocessors, 56 at
        # 2 GHz and 152.
        "l2": Constant(60, 0.15, "1,448 TFLOP/s of a GB200, in a tutorial of Triton's (gluon/08-warp-specialization)"),
    }
    | _COMMON,
}


def of(architecture: str, off: str | None = None) -> Rates:
    """Rates of an architecture; the one named `off` is slower, or takes longer, by its uncertainty."""
    values = {name: constant.value for name, constant in RATES[architecture].items()}
    if off is not None:
        faster_if_more = off in ("clock", "tensor", "l2", "memory", "issue")
        values[off] *= 1 + RATES[architecture][off].within * (-1 if faster_if_more else 1)
    return Rates(**values)
