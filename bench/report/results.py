"""Results of `pytest bench --benchmark-json FILE` as a table: one row per layer, measurement and peer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench.limits import roofline
from bench.limits.gpus import limit_ms
from bench.limits.shapes import LOADS, Shape
from fusedmlp.command_line import write

OURS = ("fusedmlp", "fusedmlp moe_experts")
LAYER = ["name", "E", "H", "F", "R", "load", "dtype"]  # columns that tell layers apart


@dataclass(frozen=True)
class Results:
    """The table, and facts of the whole run."""

    table: pd.DataFrame
    about: dict[str, Any]  # device, device_name, threads, torch, date
    missing: pd.DataFrame  # peers that could not run, and why


def load(path: Path) -> Results:
    """Read a file that pytest-benchmark wrote, or a folder of such files, or a table that `save` wrote."""
    if path.suffix == ".csv":
        lines = path.read_text(encoding="utf-8").splitlines()
        notes = json.loads(lines[0].removeprefix("# "))
        return Results(pd.read_csv(path, comment="#"), notes["about"], pd.DataFrame(notes["missing"]))
    files = sorted(path.glob("*.json"), key=lambda file: file.stat().st_mtime) if path.is_dir() else [path]
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = [document["fusedmlp"] for document in documents]
    rows = [
        _row(benchmark, run["ceilings"])
        for document, run in zip(documents, runs, strict=True)
        for benchmark in document["benchmarks"]
    ]
    table = with_speedups(pd.DataFrame(rows))
    about = {key: runs[-1][key] for key in ("device", "device_name", "threads", "torch")}
    about["date"] = documents[-1]["datetime"][:10]
    missing = pd.DataFrame([row for run in runs for row in run["missing"]], columns=["who", "why"])
    return Results(over_turns(table), about, missing.drop_duplicates())


def save(results: Results, path: Path) -> None:
    """Write a CSV with the facts of the whole run in its first line, a comment."""
    notes = {"about": results.about, "missing": results.missing.to_dict("records")}
    write(path, f"# {json.dumps(notes)}\n{results.table.to_csv(index=False)}")


def _row(benchmark: dict[str, Any], ceilings: dict[str, dict[str, float]]) -> dict[str, Any]:
    info, stats = benchmark["extra_info"], benchmark["stats"]
    ms = 1e3 * stats["median"]
    row = {key: info[key] for key in (*LAYER, "what", "who", "turn")}
    row |= {"ms": ms, "iqr_ms": 1e3 * stats["iqr"], "rounds": stats["rounds"]}
    ceiling = ceilings[info["dtype"]]
    limit = _limit(info, ceiling["flops"], ceiling["bandwidth"])
    row |= {"limit_ms": limit, "of_limit": limit / ms if limit else None}
    for key in ("peak_bytes", "saved_bytes", "largest_bytes", "ops", "error", "allowed"):
        row[key] = info.get(key)
    return row


def _limit(info: dict[str, Any], flops: float, bandwidth: float) -> float | None:
    """Sum of the limits of the passes, without routing and combining; None where there is no such sum."""
    shape = Shape(*(info[key] for key in ("name", "E", "H", "F", "R", "most")))
    itemsize = 4 if info["dtype"] == "float32" else 2
    what, suffix = info["what"].split(",")[0], ", overwrite" if "overwriting" in info["who"] else ""
    names = {
        "forward": roofline.FORWARD,
        "backward": roofline.BACKWARD,
        "fc1_act": ("fc1_act",),
        "gemm of fc2": ("fc2",),
        "dgrad_act": ("dgrad_act",),
        "wgrad of fc1": (f"wgrad fc1{suffix}",),
    }.get(what)
    if names is None:
        return None
    costs = roofline.passes(shape, LOADS[info["load"]](shape), itemsize)
    return sum(limit_ms(costs[name].flops, costs[name].bytes, flops, bandwidth) for name in names)


def with_speedups(table: pd.DataFrame) -> pd.DataFrame:
    """`speedup`: the peer's time over ours, in the same group and turn."""
    keys = [*LAYER, "what", "turn"]
    ours = table[table.who.isin([*OURS, "with"])].set_index(keys).ms.rename("ours_ms")
    table = table.join(ours, on=keys)
    table["speedup"] = table.ms / table.ours_ms
    return table.drop(columns="ours_ms")


def over_turns(table: pd.DataFrame) -> pd.DataFrame:
    """One row for all turns of a measurement: medians, and the sum of their rounds."""
    timed = ("ms", "iqr_ms", "of_limit", "speedup")
    how = {name: "median" if name in timed else "sum" if name == "rounds" else "first" for name in table.columns}
    keys = [*LAYER, "what", "who"]
    how = {name: function for name, function in how.items() if name not in (*keys, "turn")}
    return table.groupby(keys, sort=False, as_index=False).agg(how)
