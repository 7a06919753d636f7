"""Published points, and what the model predicts for each."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from bench.limits import model, rates
from bench.limits.gpus import GPU
from bench.limits.model import Kernel, Order
from bench.limits.rates import Rates
from bench.proof.main_loop import MainLoop

_HERE = Path(__file__).parent
# GB200: 152 multiprocessors, as Triton's tutorial 12-cluster-launch-control prints; its datasheet has 8 TB/s.
GPUS = {
    "H100": GPU("H100", "sm_90", 989.4e12, 3.35e12, 132, "NVIDIA H100 datasheet"),
    "GB200": GPU("GB200", "sm_100", 2500e12, 8e12, 152, "NVIDIA GB200 NVL72 datasheet: 5 PFLOP/s with sparsity"),
    "B200": GPU("B200", "sm_100", 2250e12, 7.7e12, 148, "NVIDIA HGX B200 datasheet"),
}


class Point(NamedTuple):
    """A published figure; fields as in `points.csv`."""

    gpu: str
    machine: str
    use: Literal["fit", "other", "anchor"]
    half: str
    family: str
    loop: str
    rows: int
    columns: int
    depth: int
    warps: int
    buffers: int
    programs: int
    persistent: int
    cluster: int
    M: int
    N: int
    K: int
    dtype: str
    tflops: float
    source: str

    @property
    def architecture(self) -> str:
        """Architecture of the GPU."""
        return GPUS[self.gpu].architecture


@cache
def points() -> tuple[Point, ...]:
    """All points, in the file's order."""
    with (_HERE / "points.csv").open(encoding="utf-8") as file:
        return tuple(_point(row) for row in csv.DictReader(file))


def _point(row: dict[str, str]) -> Point:
    types = {"tflops": float} | dict.fromkeys(Point._fields[6:17], int)
    values: dict[str, Any] = {name: types.get(name, str)(row[name]) for name in Point._fields}
    return Point(**values)


@cache
def loops() -> dict[str, tuple[MainLoop, Order, bool]]:
    """`(costs, order, whether a tile's last store is waited for)` of each compiled loop."""
    with (_HERE / "loops.csv").open(encoding="utf-8") as file:
        return {row["loop"]: _loop(row) for row in csv.DictReader(file)}


def _loop(row: dict[str, str]) -> tuple[MainLoop, Order, bool]:
    costs: dict[str, Any] = {name: float(row[name]) if row.get(name) else None for name in MainLoop._fields}
    return MainLoop(**costs), cast(Order, row["order"]), row["last_store_waits"] == "1"


def kernel(point: Point) -> Kernel:
    """The kernel of a point. A cluster of two shares the columns' operand: copies of it on sm_90, halves on sm_100."""
    loop, order, last_store_waits = loops()[point.loop]
    share = 1 / point.cluster
    return Kernel(
        loop,
        point.rows,
        point.columns,
        point.depth,
        point.warps,
        point.buffers,
        stored=2,
        order=order,
        programs=point.programs,
        loads=share,
        holds=1 if point.architecture == "sm_90" else share,
        last_store_waits=last_store_waits,
    )


def predicted(point: Point, rate: Rates) -> float:
    """TFLOP/s of a point by the model."""
    gpu, about = GPUS[point.gpu], kernel(point)
    cost = model.tile_cost(about, rate)
    tiles = -(-point.M // point.rows) * -(-point.N // point.columns)
    steps = [(-(-point.K // point.depth), tiles)]
    persistent = bool(point.persistent)
    taken = model.cycles(cost, steps, gpu.processors, rate.launch, point.programs, persistent=persistent)
    flops = 2 * point.M * point.N * point.K
    num_bytes = 2 * (point.M * point.K + point.N * point.K + point.M * point.N)
    memory = num_bytes / (gpu.bandwidth * rate.memory)
    return flops / max(model.seconds(taken, flops, gpu.processors, rate), memory) / 1e12


def error(point: Point, rate: Rates) -> float:
    """Share by which the model's TFLOP/s are too high."""
    return predicted(point, rate) / point.tflops - 1


def anchored(gpu: str, machine: str) -> Rates:
    """Rates of a machine. Its clock differs from that of the machine in the fit as cuBLAS does, if cuBLAS was timed."""
    rate = rates.of(GPUS[gpu].architecture)
    by_cublas = [_cublas(gpu, name, rate) for name in (machine, "Gluon")]
    return rates.at(rate, by_cublas[0] / by_cublas[1]) if all(by_cublas) else rate


def _cublas(gpu: str, machine: str, rate: Rates) -> float:
    """Times that cuBLAS was faster on a machine than by the model, the mean of all sizes; 0 if it was not timed."""
    found = [each for each in points() if each[:3] == (gpu, machine, "anchor")]
    return sum(each.tflops / predicted(each, rate) for each in found) / max(len(found), 1)
