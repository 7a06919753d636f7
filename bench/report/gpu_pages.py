"""Figures of compared.md, eight_bit.md and warp_specialized.md that were measured on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from bench.limits import eight_bit
from bench.limits.gpus import limit_ms
from bench.limits.shapes import SHAPES, even
from bench.report.gpu import FOLDER, OVERWRITING, about, layers, ms, passes, read, steps, table, timings

PUBLISHED = FOLDER.parent / "published.json"


def published() -> dict[str, Any]:
    """Figures that other projects published, with their source."""
    return dict(json.loads(PUBLISHED.read_text()))


def _of(found: pd.DataFrame, **columns: str) -> float:
    """Milliseconds of the one row with these values."""
    for name, value in columns.items():
        found = found[found[name] == value]
    (time,) = found.ms
    return float(time)


def gpu_sorted_rows() -> str:
    """Steps on sorted rows beside `grouped_mm`."""
    found, joules = steps(), about()["joules_of_a_step"]
    who = ("fusedmlp", "grouped_mm + add")
    ratios = {sustained: found[who[1], sustained] / found[who[0], sustained] for sustained in (False, True)}
    rows = [
        [
            name,
            *(ms(found.loc[name, (each, False)]) for each in who),
            f"**{ratios[False][name]:.2f}**",
            *(ms(found.loc[name, (each, True)]) for each in who),
            ms(ratios[True][name]),
            *(str(joules.get(name, {}).get(each, "-")) for each in who),
        ]
        for name in layers(ratios[False].dropna())
    ]
    header = ["sorted rows", *who, "times as fast"]
    header += [f"{each}, sustained" for each in who] + ["times as fast"] + [f"{each}, joules" for each in who]
    return table(header, rows)


def gpu_tokens() -> str:
    """Steps from tokens beside SonicMoE."""
    found = steps()
    who = {
        "fusedmlp, 1d590e7": "moe_experts",
        "fusedmlp, prototype": "prototype",
        "SonicMoE + add": "SonicMoE + add",
        "SonicMoE, bf16 gradients": "SonicMoE",
    }
    rows = [
        [name, *(" / ".join(ms(found.loc[name, (each, kind)]) for kind in (False, True)) for each in who.values())]
        for name in layers(found["SonicMoE", False].dropna())
    ]
    return table(["tokens, ms burst / sustained", *who], rows)


def liger_published() -> str:
    """TFLOP/s that Liger published, beside those of the same direction here."""
    found, theirs = timings(), published()["Liger"]["tflops"]
    best = found[found.what.isin(("forward", "backward"))].groupby(["shape", "what"]).tflops.max()
    rows = [
        [f"{name}, {what}", f"{rate}", f"{best[name, what]:.0f}"]
        for name, rates in theirs.items()
        for what, rate in rates.items()
    ]
    return table(["TFLOP/s, each on an H200", "Liger, from tokens", "fusedmlp, sorted rows"], rows)


def gpu_eight_bit() -> str:
    """Steps of sonic-c in 8 and in 16 bits."""
    found = timings()
    found = found[found["shape"] == "sonic-c"]

    def least(what: str) -> str:
        return ms(found[found.what == what].ms.min())

    rows = [
        ["bf16", least("step"), least("sustained step")],
        ["`fp8_block`", least("fp8 step"), "-"],
        ["`fp8_block`, weights kept", least("fp8 step, weights kept"), least("fp8 sustained step, weights kept")],
    ]
    return table(["step of sonic-c, ms", "burst", "sustained"], rows)


# Launches in the order of a step with kept weights, but for plans of a load; as `eight_bit.passes` names them.
_LAUNCHES = ("quantize x", "fc1", "fc2", "quantize dy", "dgrad", "dgrad_act_quantize", "dx", "wgrad fc2",
             "quantize x for wgrad", "wgrad fc1")  # fmt: skip


def gpu_eight_bit_launches() -> str:
    """Launches of a step in 8 bits beside their limits, products at twice the measured rate of bf16."""
    shape = next(shape for shape in SHAPES if shape.name == "sonic-c")
    measured = timings()
    measured = measured[measured.what.str.startswith("fp8 kernel ") & ~measured.what.str.contains("plan|token_tiles")]
    costs = eight_bit.passes(shape, even(shape), "fp8_block")
    flops, bandwidth = eight_bit.SPEED * 1e12 * about()["dense_tflops"]["burst"], 1e12 * about()["copy_tb_s"]
    rows = []
    for name, time in zip(_LAUNCHES, measured.ms, strict=True):
        cost, multiplies = costs[name], name in eight_bit.MULTIPLYING
        limit = limit_ms(cost.flops if multiplies else 0, cost.bytes, flops, bandwidth)
        rate = f"{cost.flops / time / 1e9:,.0f}" if multiplies else "-"
        rows.append([f"`{name}`", ms(time), ms(limit), f"{time / limit:.1f}", rate])
    return table(["sonic-c", "ms", "limit, ms", "times the limit", "TFLOP/s"], rows)


def gpu_two_sets() -> str:
    """By how much the second set of kernels took less or more time than the first, by pass."""
    ratio = passes("ws") / passes("default") - 1
    adds = [name.removesuffix(", overwrite") for name in OVERWRITING]
    columns = {
        "(1)": ratio["fc1_act"],
        "(2)": ratio["fc2"],
        "(3)": ratio["dgrad_act"],
        "(4)": ratio["dx"],
        "wgrad, adds": ratio[adds].stack(),
        "wgrad, overwrites": ratio[[*OVERWRITING]].stack(),
    }
    header = [f"time of the second set beside the first, {len(ratio)} layers", *columns]
    return table(header, [["smallest to largest", *map(_change, columns.values())]])


def _change(values: pd.Series) -> str:
    least, most = (round(100 * value) for value in (values.min(), values.max()))
    return " to ".join(f"{value:+d}%" if value else "0" for value in (least, most))


def gpu_gathered() -> str:
    """Passes of sonic-c that gather rows, with the first set of kernels, with a prototype, and on sorted rows."""
    first, prototype, rows = timings(), read("prototypes_tokens"), passes().loc["sonic-c"]
    first = first[(first["shape"] == "sonic-c") & first.what.str.startswith("tokens ")]
    prototype = prototype[(prototype["shape"] == "sonic-c") & (prototype.variant == "ws async")]
    names = ("fc1_act", "dgrad_act", "wgrad fc2", "wgrad fc1")
    fc2, fc1 = first[first.what == "tokens kernel _grouped_wgrad_kernel"].ms  # in the order of their launches
    before = [_of(first, what=f"tokens kernel _grouped_{name}_kernel") for name in names[:2]]
    before += [fc2, fc1, _of(first, what="tokens step")]
    after = [float(prototype[prototype.what.str.endswith(f"({name})")].ms.iloc[0]) for name in names]
    after.append(_of(prototype, what="step"))
    sorted_rows = [rows[name] for name in names] + [steps().loc["sonic-c", ("fusedmlp", False)]]
    lines = {"first set, commit 1d590e7": before, "prototype": after, "sorted rows, for comparison": sorted_rows}
    header = ["from tokens, sonic-c, ms", "(1)", "(3)", "wgrad fc2", "wgrad fc1", "step"]
    return table(header, [[name, *map(ms, times)] for name, times in lines.items()])


def gpu_rings() -> str:
    """Time of wgrad of fc1 with the ring of commit 1d590e7 and with that of a prototype, by what limits a launch."""
    sorted_rows, tokens = read("prototypes_wgrad"), read("prototypes_tokens")
    sorted_rows = sorted_rows[(sorted_rows["round"] == 2) & (sorted_rows["pass"] == "fc1")]
    sorted_rows = sorted_rows.assign(ms=sorted_rows.ms_median)
    tokens = tokens[tokens.what.str.endswith("(wgrad fc1)")]

    def row(limit: str, shape: str, found: pd.DataFrame, before: str, after: str, **columns: str) -> list[str]:
        times = (_of(found, shape=shape, variant=variant, **columns) for variant in (before, after))
        return [limit, shape, *map(ms, times)]

    return table(
        ["wgrad of fc1, ms", "layer", "ring of 1d590e7", "ring of a prototype"],
        [
            row("adds, memory is the limit", "qwen3-30b-8k", sorted_rows, "base", "wb", mode="add"),
            row("adds, MMAs are the limit", "sonic-c", sorted_rows, "base", "wfn32", mode="add"),
            row("overwrites, memory", "qwen3-30b-8k", sorted_rows, "base", "wf32", mode="overwrite"),
            row("gathered, adds, MMAs", "sonic-c", tokens, "ws async", "ws async ahead=0 tile=64x4"),
            row("gathered, adds, memory", "qwen3-30b-8k", tokens, "ws async", "ws async ahead=own tile=64x3"),
        ],
    )
