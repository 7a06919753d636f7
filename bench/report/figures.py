"""Write the figures in README.md and docs/ from the committed results, so that none is typed by hand.

    python -m bench.report.figures

Results are made by `make bench` (`bench/results/cpu_benchmarks.csv`), `python -m fusedmlp demo --json`
(`cpu_demo.json`), `python -m bench.host --json` (`host_cost.json`) and `python -m peers --json`
(`transformers_tests.json`); those of a GPU are in `bench/results/gpu/`, and what other projects published is in
`published.json`. In a page, each figure's text stands between `<!-- name -->` and `<!-- /name -->`; pictures go to
`docs/pictures/`. The integrations in docs/api.md are a list in the code.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from bench.report import gpu, gpu_pages, gpu_stacks, results
from bench.report.pictures import PICTURES
from bench.report.pictures import demo as draw_demo
from fusedmlp.integrations import INTEGRATIONS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"cpu_{name}.json").read_text())


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def demo_in_short() -> str:
    """The demo in one sentence."""
    columns = _load("demo")["columns"]
    plain, fused = (columns[name]["losses"] for name in ("plain", "fused"))
    difference = max(abs(f - p) for f, p in zip(fused, plain, strict=True))
    before, after = (f"{columns[name]['step']['peak_bytes'] / 1e6:.1f}" for name in ("plain", "fused"))
    return (
        f"In the demo, {len(fused)} steps of a small byte-level language model, the losses with and without fusion "
        f"stay within {difference:.1e} nats/byte of each other, and weight gradients take at most {after} MB "
        f"instead of {before} MB."
    )


def _benchmarks() -> results.Results:
    return results.load(RESULTS / "cpu_benchmarks.csv")


def comparison() -> str:
    """Every peer's times over ours, and the memory that backward allocates."""
    table = _benchmarks().table
    per_row = (table.peak_bytes / table.R / 1024).where(table.what.str.startswith("backward"))
    rows = []
    for level in ("sorted rows", "whole layer of tokens"):
        for who in dict.fromkeys(table[table.what == f"backward, {level}"].who):
            of_peer = table[table.who == who]
            times = [_spread(of_peer[of_peer.what == f"{what}, {level}"].speedup) for what in ("forward", "backward")]
            if who in results.OURS:
                times = ["1", "1"]
            memory = [
                f"{per_row[of_peer.index][of_peer['dtype'] == dtype].median():.1f}" for dtype in ("float32", "bfloat16")
            ]
            rows.append([level, who, *times, *memory])
    header = ["takes", "", "forward, times ours", "backward, times ours", "KiB a row, fp32", "KiB a row, bf16"]
    return _table(header, rows)


def _spread(values: pd.Series) -> str:
    return f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"


def machine() -> str:
    """Machine, date and layers of that comparison."""
    found = _benchmarks()
    layers = found.table[results.LAYER].drop_duplicates()
    about = found.about
    return (
        f"Median (smallest to largest) over {len(layers)} layers: {', '.join(layers['name'].unique())}; "
        f"{', '.join(layers['load'].unique())} loads; {' and '.join(layers['dtype'].unique())}. {about['threads']} "
        f"threads, torch {about['torch']}, {about['date']}."
    )


def host_cost() -> str:
    """Costs of a step on the host of a GPU."""
    counts = ("launches", "operators", "descriptors", "allocations")
    header = ["forward and backward", "us", "of these forward", "launches", "of PyTorch", "descriptors", "allocations"]
    rows = [
        [
            name,
            *(f"{row['us'][part]:.0f}" for part in ("both", "forward")),
            *(str(row[what]["both"]) for what in counts),
        ]
        for name, row in json.loads((RESULTS / "host_cost.json").read_text()).items()
    ]
    return _table(header, rows)


def transformers_tests() -> str:
    """Results of Transformers' own tests, by architecture."""
    found = json.loads((RESULTS / "transformers_tests.json").read_text())
    rows = [
        [
            name,
            row["experts"],
            *(str(row[who]["passed"]) for who in ("grouped_mm", "fusedmlp")),
            str(len(row["different"])),
            str(len(row["fail either way"])),
        ]
        for name, row in found["architectures"].items()
    ]
    seconds = sum(row[who]["seconds"] for row in found["architectures"].values() for who in ("grouped_mm", "fusedmlp"))
    about = f"Transformers {found['transformers']}, torch {found['torch']}, on two cores; {seconds} seconds."
    header = ["", "experts", "passed with `grouped_mm`", "passed with fusedmlp", "worse with it", "fail either way"]
    return f"{_table(header, rows)}\n\n{about}"


def integrations() -> str:
    """The public names of every integration, as the site's reference takes them."""
    return "\n\n".join(f"::: fusedmlp.integrations.{each.module}" for each in INTEGRATIONS)


FIGURES = {
    "README.md": (gpu.gpu_numbers,),
    "docs/index.md": (demo_in_short,),
    "docs/api.md": (integrations,),
    "docs/transformers.md": (transformers_tests,),
    "docs/benchmarks.md": (
        gpu.gpu_machine,
        gpu.gpu_steps,
        gpu.gpu_passes,
        gpu_stacks.gpu_stacks,
        comparison,
        machine,
        host_cost,
    ),
    "docs/compared.md": (
        gpu_pages.gpu_sorted_rows,
        gpu_pages.gpu_sorted_rows_h100,
        gpu_pages.gpu_tokens,
        gpu_pages.liger_published,
    ),
    "docs/eight_bit.md": (gpu_pages.gpu_eight_bit, gpu_pages.gpu_eight_bit_launches),
    "docs/kernels.md": (gpu_pages.gpu_two_sets, gpu_pages.gpu_gathered, gpu_pages.gpu_rings),
}


def render(page: str) -> str:
    """One of those pages with every figure as the results have it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for figure in FIGURES[page]:
        name = figure.__name__
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        replacement = figure().replace("\\", r"\\")
        text, count = re.subn(pattern, rf"\g<1>{replacement}\g<2>", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page}: expected one <!-- {name} --> ... <!-- /{name} -->; got {count}")
    return text


def pictures() -> dict[str, str]:
    """SVG text of pictures of results, by file name."""
    found = _benchmarks()
    drawn = {f"{name}.svg": draw(found.table, found.about["device"]) for name, draw in PICTURES.items()}
    return drawn | {"demo.svg": draw_demo(_load("demo")), "gpu_steps.svg": gpu.picture()}


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    for name in FIGURES:
        (ROOT / name).write_text(render(name), encoding="utf-8")
    for name, svg in pictures().items():
        (ROOT / "docs" / "pictures" / name).write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
