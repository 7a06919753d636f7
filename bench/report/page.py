"""One HTML page, with pictures inside: nothing else is needed to read it."""

from __future__ import annotations

from html import escape

import pandas as pd

from bench.report.pictures import PICTURES
from bench.report.results import LAYER, Results

_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 } th, td { padding: 3px 9px; text-align: right }
th { border-bottom: 2px solid #888; text-align: left } tr:nth-child(even) { background: #f4f4f4 }
svg { max-width: 100%; height: auto } .note { color: #555; font-size: 13px } summary { cursor: pointer }
"""
_CAPTIONS = {
    "speedups": "Speed-up over each peer. Right of the line fusedmlp is faster; the scale is logarithmic.",
    "shares_of_limit": "Time against the limit: the larger of arithmetic and traffic, summed over passes, by ceilings "
    "measured once in the same run. Where the machine is slower just then, a share can exceed 1.",
    "memory": "Memory per routed row, median over layers. A peer's gradients and their sum in main_grad count as "
    "allocated; the weights' main_grad, which all have, does not.",
}


def render(results: Results) -> str:
    """The page."""
    about = results.about
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>fusedmlp: measurements</title>",
        f"<style>{_STYLE}</style></head><body><h1>fusedmlp beside its peers</h1>",
        f"<p>{escape(about['device_name'])}, {about['threads']} threads, torch {escape(about['torch'])}, ",
        f"{about['date']}. ",
        "Every row was compared with float64 before it was timed; times are medians.</p>",
    ]
    if about["device"] == "cpu":
        parts.append(
            "<p class='note'>On a CPU fusedmlp runs its PyTorch implementation, not the kernels. Times of one peer "
            "differ by tens of percent between runs on a shared machine.</p>"
        )
    for name, draw in PICTURES.items():
        parts.append(
            f"<h2>{escape(_CAPTIONS[name].split('.')[0].split(':')[0])}</h2>{draw(results.table, about['device'])}"
        )
        parts.append(f"<p class='note'>{escape(_CAPTIONS[name])}</p>")
    if len(results.missing):
        parts.append(f"<h2>Peers that could not run here</h2>{results.missing.to_html(index=False, border=0)}")
    parts.append("<h2>All figures</h2>")
    for what, rows in results.table.groupby("what", sort=False):
        table = _readable(rows).to_html(index=False, border=0, na_rep="")
        parts.append(f"<details><summary>{escape(str(what))}: {len(rows)} rows</summary>{table}</details>")
    return "\n".join([*parts, "</body></html>"])


def _readable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rounded, with units in the headings."""
    table = rows[[*LAYER, "who"]].copy()
    table["ms"] = rows.ms.map("{:.2f}".format)
    table["+- (IQR)"] = rows.iqr_ms.map("{:.2f}".format)
    table["times ours"] = rows.speedup.map("{:.2f}".format, na_action="ignore")
    for heading, column, scale, form in (
        ("of limit", "of_limit", 1, "{:.2f}"),
        ("peak MiB", "peak_bytes", 2**20, "{:.1f}"),
        ("saved MiB", "saved_bytes", 2**20, "{:.1f}"),
        ("PyTorch ops", "ops", 1, "{:.0f}"),
        ("error", "error", 1, "{:.1e}"),
        ("allowed", "allowed", 1, "{:.1e}"),
    ):
        if rows[column].notna().any():
            table[heading] = (rows[column] / scale).map(form.format, na_action="ignore")
    return table
