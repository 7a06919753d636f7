"""Measurements on a GPU: as data, as the figures of README and benchmarks.md, and as a picture.

Results are in `bench/results/gpu/`, whose README says on which GPU they were measured, and how. `gpu_pages.py` has the
figures of other pages.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from bench.limits import roofline
from bench.limits.gpus import limit_ms
from bench.limits.shapes import SHAPES, even
from bench.report.pictures import COLOURS, svg

FOLDER = Path(__file__).parents[1] / "results" / "gpu"
PASSES = (*roofline.FORWARD, *roofline.BACKWARD)
OVERWRITING = ("wgrad fc2, overwrite", "wgrad fc1, overwrite")


@cache
def about() -> dict[str, Any]:
    """The machine and the software, and what was not measured in milliseconds."""
    return dict(json.loads((FOLDER / "about.json").read_text()))


@cache
def read(name: str, card: str = "h200") -> pd.DataFrame:
    """The table `CARD_NAME.csv`."""
    return pd.read_csv(FOLDER / f"{card}_{name}.csv")


def timings(name: str = "timings", card: str = "h200") -> pd.DataFrame:
    """Steps, passes and kernels, and `grouped_mm`, with the same rows for every expert."""
    found = read(name, card)
    return found[found.load == "even"]


class Ceilings(NamedTuple):
    """Rates that a card reached: of a dense product by itself and back to back, in TFLOP/s, and of a copy, in TB/s."""

    burst: float
    sustained: float
    copy: float


def ceilings() -> Ceilings:
    """The ceilings that the run on the H200 measured."""
    found = read("timings").set_index("what")
    flops, copied = found.tflops, found.gb_s["copy"]
    return Ceilings(flops["dense product"], flops["dense product sustained"], copied / 1e3)


def _least(rows: pd.DataFrame, what: str) -> pd.Series:
    return rows[rows.what == what].groupby("shape").ms.min()


@cache
def steps(card: str = "h200") -> pd.DataFrame:
    """Milliseconds of a step by layer: columns are who, whether sustained."""
    ours = timings(card=card)
    columns = {
        ("fusedmlp", False): _least(ours, "step"),
        ("fusedmlp", True): _least(ours, "sustained step"),
        ("grouped_mm + add", False): _least(ours, "grouped_mm step+add"),
        ("grouped_mm + add", True): _least(ours, "grouped_mm sustained step+add"),
        ("compiled + add", False): _least(ours, "grouped_mm compiled step+add"),
        ("compiled + add", True): _least(ours, "grouped_mm compiled sustained step+add"),
        ("moe_experts", False): _least(ours, "tokens step"),
        ("moe_experts", True): _least(ours, "tokens sustained step"),
    }
    if card == "h200":
        peers, alone, sustained = read("sonicmoe"), "forward+backward", ", sustained 0.25 s"
        columns |= {
            ("SonicMoE + add", False): _least(peers, f"{alone}+main_grad"),
            ("SonicMoE + add", True): _least(peers, f"{alone}+main_grad{sustained}"),
            ("SonicMoE", False): _least(peers, alone),
            ("SonicMoE", True): _least(peers, alone + sustained),
        }
    return pd.DataFrame(columns)


def joules(who: str = "", card: str = "h200") -> pd.Series:
    """Joules of a step, back to back, of each layer: of ours, or of "grouped_mm"."""
    found = timings(card=card)
    found = found[found.what == (f"{who} sustained step+add" if who else "sustained step")].dropna(subset=["joules"])
    return found.groupby("shape").joules.min()


def peak_mib(who: str = "") -> pd.Series:
    """MiB that a step takes at its peak beside what stays, likewise."""
    found = timings()
    return found[found.what == f"{who} peak memory".strip()].set_index("shape").mib


def layers(found: pd.DataFrame | pd.Series) -> list[str]:
    """The names of the layers in it, in the order of the glossary."""
    return [shape.name for shape in SHAPES if shape.name in found.index]


def limits(rate: str = "burst") -> pd.DataFrame:
    """The least milliseconds of each pass by layer, by the ceilings measured on the H200."""
    flops, bandwidth = 1e12 * getattr(ceilings(), rate), 1e12 * ceilings().copy
    return pd.DataFrame(
        {
            shape.name: {
                name: limit_ms(cost.flops, cost.bytes, flops, bandwidth)
                for name, cost in roofline.passes(shape, even(shape)).items()
            }
            for shape in SHAPES
        }
    ).T


def passes(kernels: str | None = None, card: str = "h200") -> pd.DataFrame:
    """Milliseconds of each pass by layer with one set, "default" or "warp_specialized"; None: with the faster one."""
    found = timings(card=card)
    found = found[found.what.str.startswith("pass ") & (kernels is None or found.kernels == kernels)]
    return found.groupby(["shape", found.what.str.removeprefix("pass ")]).ms.min().unstack()


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown of a table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def ms(value: float, digits: int = 2) -> str:
    """Milliseconds in a cell."""
    return "-" if pd.isna(value) else f"{value:.{digits}f}"


def _share(limit: float, time: float) -> str:
    return f"{100 * limit / time:.0f}%"


def spread(values: pd.Series, unit: str = "%") -> str:
    """The least and the largest value in percent."""
    return f"{100 * values.min():.0f} to {100 * values.max():.0f}{unit}"


def gpu_numbers() -> str:
    """Speed, energy and memory of a step beside `grouped_mm`, as a list."""
    found, peer = steps(), "grouped_mm + add"
    times, compiled = ((found[each, False] / found["fusedmlp", False]).dropna() for each in (peer, "compiled + add"))
    energy, memory = ([of(who)["sonic-c"] for who in ("", "grouped_mm")] for of in (joules, peak_mib))
    return (
        f"- **Speed: {times.min():.1f} to {times.max():.1f} times as fast**: forward and backward of the experts, in "
        f"{len(times)} layers, each by itself; {compiled.min():.1f} to {compiled.max():.1f} where `torch.compile` "
        f"fuses PyTorch's activation ({len(compiled)} layers).\n"
        f"- **Energy: {energy[0]:.1f} joules instead of {energy[1]:.1f}** a step of sonic-c (64 experts, "
        "4096 x 1024), back to back.\n"
        f"- **Memory: {memory[0]:,.0f} MiB instead of {memory[1]:,.0f}** at the peak of such a step, "
        "beside inputs, weights and `main_grad`."
    )


def gpu_steps() -> str:
    """Times of a step beside its limit, burst and sustained, and its energy."""
    found, shapes, energy = steps(), {shape.name: shape for shape in SHAPES}, joules()
    least = {rate: limits(rate)[[*PASSES]].sum(axis=1) for rate in ("burst", "sustained")}
    header = ["", "experts, H, F, rows", "ms, burst", "limit", "share", "ms, sustained", "limit", "share", "joules"]
    rows = []
    for name in layers(found["fusedmlp", False].dropna()):
        shape = shapes[name]
        cells = [name, f"{shape.E}, {shape.H:,}, {shape.F:,}, {shape.R:,}"]
        for rate, sustained in (("burst", False), ("sustained", True)):
            time, limit = found.loc[name, ("fusedmlp", sustained)], least[rate][name]
            cells += ["-"] * 3 if pd.isna(time) else [ms(time), ms(limit), _share(limit, time)]
        rows.append([*cells, ms(energy.get(name, float("nan")), 1)])
    return table(header, rows)


def gpu_passes() -> str:
    """Milliseconds of each pass with the kernels that were faster, and the share of its limit in them."""
    best, least, names = passes(), limits(), (*PASSES, *OVERWRITING)
    rows = [
        [name, *(f"{ms(best[each][name])} ({_share(least[each][name], best[each][name])})" for each in names)]
        for name in layers(best)
    ]
    rows.append(["all", *(spread((least[each] / best[each]).dropna()) for each in names)])
    return table(["ms (limit / ms)", *names], rows)


def gpu_machine() -> str:
    """The machine, and the ceilings that limits are computed from."""
    facts, reached = about(), ceilings()
    return (
        f"Measured on one {facts['gpu']} on {facts['date']}: the kernels of commit {facts['commit']}, with torch "
        f"{facts['torch']} and Triton {facts['triton']}. In the same run a dense product reached {reached.burst:.0f} "
        f"TFLOP/s, sustained {reached.sustained:.0f}, and a copy {reached.copy:.2f} TB/s, read and written together."
    )


def picture() -> str:
    """Milliseconds of a step of every layer on sorted rows, as a share of those of `grouped_mm` with the addition."""
    found = steps()
    names = layers(found)
    base, ours = (found[who, False][names] for who in ("grouped_mm + add", "fusedmlp"))
    bars = {"PyTorch: grouped_mm, then main_grad.add_": base, "fusedmlp": ours}
    shapes = {shape.name: shape for shape in SHAPES}
    labels = [f"{name}\n{shapes[name].E} experts, {shapes[name].H} x {shapes[name].F}" for name in names]
    figure = Figure(figsize=(8.2, 5.0), layout="constrained")
    axis = figure.subplots()
    for i, (name, times) in enumerate(bars.items()):
        places = [place + 0.36 * (i - 0.5) for place in range(len(names))]
        drawn = axis.barh(places, times / base, 0.34, label=name, color=COLOURS[name])
        faster = [""] * len(names) if i == 0 else [f": {ratio:.1f} times as fast" for ratio in base / ours]
        texts = [f"{time:.1f} ms{text}" for time, text in zip(times, faster, strict=True)]
        axis.bar_label(drawn, texts, padding=4, fontsize=9, fontweight="bold" if i else "normal")
    axis.set_yticks(range(len(names)), labels)
    axis.set_xlim(0, 1.13)
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f}%")
    axis.set_title("Time of a training step of the experts: shorter is better", fontsize=12, fontweight="bold")
    axis.set_xlabel("forward, backward, and weight gradients summed up in fp32; share of PyTorch's time")
    axis.spines[["top", "right"]].set_visible(False)
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    gpu, date, commit = (about()[name] for name in ("gpu", "date", "commit"))
    return svg(figure, f"one {gpu}, {date}, commit {commit}, bf16, rows sorted by expert")
