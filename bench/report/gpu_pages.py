"""Figures of compared.md, eight_bit.md and kernels.md that were measured on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from bench.limits import eight_bit, roofline
from bench.limits.gpus import limit_ms
from bench.limits.shapes import SHAPES, even
from bench.report.gpu import (
    FOLDER,
    OVERWRITING,
    PASSES,
    ceilings,
    joules,
    layers,
    limits,
    ms,
    passes,
    read,
    steps,
    table,
    timings,
)

PUBLISHED = FOLDER.parent / "published.json"


def published() -> dict[str, Any]:
    """Figures that other projects published, with their source."""
    return dict(json.loads(PUBLISHED.read_text()))


def _of(found: pd.DataFrame, **columns: str | int) -> float:
    """Milliseconds of the one row with these values."""
    for name, value in columns.items():
        found = found[found[name] == value]
    (time,) = found.ms
    return float(time)


def gpu_sorted_rows(card: str = "h200") -> str:
    """Steps on sorted rows beside `grouped_mm`."""
    found, who, compiled = steps(card), ("fusedmlp", "grouped_mm + add"), "compiled + add"
    energy = joules(card=card), joules("grouped_mm", card)
    ratios = {sustained: found[who[1], sustained] / found[who[0], sustained] for sustained in (False, True)}
    to_compiled = found[compiled, False] / found[who[0], False]
    rows = [
        [
            name,
            *(ms(found.loc[name, (each, False)]) for each in who),
            f"**{ratios[False][name]:.2f}**",
            ms(found.loc[name, (compiled, False)]),
            ms(to_compiled[name]),
            *(ms(found.loc[name, (each, True)]) for each in who),
            ms(ratios[True][name]),
            *(ms(of.get(name, float("nan")), 1) for of in energy),
        ]
        for name in layers(ratios[False].dropna())
    ]
    header = ["sorted rows", *who, "times as fast", compiled, "times as fast"]
    header += [f"{each}, sustained" for each in who] + ["times as fast"] + [f"{each}, joules" for each in who]
    return table(header, rows)


def gpu_sorted_rows_h100() -> str:
    """Steps on sorted rows beside `grouped_mm`, on an H100."""
    return gpu_sorted_rows("h100")


def gpu_tokens() -> str:
    """Steps from tokens beside SonicMoE."""
    found = steps()
    who = {
        "fusedmlp": "moe_experts",
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
    best = found[found.what.isin(("forward", "backward"))].groupby(["shape", "what"]).ms.min()
    of = {"forward": roofline.FORWARD, "backward": roofline.BACKWARD}
    flops = {
        (shape.name, what): sum(roofline.passes(shape, even(shape))[each].flops for each in names)
        for shape in SHAPES
        for what, names in of.items()
    }
    rows = [
        [f"{name}, {what}", f"{rate}", f"{1e-9 * flops[name, what] / best[name, what]:.0f}"]
        for name, rates in theirs.items()
        for what, rate in rates.items()
    ]
    return table(["TFLOP/s, each on an H200", "Liger, from tokens", "fusedmlp, sorted rows"], rows)


def gpu_eight_bit() -> str:
    """Steps in 8 and in 16 bits, and by how much they differ, measured and by the limits of both."""
    found = timings()
    best = found.groupby(["shape", "what"]).ms.min().unstack()
    flops, bandwidth = 1e12 * ceilings().burst, 1e12 * ceilings().copy
    bf16, kept = limits()[[*PASSES]].sum(axis=1), "fp8 step, weights kept"
    rows = []
    for shape in SHAPES:
        if pd.isna(best[kept].get(shape.name)):
            continue
        costs = eight_bit.passes(shape, even(shape), "fp8_block")
        least = sum(
            limit_ms(costs[each].flops if each in eight_bit.MULTIPLYING else 0, costs[each].bytes, 2 * flops, bandwidth)
            for each in _LAUNCHES
        )
        of = best.loc[shape.name]
        burst, hot = of["step"] / of[kept], of["sustained step"] / of["fp8 sustained step, weights kept"]
        sizes = [f"{shape.R // shape.E:,}", f"{shape.F:,}"]
        times = [ms(of[what]) for what in ("step", "fp8 step", kept)]
        hot_times = [ms(of[what]) for what in ("sustained step", "fp8 sustained step, weights kept")]
        rows.append(
            [
                shape.name,
                *sizes,
                *times,
                f"**{burst:.2f}**",
                f"{bf16[shape.name] / least:.2f}",
                *hot_times,
                f"{hot:.2f}",
            ]
        )
    header = ["ms a step", "rows an expert", "F", "bf16", "`fp8_block`", "weights kept", "times as fast", "by limits"]
    return table([*header, "bf16, sustained", "weights kept, sustained", "times as fast"], rows)


# Launches in the order of a step with kept weights, but for plans of a load; as `eight_bit.passes` names them.
_LAUNCHES = ("quantize x", "fc1", "fc2", "quantize dy", "dgrad", "dgrad_act_quantize", "dx", "wgrad fc2",
             "quantize x for wgrad", "wgrad fc1")  # fmt: skip


def gpu_eight_bit_launches() -> str:
    """Launches of a step in 8 bits beside their limits, products at twice the measured rate of bf16."""
    shape = next(shape for shape in SHAPES if shape.name == "sonic-c")
    before, now = (
        found[
            (found["shape"] == shape.name)
            & found.what.str.startswith("fp8 kernel ")
            & ~found.what.str.contains("plan|token_tiles")
        ].ms
        for found in (timings("timings_1d590e7"), timings())
    )
    costs = eight_bit.passes(shape, even(shape), "fp8_block")
    flops, bandwidth = eight_bit.SPEED * 1e12 * ceilings().burst, 1e12 * ceilings().copy
    rows = []
    for name, first, time in zip(_LAUNCHES, before, now, strict=True):
        cost, multiplies = costs[name], name in eight_bit.MULTIPLYING
        limit = limit_ms(cost.flops if multiplies else 0, cost.bytes, flops, bandwidth)
        rate = f"{cost.flops / time / 1e9:,.0f}" if multiplies else "-"
        rows.append([f"`{name}`", ms(first), ms(time), ms(limit), f"{time / limit:.1f}", rate])
    return table(["sonic-c, ms", "1d590e7", "now", "limit", "times the limit", "TFLOP/s"], rows)


def gpu_two_sets() -> str:
    """By how much the second set of kernels took less or more time than the first, by pass, on each card."""
    adds = [name.removesuffix(", overwrite") for name in OVERWRITING]
    of = (["fc1_act"], ["fc2"], ["dgrad_act"], ["dx"], adds, [*OVERWRITING])
    rows = []
    for card in ("h200", "h100"):
        ratio = passes("warp_specialized", card) / passes("default", card) - 1
        rows.append([f"{card.upper()}, {len(ratio)} layers", *(_change(ratio[names].stack()) for names in of)])
    header = ["time of the second set beside the first", "(1)", "(2)", "(3)", "(4)", "wgrad, adds", "wgrad, overwrites"]
    return table(header, rows)


def _change(values: pd.Series) -> str:
    least, most = (round(100 * value) for value in (values.min(), values.max()))
    return " to ".join(f"{value:+d}%" if value else "0" for value in (least, most))


def _gathered(name: str, prefix: str, suffix: str) -> dict[str, float]:
    """Passes of a layer that gather rows: kernels in the order of their launches, by the kind of their names."""
    found = timings("timings_1d590e7" if prefix else "timings")
    found = found[(found["shape"] == name) & found.what.str.startswith("tokens ")]
    fc2, fc1 = found[found.what == f"tokens kernel {prefix}grouped_wgrad_{suffix}kernel"].ms
    times = {each: _of(found, what=f"tokens kernel {prefix}grouped_{each}_{suffix}kernel") for each in _GATHERING}
    return {**times, "wgrad fc2": fc2, "wgrad fc1": fc1, "step": found[found.what == "tokens step"].ms.min()}


_GATHERING = ("fc1_act", "dgrad_act")


def gpu_gathered() -> str:
    """Passes of sonic-c that gather rows, with both sets of kernels, and on sorted rows."""
    rows, name = passes("warp_specialized").loc["sonic-c"], "sonic-c"
    lines = {
        "first set, commit 1d590e7": _gathered(name, "_", ""),
        "second set": _gathered(name, "", "warp_specialized_"),
        "second set, sorted rows": {**rows, "step": steps().loc[name, ("fusedmlp", False)]},
    }
    names = (*_GATHERING, "wgrad fc2", "wgrad fc1", "step")
    header = ["from tokens, sonic-c, ms", "(1)", "(3)", "wgrad fc2", "wgrad fc1", "step"]
    return table(header, [[line, *(ms(times[each]) for each in names)] for line, times in lines.items()])


def gpu_rings() -> str:
    """Time of wgrad of fc1 with the rings of commit 1d590e7 and with today's, by what limits a launch."""
    before, now, tokens = timings("timings_1d590e7"), passes("warp_specialized"), read("prototypes_tokens")
    before, tokens = before[before.kind == "ws"], tokens[tokens.what.str.endswith("(wgrad fc1)")]

    def row(limit: str, shape: str, suffix: str = "") -> list[str]:
        name = f"wgrad fc1{suffix}"
        return [limit, shape, ms(_of(before, shape=shape, what=f"pass {name}")), ms(now.loc[shape, name])]

    def gathered(limit: str, shape: str) -> list[str]:
        times = _of(tokens, shape=shape, variant="ws async"), _gathered(shape, "", "warp_specialized_")["wgrad fc1"]
        return [limit, shape, *map(ms, times)]

    return table(
        ["wgrad of fc1, ms", "layer", "3 stages of 64 rows", "now"],
        [
            row("adds, memory is the limit", "qwen3-30b-8k"),
            row("adds, MMAs are the limit", "sonic-c"),
            row("adds, MMAs are the limit", "mixtral"),
            row("overwrites, memory", "qwen3-30b-8k", ", overwrite"),
            gathered("gathered, adds, MMAs", "sonic-c"),
            gathered("gathered, adds, memory", "qwen3-30b-8k"),
        ],
    )
