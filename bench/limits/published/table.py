"""Rows of `bench --model --published`: errors by family of kernels, steps of a design, and errors held out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.limits import rates
from bench.limits.published import fit, layers
from bench.limits.published.points import GPUS, Point, anchored, error, points, predicted
from bench.limits.rates import Rates


class Errors(NamedTuple):
    """Errors of TFLOP/s as shares, without sign."""

    points: int
    median: float
    ninety: float  # nine of ten are at most that


class Step(NamedTuple):
    """A change of a kernel's design that was measured: two families on one machine."""

    title: str
    gpu: str
    before: str
    after: str


STEPS = (
    Step("a load, then its product -> 3 stages", "H100", "05a 128x256x256 w8 occ1", "07a BK64 b3"),
    Step("2 -> 3 stages", "H100", "07a BK128 b2", "07a BK64 b3"),
    Step("2 -> 3 stages, persistent", "H100", "07b BK128 b2", "07b BK64 b3"),
    Step("3 -> 4 stages", "H100", "07a BK64 b3", "07a BK64 b4"),
    Step("3 -> 4 stages, persistent", "H100", "07b BK64 b3", "07b BK64 b4"),
    Step("persistent", "H100", "07 nonpers", "07 pers"),
    Step("stores under the next tile", "H100", "07 pers", "07 pipel"),
    Step("persistent, warp-specialized", "H100", "meta-a TLX ws nonpersistent", "meta-a TLX ws persistent"),
    Step("multicast, and 3 -> 4 stages", "H100", "meta-b TLX ws persistent", "meta-b TLX ws persistent multicast"),
    Step("2 -> 3 stages", "GB200", "07a BK128 b2 w4", "07a BK64 b3 w4"),
    Step("2 -> 3 stages, persistent", "GB200", "07b BK128 b2 w4", "07b BK64 b3 w4"),
    Step("3 -> 4 stages", "GB200", "07a BK64 b3 w4", "07a BK64 b4 w4"),
    Step("3 -> 4 stages, persistent", "GB200", "07b BK64 b3 w4", "07b BK64 b4 w4"),
    Step("3 -> 4 stages, 8 warps", "GB200", "07a BK64 b3 w8", "07a BK64 b4 w8"),
    Step("3 -> 4 stages, 8 warps, persistent", "GB200", "07b BK64 b3 w8", "07b BK64 b4 w8"),
    Step("persistent", "GB200", "07 nonpers", "07 pers"),
    Step("stores under the next tile", "GB200", "07 pers", "07 pipel"),
    Step("warp-specialized", "GB200", "07 pipel", "08 ws"),
    Step("pairs of CTAs", "GB200", "08 ws", "14 2cta"),
    Step("groups of 8 rows of tiles", "GB200", "07g group1", "07g group8"),
)


def fitted(architecture: str, half: str = "") -> list[Point]:
    """Points that constants are fitted to: all, or those of a half."""
    found = (each for each in points() if each.use == "fit" and each.architecture == architecture)
    return [each for each in found if half in ("", each.half)]


def errors(of: Sequence[Point], rate: Rates) -> list[float]:
    """Errors of the points, as shares without sign."""
    return [abs(error(each, rate)) for each in of]


def summary(of: Sequence[float]) -> Errors:
    """Median and ninth decile of errors."""
    return Errors(len(of), statistics.median(of), statistics.quantiles(of, n=10, method="inclusive")[8])


def held_out(architecture: str) -> dict[str, Errors]:
    """Errors of each half by constants fitted to the other, and of both: each point by a fit that it had no part in."""
    halves = {half: fitted(architecture, half) for half in "ab"}
    found = {half: errors(halves[half], fit.fit(halves[other])) for half, other in ("ab", "ba")}
    return {half: summary(each) for half, each in found.items()} | {"both": summary(found["a"] + found["b"])}


def rate_of(point: Point) -> Rates:
    """Rates of a point's machine: those of its architecture, with the clock that cuBLAS shows on another machine."""
    return rates.of(point.architecture) if point.use == "fit" else anchored(point.gpu, point.machine)


def point_rows() -> Iterator[dict[str, Any]]:
    """One row per point whose kernel is known."""
    for point in points():
        if point.use != "anchor":
            by_model = predicted(point, rate_of(point))
            yield {"row": "point"} | point._asdict() | {"predicted": by_model, "error": by_model / point.tflops - 1}


def family_rows(of: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per GPU, machine and family of kernels: its points, their TFLOP/s and mean and largest error."""
    families = dict.fromkeys((row["gpu"], row["machine"], row["family"]) for row in of)
    for gpu, machine, family in families:
        rows = [row for row in of if (row["gpu"], row["machine"], row["family"]) == (gpu, machine, family)]
        by_row = [row["error"] for row in rows]
        yield {
            "row": "family",
            "gpu": gpu,
            "machine": machine,
            "family": family,
            "use": rows[0]["use"],
            "points": len(rows),
            "measured": statistics.mean(row["tflops"] for row in rows),
            "predicted": statistics.mean(row["predicted"] for row in rows),
            "error": statistics.mean(by_row),
            "largest": max(by_row, key=abs),
        }


def step_rows(of: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per design step and size: how much faster it was, and is by the model."""
    by_size = {(row["gpu"], row["family"], row["M"], row["N"], row["K"]): row for row in of}
    for step in STEPS:
        for (gpu, family, *size), before in by_size.items():
            after = by_size.get((gpu, step.after, *size))
            if (gpu, family) == (step.gpu, step.before) and after:
                measured, modelled = (after[name] / before[name] - 1 for name in ("tflops", "predicted"))
                sizes = dict(zip("MNK", size, strict=True))
                yield {"row": "step"} | step._asdict() | sizes | {"measured": measured, "predicted": modelled}


def held_out_rows() -> Iterator[dict[str, Any]]:
    """One row per GPU, and half or both."""
    for gpu in ("H100", "GB200"):
        for half, found in held_out(GPUS[gpu].architecture).items():
            yield {"row": "held out", "gpu": gpu, "tested": half} | found._asdict()


def rows() -> list[dict[str, Any]]:
    """All rows: points, families, steps, errors held out, layers, and layers with this library's beside them."""
    of = list(point_rows())
    return [*of, *family_rows(of), *step_rows(of), *held_out_rows(), *layers.rows(), *layers.compared()]
