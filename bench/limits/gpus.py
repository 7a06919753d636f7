"""Ceilings of GPUs by their vendors' datasheets; a measurement has its own instead, taken in the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Rates are dense, without structured sparsity, for which datasheets give twice as much."""

    name: str
    architecture: str  # the kernels that it runs, by the names of `kernels/tiles/select.py`
    bf16_flops: float  # FLOP/s
    bandwidth: float  # bytes/s of its memory
    processors: int  # streaming multiprocessors, compute units
    source: str


GPUS = (
    GPU("H100 SXM", "sm_90", 989.4e12, 3.35e12, 132, "NVIDIA H100 datasheet: 1,979 TFLOP/s with sparsity; 3.35 TB/s"),
    GPU("H200 SXM", "sm_90", 989.4e12, 4.8e12, 132, "NVIDIA H200 datasheet: 1,979 TFLOP/s with sparsity; 4.8 TB/s"),
    GPU(
        "B200",
        "sm_100",
        2250e12,
        7.7e12,
        148,
        "NVIDIA HGX B200 datasheet: 4.5 PFLOP/s with sparsity; 7.7 TB/s (8 is a GB200's)",
    ),
    GPU("MI300X", "gfx942", 1307.4e12, 5.3e12, 304, "AMD Instinct MI300X datasheet: 1,307.4 TFLOP/s; 5.3 TB/s"),
)


def limit_ms(flops: float, num_bytes: float, flop_rate: float, bandwidth: float) -> float:
    """The least time in ms: that of the arithmetic or of the memory traffic, whichever is longer."""
    return 1e3 * max(flops / flop_rate, num_bytes / bandwidth)
