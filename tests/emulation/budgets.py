"""Executed instructions, traffic and waits of one launch of each pass: `python -m emulation.budgets`.

Sizes are multiples of all tiles and the load is even, so that nothing is wasted at edges; the counters are those of the
first order. `budgets.csv` holds the numbers allowed; the command writes it anew, and prints the changes.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from cases import act_quantize, cases, fc1_act_quantized, gemm_quantized, quantize, wgrad_quantized
from emulation.layers import emulated
from ptx_emulator.driver import ORDERS, Launched

from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles.table import Recipe

TABLE = Path(__file__).with_name("budgets.csv")
TOLERANCE = 0.02
_SIZES = (512, 512)
WARP_SPECIALIZED = ", warp_specialized"  # added to the names of warp-specialized passes
_WGRADS = ("wgrad", "wgrad overwrite", "wgrad scattered", "wgrad segments")
_RAGGED = ("fc1_act", "gemm", "dgrad_act")
_GATHERED = ("fc1_act gathered", "dgrad_act gathered", "wgrad gathered dy", "wgrad gathered x")
_COPIES = act_quantize.OUTPUTS[:3]  # in 8 bits
RECIPES: dict[str, Recipe] = {"sm_90": "fp8_block", "sm_100": "mxfp8"}
COLUMNS = {
    "instructions": ("instructions",),  # of warps
    "mma": ("mma", "wgmma", "tcgen05_mma"),
    "barriers": ("bar_sync",),
    "mbarrier_waits": ("mbar_waits",),
    "cp_async_bytes": ("cp_async_bytes",),
    "tma_load_bytes": ("tma_load_bytes",),
    "tma_store_bytes": ("tma_store_bytes",),
    "global_sectors": ("global_load_sectors", "global_store_sectors"),  # of 32 bytes, beside TMA; cp.async included
    "shared_conflicts": ("shared_load_conflicts", "shared_store_conflicts", "ldst_matrix_conflicts"),
}


def passes() -> dict[str, Callable[[torch.dtype], None]]:
    """Checks by name of a pass; each makes one launch of it."""
    ragged = partial(cases.ragged_check, load="even", sizes=_SIZES)
    wgrad = partial(cases.wgrad_check, ("even",), _SIZES)
    segments = partial(cases.wgrad_check, ("even",) * 3, _SIZES)
    fc1, dgrad = partial(ragged, cases.fc1_act.check), partial(ragged, cases.dgrad_act.check)
    gpt_oss = {"options": cases.GPT_OSS, "bias": True}
    return {
        "fc1_act": fc1(),
        "fc1_act gathered": fc1(gathered=True),
        "fc1_act gpt_oss": fc1(**gpt_oss),
        "gemm": ragged(partial(cases.gemm.check, bias=False)),
        "gemm in_out": ragged(partial(cases.gemm.check, bias=False), layout="in_out"),
        "dgrad_act": dgrad(),
        "dgrad_act gathered": dgrad(gathered=True),
        "dgrad_act gpt_oss": dgrad(**gpt_oss),
        "wgrad": wgrad(),
        "wgrad overwrite": wgrad(accumulate=False),
        "wgrad of bf16": wgrad(grad=torch.bfloat16),
        "wgrad bias": wgrad(bias=True),
        "wgrad gathered dy": wgrad(gathered="dy"),
        "wgrad gathered x": wgrad(gathered="x"),
        "wgrad scattered": wgrad(where="scattered"),
        "wgrad segments": segments(),
        "wgrad segments gathered x": segments(gathered="x"),
    }


def of_recipe(recipe: Recipe) -> dict[str, Callable[[], object]]:
    """Checks by name of a kernel for that recipe; each makes at least one launch of it, and others."""
    (counts, padding), (H, F) = cases.LOADS["even"], _SIZES
    rows = (recipe, counts, padding)
    activation = partial(_act_quantize, act_quantize.Case(*rows, F=F, outputs=_COPIES))
    return {
        f"grouped_fc1_act_{recipe}": partial(_fc1_act, fc1_act_quantized.Case(*rows, F=F, H=H)),
        f"grouped_gemm_{recipe}": partial(gemm_quantized.check, gemm_quantized.Case(*rows, N=H, K=F)),
        f"grouped_wgrad_{recipe}": partial(
            wgrad_quantized.check, wgrad_quantized.Case(recipe, (counts,), padding, N=H, K=F)
        ),
        f"quantize, {recipe}": partial(quantize.check, quantize.Case(*rows, C=H)),
        f"act_quantize, {recipe}": activation,
        f"dgrad_act_quantize, {recipe}": activation,
    }


def _fc1_act(case: fc1_act_quantized.Case) -> None:
    fc1_act_quantized.run(case, gemm_quantized.Inputs(case.of_gemm), at_once=True)


def _act_quantize(case: act_quantize.Case) -> None:
    act_quantize.run(case, act_quantize.inputs(case))


def measure(target: str, name: str) -> dict[str, int]:
    """Counters of a pass, in bf16 with tiles for long loads, or in 8 bits, and the bytes that its equation needs."""
    pass_, warp_specialized, _ = name.partition(WARP_SPECIALIZED)
    recipe, kernel = RECIPES.get(target), pass_.partition(",")[0]
    is_eight_bit = recipe is not None and recipe in name
    check = of_recipe(recipe)[name] if is_eight_bit else partial(passes()[pass_], torch.bfloat16)
    torch.manual_seed(0)
    options = {"orders": ORDERS[:1], "warp_specialized": is_eight_bit or bool(warp_specialized)}
    with emulated(target, "long", **options) as launched, recording() as asked:
        check()
    if is_eight_bit:
        launched = [each for each in launched if each.kernel.removeprefix("_") == f"{kernel}_kernel"]
        asked = [each for each in asked if each.name == kernel]
    else:
        launched = [each for each in launched if "grouped" in each.kernel]
    (launch,) = launched
    rows = [n * (3 if "segments" in name else 1) for n in cases.LOADS["even"][0]]
    costs = filter(None, (each.cost_of(rows) for each in asked))
    return {**_row(launch), "asked_bytes": sum(each.bytes for each in costs)}


def _row(launch: Launched) -> dict[str, int]:
    return {name: sum(launch.counters[key] for key in keys) for name, keys in COLUMNS.items()}


def everything() -> Iterator[tuple[str, str]]:
    """All `(GPU, pass)` of the table."""
    yield from ((target, name) for target in ("sm_80", "sm_90") for name in passes())
    yield from (("sm_90", name + WARP_SPECIALIZED) for name in (*_RAGGED, *_GATHERED, *_WGRADS))
    yield from (("sm_100", name) for name in (*_RAGGED, *_GATHERED, *_WGRADS))
    yield from (("sm_100", name + WARP_SPECIALIZED) for name in (*_RAGGED, *_GATHERED, *_WGRADS))
    yield from ((target, name) for target, recipe in RECIPES.items() for name in of_recipe(recipe))


def allowed() -> dict[tuple[str, str], dict[str, int]]:
    """Read the committed table."""
    with TABLE.open() as file:
        return {
            (row["gpu"], row["pass"]): {name: int(row[name]) for name in (*COLUMNS, "asked_bytes")}
            for row in csv.DictReader(file)
        }


def main(arguments: list[str] | None = None) -> None:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    before = allowed() if TABLE.exists() else {}
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["gpu", "pass", *COLUMNS, "asked_bytes"])
        for target, name in everything():
            row = measure(target, name)
            writer.writerow([target, name, *row.values()])
            file.flush()
            old = before.get((target, name), {})
            changes = ", ".join(
                f"{key} {old.get(key)} -> {value}" for key, value in row.items() if old.get(key) != value
            )
            print(f"{target} {name}: {changes or 'as before'}", flush=True)


if __name__ == "__main__":
    main()
