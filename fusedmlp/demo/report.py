"""Output of the demo: a table, a picture and a JSON file."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict
from io import BytesIO

import torch
from matplotlib.figure import Figure

from fusedmlp.demo.compare import MOST, SLACK, Beside, Measured, Results
from fusedmlp.demo.train import Column
from fusedmlp.version import __version__

_PLAIN, _FUSED = "plain autograd", "fusedmlp"
_PALE, _DARK, _BOUND = "#9ecae1", "#08306b", "#d94801"
_OF_RECIPES = {"bf16": "#238b45", "fp8_block": "#6a51a3", "mxfp8": "#6a51a3"}


def table(results: Results) -> str:
    """Format the columns and the verdicts on the loss curves as text."""
    columns = {name: _cells(column) for name, column in _columns(results).items()}
    rows = [("", *columns), *((cell, *(cells[cell] for cells in columns.values())) for cell in columns[_PLAIN])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *">" * len(columns)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", verdict(results), *(_beside(name, run) for name, run in results.recipes.items())])


def _columns(results: Results) -> dict[str, Measured]:
    recipes = {f"{_FUSED} {name}": beside.measured for name, beside in results.recipes.items()}
    return {_PLAIN: results.plain, _FUSED: results.fused} | recipes


def _cells(column: Measured) -> dict[str, str]:
    peak = column.step.peak_bytes
    return {
        "final training loss, nats/byte": f"{column.final_loss:.4f}",
        "held-out loss, nats/byte": f"{column.held_out_loss:.4f}",
        "ms per step, median": f"{column.ms:.1f}",
        "peak weight-gradient memory, bytes": "not counted" if peak is None else f"{peak:,}",
        "AccumulateGrad copies of expert weights per step": str(column.step.copies),
        "AccumulateGrad adds to expert weights per step": str(column.step.adds),
    }


def verdict(results: Results) -> str:
    """One line: how far the curves are apart, and whether that is rounding."""
    curves = results.agreement
    step = curves.worst_step
    says = "agree to rounding" if curves.agree else "DO NOT AGREE"
    return (
        f"The loss curves {says}: largest difference {curves.difference[step]:.1e} nats/byte, at step {step + 1}, "
        f"where the bound is {curves.bound[step]:.1e}."
    )


def _beside(recipe: Column, beside: Beside) -> str:
    """One line: how far the losses of a run with a recipe are from those of the run beside it."""
    other = "fp32" if beside.other == "fused" else beside.other
    if not beside.computed:
        return f"{recipe} DID NOT COMPUTE in its format: its first loss equals that of {other}."
    step, most = beside.worst
    says = "stays" if beside.passed else "DOES NOT STAY"
    return (
        f"{recipe} {says} within {MOST:.0%} of {other}: losses differ by {beside.difference[0]:.1e} of their value at "
        f"step 1, and by at most {most:.1e}, at step {step + 1}."
    )


def as_json(results: Results) -> str:
    """Format all results as JSON.

    `losses` are in nats per byte, one per step; a `difference` of `recipes` is a part of the loss of the run `beside`.
    """
    curves = results.agreement
    document = {
        "versions": {"fusedmlp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": asdict(results.settings),
        "columns": {name: asdict(column) for name, column in _columns(results).items()},
        "curves": {
            "agree": curves.agree,
            "largest_difference": curves.difference[curves.worst_step],
            "at_step": curves.worst_step + 1,
            "bound_there": curves.bound[curves.worst_step],
            "bound": curves.bound,
        },
        "losses": results.losses,
        "recipes": {
            name: {"beside": beside.other, "difference": beside.difference, "passed": beside.passed}
            for name, beside in results.recipes.items()
        },
        "passed": results.passed,
    }
    return json.dumps(document, indent=2)


def draw(results: Results) -> bytes:
    """Return the picture as PNG: the loss curves, and below, differences from `plain` with the bound for `fused`."""
    steps = range(1, results.settings.steps + 1)
    figure = Figure(figsize=(8, 6.5), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 1])

    model = results.settings.model
    figure.suptitle(
        f"Byte-level MoE language model ({model.layers} layers, {model.experts} experts): same loss with and without "
        "gradient fusion",
        fontsize=11,
    )
    upper.plot(steps, results.losses["plain"], color=_PALE, linewidth=6, solid_capstyle="round", label=_PLAIN)
    upper.plot(steps, results.losses["fused"], color=_DARK, linewidth=1.3, linestyle=(0, (4, 2)), label=_FUSED)
    for recipe in results.recipes:
        upper.plot(steps, results.losses[recipe], color=_OF_RECIPES[recipe], linewidth=1, label=f"{_FUSED} {recipe}")
    upper.set_ylabel("training loss (nats per byte)")
    upper.legend(frameon=False)

    curves = results.agreement
    lower.plot(
        steps,
        curves.bound,
        color=_BOUND,
        linewidth=1.5,
        label=f"bound: {SLACK} ulp, then {SLACK}x the control's largest",
    )
    for values, color, name in (
        (_from_plain(results, "control"), _PALE, "control: closest routing decisions flipped"),
        (curves.difference, _DARK, f"{_FUSED} (zeros are not shown)"),
        *((_from_plain(results, name), _OF_RECIPES[name], f"{_FUSED} {name}") for name in results.recipes),
    ):
        visible = [value if value > 0 else math.nan for value in values]
        lower.plot(steps, visible, color=color, linestyle="none", marker=".", markersize=4, label=name)
    lower.set_yscale("log")
    lower.set_ylabel("|difference from plain|\n(nats per byte)")
    lower.set_xlabel("optimizer step")
    lower.legend(loc="lower right", fontsize=8, framealpha=0.9)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _from_plain(results: Results, column: Column) -> list[float]:
    return [abs(a - b) for a, b in zip(results.losses[column], results.losses["plain"], strict=True)]
