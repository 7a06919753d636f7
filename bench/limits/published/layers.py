"""Whole layers: SonicMoE's, as published and by the model with nothing but the clock fitted, and this library's."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.limits import layer, model, rates
from bench.limits.layer import HIDDEN, OURS, WRITES
from bench.limits.published.points import GPUS
from bench.limits.rates import Rates
from bench.limits.shapes import SHAPES, Shape, even

_GPU = GPUS["H100"]
_CLOCKS = [percent / 100 for percent in range(60, 131)]  # of the machine in the fit of the points
COMPARED = ("sonic-a", "sonic-b", "sonic-c", "sonic-d")


class Published(NamedTuple):
    """A bar of the figure; `shape` with all rows gathered from tokens."""

    shape: Shape
    top_k: int
    direction: str
    tflops: float
    half: str


@cache
def published() -> tuple[Published, ...]:
    """All bars, in the file's order."""
    with Path(__file__).with_name("layers.csv").open(encoding="utf-8") as file:
        return tuple(_published(row) for row in csv.DictReader(file))


def _published(row: dict[str, str]) -> Published:
    T, H, F, E, top_k = (int(row[name]) for name in ("T", "H", "F", "E", "top_k"))
    shape = Shape(row["model"], E, H, F, T * top_k, T)
    return Published(shape, top_k, row["direction"], float(row["tflops"]), row["half"])


def predicted(of: Published, rate: Rates) -> float:
    """TFLOP/s of SonicMoE's layer by the model."""
    shape = of.shape
    found = layer.times(_GPU, shape, even(shape), model.facts(_GPU.architecture), rate, WRITES)
    us = found.forward if of.direction == "forward" else found.backward
    return layer.flops(shape, of.direction) / us / 1e6


def errors(of: Sequence[Published], rate: Rates) -> list[float]:
    """Shares by which the model's TFLOP/s are too high."""
    return [predicted(each, rate) / each.tflops - 1 for each in of]


def fit(of: Sequence[Published]) -> Rates:
    """Rates of the machine, by the clock with the least mean error."""
    machines = [rates.at(rates.of(_GPU.architecture), clock) for clock in _CLOCKS]
    return min(machines, key=lambda rate: statistics.mean(map(abs, errors(of, rate))))


def held_out() -> list[float]:
    """Errors of each layer by the clock that is fitted to the other half."""
    halves = {half: [each for each in published() if each.half == half] for half in "ab"}
    return errors(halves["a"], fit(halves["b"])) + errors(halves["b"], fit(halves["a"]))


def rows() -> Iterator[dict[str, Any]]:
    """One row per published layer and direction, by the clock that fits all."""
    rate = fit(published())
    for each in published():
        shape, by_model = each.shape, predicted(each, rate)
        sizes = {"T": shape.most, "H": shape.H, "F": shape.F, "E": shape.E, "top_k": each.top_k}
        figures = {"tflops": each.tflops, "predicted": by_model, "error": by_model / each.tflops - 1}
        yield {"row": "layer", "direction": each.direction} | sizes | figures


def compared() -> Iterator[dict[str, Any]]:
    """One row per shape: backward of this library and of SonicMoE, in TFLOP/s.

    Passes alone, on sorted rows, are all by the model, at the clock of the points' machine: ours; the same kernels
    where wgrad writes bf16, as SonicMoE's does; and those if every epilogue were hidden, which no design exceeds. Whole
    layers are SonicMoE's as published, and followed by `main_grad.add_`; ours take its time, longer by the ratio that
    the model gives for ours and the kernels that write.
    """
    by, machine = model.facts(_GPU.architecture), fit(published())
    for shape in (each for each in SHAPES if each.name in COMPARED):
        rows, flops = even(shape), layer.flops(shape, "backward")
        (bar,) = (each for each in published() if each.direction == "backward" and _same(each.shape, shape))
        alone, whole = (
            [layer.times(_GPU, shape, rows, by, rate, design) for design in (OURS, WRITES, HIDDEN)]
            for rate in (rates.of(_GPU.architecture), machine)
        )
        us = flops / bar.tflops / 1e6
        yield {
            "row": "backward",
            "shape": shape.name,
            "gemms": flops / alone[0].backward_gemms / 1e6,
            "gemms_writing": flops / alone[1].backward_gemms / 1e6,
            "gemms_hidden": flops / alone[2].backward_gemms / 1e6,
            "published": bar.tflops,
            "published_and_added": flops / (us + layer.add_us(shape, _GPU)) / 1e6,
            "layer": flops / (us * whole[0].backward / whole[1].backward) / 1e6,
        }


def _same(one: Shape, other: Shape) -> bool:
    return replace(one, name=other.name) == other
