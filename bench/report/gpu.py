"""Tables and a picture of what was measured on a GPU: `bench/results/gpu/`, whose README says on which, and how."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from bench.limits.shapes import SHAPES
from bench.report.pictures import COLOURS, svg

FOLDER = Path(__file__).parents[1] / "results" / "gpu"
SHOWN = ("sonic-a", "sonic-c", "sonic-d", "qwen3-30b-8k", "mixtral")
_PASSES = ("fc1_act", "fc2", "dgrad_act", "dx", "wgrad fc1", "wgrad fc2")


@cache
def about() -> dict[str, Any]:
    """The machine and the software, and what was not measured in milliseconds."""
    return dict(json.loads((FOLDER / "about.json").read_text()))


@cache
def steps() -> pd.DataFrame:
    """Milliseconds of a step by layer, of even loads: columns are who, whether sustained."""
    ours, peers = pd.read_csv(FOLDER / "h200_timings.csv"), pd.read_csv(FOLDER / "h200_sonicmoe.csv")
    prototypes = pd.read_csv(FOLDER / "h200_prototypes_tokens.csv")
    ours = ours[ours.load == "even"]

    def least(rows: pd.DataFrame, what: str) -> pd.Series:
        return rows[rows.what == what].groupby("shape").ms.min()

    own, sustained = "forward+backward+main_grad", ", sustained 0.25 s"
    columns = {
        ("fusedmlp", False): least(ours, "step"),
        ("fusedmlp", True): least(ours, "sustained step"),
        ("grouped_mm + add", False): least(ours, "grouped_mm step+add"),
        ("grouped_mm + add", True): least(ours, "grouped_mm sustained step+add"),
        ("moe_experts", False): least(ours, "tokens step"),
        ("moe_experts", True): least(ours, "tokens sustained step"),
        ("prototype", False): least(prototypes, "step"),
        ("prototype", True): least(prototypes, "sustained step"),
        ("SonicMoE + add", False): least(peers, own),
        ("SonicMoE + add", True): least(peers, own + sustained),
    }
    return pd.DataFrame(columns)


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def _ms(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.2f}"


def gpu_numbers() -> str:
    """Speed, energy and memory of a step beside `grouped_mm`, as a list."""
    found, facts = steps(), about()
    times = (found["grouped_mm + add", False] / found["fusedmlp", False]).dropna()
    joules, memory = facts["joules_of_a_step"]["sonic-c"], facts["peak_mib_of_a_step"]["sonic-c"]
    return (
        f"- **{times.min():.1f} to {times.max():.1f} times as fast**: a step of {len(times)} layers.\n"
        f"- **{joules['fusedmlp']} joules instead of {joules['grouped_mm + add']}**: a step of sonic-c.\n"
        f"- **{memory['fusedmlp']:,} MiB instead of {memory['grouped_mm + add']:,}**: the memory of that step, above "
        "what stays."
    )


def gpu_steps() -> str:
    """Times of a step, burst and sustained."""
    found, shapes = steps(), {shape.name: shape for shape in SHAPES}
    names = [name for name in shapes if name in found.index]
    who = dict.fromkeys(name for name, _ in found.columns)
    header = ["", "experts, H, F, rows", *(f"{name}, {kind}" for name in who for kind in ("burst", "sustained"))]
    rows = []
    for name in names:
        shape = shapes[name]
        sizes = f"{shape.E}, {shape.H:,}, {shape.F:,}, {shape.R:,}"
        rows.append([name, sizes, *(_ms(found.loc[name, (each, kind)]) for each in who for kind in (False, True))])
    return _table(header, rows)


def gpu_passes() -> str:
    """Milliseconds of each pass, with the kernels that were faster."""
    timings = pd.read_csv(FOLDER / "h200_timings.csv")
    timings = timings[(timings.load == "even") & timings.what.str.startswith("pass ")]
    best = timings.groupby(["shape", "what"]).ms.min().unstack()
    names = [shape.name for shape in SHAPES if shape.name in best.index]
    rows = [[name, *(_ms(best.loc[name, f"pass {each}"]) for each in _PASSES)] for name in names]
    return _table(["ms", *_PASSES], rows)


def picture() -> str:
    """Time of a step of five layers, as times that of `grouped_mm` with the addition."""
    found = steps().loc[[*SHOWN]]
    base = found["grouped_mm + add", False]
    bars = {
        "grouped_mm + add": base,
        "SonicMoE + add, from tokens": found["SonicMoE + add", False],
        "fusedmlp, from tokens (prototype)": found["prototype", False],
        "fusedmlp, sorted rows": found["fusedmlp", False],
    }
    shapes = {shape.name: shape for shape in SHAPES}
    labels = [f"{name}\n{shapes[name].E} experts, {shapes[name].H} x {shapes[name].F}" for name in SHOWN]
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axis = figure.subplots()
    for i, (name, times) in enumerate(bars.items()):
        places = [place + 0.2 * (1.5 - i) for place in range(len(SHOWN))]
        drawn = axis.barh(places, times / base, 0.18, label=name, color=COLOURS[name])
        axis.bar_label(drawn, ["" if pd.isna(ms) else f"{ms:.1f} ms" for ms in times], padding=3, fontsize=8)
    axis.set_yticks(range(len(SHOWN)), labels)
    axis.set_xlim(0, 1.15)
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f}%")
    axis.set_xlabel("time of forward, backward and the sum in fp32 main_grad; shorter is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return svg(figure, f"one {about()['gpu']}, {about()['date']}, commit {about()['commit']}, bf16")
