"""Pictures of results, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from bench.report.results import OURS

COLOURS = {
    "fusedmlp": "#1b7837",
    "fusedmlp moe_experts": "#1b7837",
    "fusedmlp, overwriting": "#7fbf7b",
    "grouped_mm": "#2166ac",
    "loop over experts": "#e08214",
    "Transformers grouped_mm": "#4393c3",
    "Transformers eager": "#b2182b",
    "Liger": "#762a83",
    "SonicMoE": "#35978f",
    "QuACK": "#8c510a",
    "TransformerEngine": "#666666",
    "PyTorch: grouped_mm, then main_grad.add_": "#2166ac",
}


def _layers(table: pd.DataFrame) -> pd.Series:
    return (
        table["name"] + ", " + table["load"] + ", " + table["dtype"].str.replace("float", "fp").str.replace("bfp", "bf")
    )


def svg(figure: Figure, device: str) -> str:
    """The figure with a line that says on which device it was measured: "cpu", "cuda", or its name."""
    kinds = {"cpu": "a CPU: PyTorch's operators, not the kernels", "cuda": "a GPU"}
    where = kinds.get(device, device)
    figure.suptitle(f"Measured on {where}", fontsize=9, color="#555555")
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "fusedmlp", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _axes(rows: int, columns: int = 1) -> tuple[Figure, list]:  # type: ignore[type-arg]
    figure = Figure(figsize=(8.2, 0.3 * rows + 1.4), layout="constrained")  # legible in a column of 700 pixels
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    return figure, list(axes)


def speedups(table: pd.DataFrame, device: str) -> str:
    """How many times longer each peer's forward and backward take, by layer; right of 1 fusedmlp is faster."""
    rows = table[table.what.str.match("forward|backward") & ~table.who.isin(OURS)].assign(layer=_layers)
    layers = list(dict.fromkeys(rows.layer))[::-1]
    figure, axes = _axes(len(layers), 2)
    for axis, what in zip(axes, ("forward", "backward"), strict=True):
        for who, group in rows[rows.what.str.startswith(what)].groupby("who", sort=False):
            places = [layers.index(layer) for layer in group.layer]
            axis.scatter(group.speedup, places, label=who, color=COLOURS[str(who)], s=26, zorder=3)
        axis.axvline(1, color="#1b7837", linewidth=1.5)
        axis.set(xscale="log", title=what, xlabel="time of the peer / time of fusedmlp")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "25" else "")
        axis.grid(axis="x", which="both", alpha=0.25)
        axis.set_yticks(range(len(layers)), layers)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(figure, device)


def shares_of_limit(table: pd.DataFrame, device: str) -> str:
    """The limit's share of the time of fusedmlp and the fastest peer."""
    rows = table[table.of_limit.notna() & ~table.what.str.contains("tokens")].assign(layer=_layers)
    layers = list(dict.fromkeys(rows.layer))[::-1]
    names = ("forward", "backward", "wgrad of fc1")
    figure, axes = _axes(len(layers), len(names))
    for axis, what in zip(axes, names, strict=True):
        group = rows[rows.what.str.startswith(what)]
        ours = group[group.who == "fusedmlp"].set_index("layer").of_limit
        best = group[~group.who.str.startswith("fusedmlp")].groupby("layer").of_limit.max()
        places = range(len(layers))
        axis.barh([p + 0.2 for p in places], [ours.get(x, 0) for x in layers], 0.38, color="#1b7837", label="fusedmlp")
        axis.barh([p - 0.2 for p in places], [best.get(x, 0) for x in layers], 0.38, color="#bbbbbb", label="best peer")
        axis.set(title=what, xlabel="limit / time", xlim=(0, max(1.0, 1.05 * group.of_limit.max())))
        axis.grid(axis="x", alpha=0.25)
        axis.set_yticks(places, layers)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(figure, device)


def memory(table: pd.DataFrame, device: str) -> str:
    """Bytes per routed row: the most that backward allocates, and what forward saves for it, median over layers."""
    rows = table[table.what.str.startswith("backward")]
    peers = list(dict.fromkeys(rows.who))[::-1]
    figure, axes = _axes(2 * len(peers), 2)
    panels = (("peak_bytes", "most allocated in backward"), ("saved_bytes", "saved by forward"))
    for axis, (column, title) in zip(axes, panels, strict=True):
        for shift, (dtype, group) in zip((0.2, -0.2), rows.groupby("dtype", sort=False), strict=False):
            per_row = (group[column] / group.R / 1024).groupby(group.who).median()
            places = [place + shift for place in range(len(peers))]
            colours = [COLOURS[who] for who in peers]
            bars = axis.barh(places, [per_row[who] for who in peers], 0.36, color=colours)
            for bar in bars:
                bar.set_alpha(1.0 if shift > 0 else 0.5)
            short = str(dtype).replace("float", "fp").replace("bfp", "bf")
            axis.bar_label(bars, [f"{per_row[who]:.1f}  {short}" for who in peers], padding=3, fontsize=9)
        axis.set(title=title, xlabel="KiB per routed row")
        axis.margins(x=0.3)
        axis.set_yticks(range(len(peers)), peers)
    return svg(figure, device)


def demo(results: dict[str, Any]) -> str:
    """The loss curves of both runs in the demo's `results.json`, and the most bytes that held weight gradients."""
    runs = results["columns"]
    names = ("plain autograd", "fusedmlp")
    figure = Figure(figsize=(8.2, 3.1), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[2.1, 1])
    # The wide pale line shows on both sides of the one that covers it.
    styles = ({"color": "#fdae61", "linewidth": 5}, {"color": "#1b7837", "linewidth": 1.3})
    for name, column, style in zip(names, ("plain", "fused"), styles, strict=True):
        losses = runs[column]["losses"]
        curves.plot(range(1, len(losses) + 1), losses, label=name, solid_capstyle="round", **style)
    curves.set(xlabel="optimizer step", ylabel="nats per byte", title="Training loss")
    curves.legend(frameon=False)
    curves.grid(alpha=0.25)
    peaks = [column["step"]["peak_bytes"] / 1e6 for column in runs.values()]
    drawn = bars.bar(names, peaks, 0.55, color=[style["color"] for style in styles])
    bars.bar_label(drawn, [f"{peak:.1f} MB" for peak in peaks], padding=3)
    bars.set(ylabel="MB", title="Weight gradients, peak")
    bars.margins(y=0.15)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return svg(figure, results["device"])


PICTURES: dict[str, Callable[[pd.DataFrame, str], str]] = {
    "speedups": speedups,
    "shares_of_limit": shares_of_limit,
    "memory": memory,
}
