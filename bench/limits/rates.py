"""Constants of GPUs for `model`, each with its source. Nothing here was measured by this project.

Most are fitted to published measurements, from round numbers, by `python -m bench.limits.published.fit`. `WITHIN` is
the error that covers nine of ten points which had no part in the fit (`published.table.held_out`).
"""

from __future__ import annotations

from typing import NamedTuple


class Constant(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


class Rates(NamedTuple):
    """Cycles are of a multiprocessor."""

    clock: float  # Hz, if tensor cores multiplied in every cycle: power sets it
    clock_falls: float  # the clock is in proportion to the share of such cycles to the power of minus this
    clock_most: float  # Hz, of the datasheet's boost
    tensor: float  # bf16 FLOP a cycle and multiprocessor
    tensor_rows: float  # rows that one read of the other operand serves
    shared: float  # bytes a cycle of shared memory, for TMA's writes and the MMAs' reads
    l2: float  # bytes a cycle and multiprocessor, while all of them load or store
    memory: float  # sustained share of the datasheet's bandwidth
    latency: float  # cycles from the issue of a TMA load to its first bytes, memory and L2 mixed
    port: float  # bytes a cycle of one load after that
    gap: float  # cycles between a product's end, where a warp waits for it, and the next product
    issue: float  # instructions a cycle and scheduler (of four), apart from waits
    barrier: float  # cycles, of the whole block
    wait: float  # cycles of one in a step; most often its data is there
    store: float  # cycles to hand one to the TMA unit, fence and election included, or to issue it
    store_wait: float  # cycles until a store has read its buffer, beside the time of its bytes; any other wait
    trip: float  # cycles of a load from L2 that a warp waits for
    tile: float  # cycles of a tile that no other constant explains
    launch: float  # cycles until a block's first instruction


_FIT = "fitted to published measurements"
_COMMON = {
    "shared": Constant(128, "a bank's 4 bytes by 32 banks, as CUDA's programming guide has it"),
    "memory": Constant(0.90, "large copies on H100 and H200 are commonly reported at 88 to 93%"),
    "issue": Constant(0.9, "estimate: two warps a scheduler, elementwise code without loads from memory"),
    "barrier": Constant(20, "estimate: when all warps come at about the same time"),
    "wait": Constant(10, "estimate: one try that succeeds"),
    "store": Constant(40, "estimate: fence, elected thread and commit"),
    "store_wait": Constant(130, "estimate: some hundred cycles from issue until shared memory is read"),
    "trip": Constant(700, "estimate: under 300 cycles from an idle L2, more than twice as many from a busy one"),
}
RATES: dict[str, dict[str, Constant]] = {
    "sm_90": _COMMON
    | {
        "clock": Constant(1.291e9, _FIT),
        "clock_falls": Constant(0.343, _FIT + "; power in proportion to the clock's cube gives 1/3"),
        "clock_most": Constant(1.98e9, "highest clock of an H100 SXM by nvidia-smi, as commonly reported"),
        "tensor": Constant(4096, "datasheet: 989.4 TFLOP/s by 132 multiprocessors at 1.83 GHz"),
        "tensor_rows": Constant(64, "PTX ISA: wgmma has 64 rows"),
        "l2": Constant(48.9, _FIT),
        "latency": Constant(1067, _FIT),
        "port": Constant(45.5, _FIT),
        "gap": Constant(39.9, _FIT),
        "tile": Constant(499, _FIT),
        "launch": Constant(498.7, _FIT),
    },
    "sm_100": _COMMON
    | {
        "clock": Constant(1.155e9, _FIT),
        "clock_falls": Constant(0.576, _FIT),
        "clock_most": Constant(1.92e9, "highest clock of a GB200, as commonly reported"),
        "tensor": Constant(8192, "datasheet: 2,250 TFLOP/s by 148 multiprocessors at 1.86 GHz"),
        "tensor_rows": Constant(128, "PTX ISA: tcgen05.mma has 128 rows"),
        "l2": Constant(64.8, _FIT),
        "latency": Constant(1053, _FIT),
        "port": Constant(44.8, _FIT),
        "gap": Constant(40, _FIT),
        "tile": Constant(496.7, _FIT),
        "launch": Constant(500, _FIT),
    },
}
WITHIN = {"sm_90": 0.13, "sm_100": 0.15}
# cuBLAS at 8192 cubed in 16 bits, TFLOP/s, on the machines that constants are fitted to: Triton's tutorials
# 07-persistence (H100) and 14-multicta (GB200). Other machines are slower or faster by these factors at most, by the
# cuBLAS that other points have beside them (H100), and that three tutorials have (GB200).
CUBLAS = {"sm_90": 661.11, "sm_100": 1347.82}
MACHINES = {"sm_90": (0.94, 1.20), "sm_100": (0.97, 1.11)}


def of(architecture: str) -> Rates:
    """Rates of an architecture."""
    return Rates(**{name: constant.value for name, constant in RATES[architecture].items()})


def at(rate: Rates, factor: float) -> Rates:
    """Rates of a machine of that kind whose clock is higher by a factor."""
    return rate._replace(clock=rate.clock * factor)


def anchored(architecture: str, cublas: float | None) -> list[Rates]:
    """Rates of the machine where cuBLAS reaches that many TFLOP/s at 8192 cubed. Without it: of the machine that
    constants are fitted to, and of the slowest and the fastest that is known.

    Empty if a machine of that architecture that reaches this is not to be expected.
    """
    rate, (slowest, fastest) = of(architecture), MACHINES[architecture]
    if cublas is None:
        return [rate, at(rate, slowest), at(rate, fastest)]
    factor = cublas / CUBLAS[architecture]
    return [at(rate, factor)] if 0.8 * slowest <= factor <= 1.2 * fastest else []
