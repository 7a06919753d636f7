"""The README is true: its example runs as pasted, and all figures are those of the committed results."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.limits import roofline
from bench.limits.shapes import SHAPES, even
from bench.report import figures, gpu, gpu_pages
from fusedmlp.kernels.tiles.table import FLOPS_A_BYTE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "bench" / "results"


def test_it_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 110


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert len(links) > 10
    for link in links:
        page, _, anchor = link.partition("#")
        assert (ROOT / page).is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(encoding="utf-8"), re.M)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], link


def test_the_example_runs_as_pasted(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in example.splitlines() if line]
    assert len([line for line in lines if not line.startswith("import ")]) <= 12
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    norms = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(norms) == 3
    assert all(0 < norm <= 1 for norm in norms)


@pytest.mark.parametrize("page", figures.FIGURES)
def test_every_figure_comes_from_committed_results(page):
    assert figures.render(page) == (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_picture_comes_from_committed_results():
    for name, svg in figures.pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == svg + "\n", name


@pytest.mark.slow
def test_pictures_say_on_what_they_were_measured():
    for name, svg in figures.pictures().items():
        device = "one NVIDIA H200" if name == "gpu_steps.svg" else "a CPU: PyTorch's operators, not the kernels"
        assert f"Measured on {device}" in svg, name


def _rows(name, load="even"):
    """Rows of a table of a GPU, of one load, read without the code that makes the pages."""
    with (RESULTS / "gpu" / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("load", load) == load]


def _times(rows, **columns):
    found = [float(row["ms"]) for row in rows if all(row[name] == value for name, value in columns.items())]
    assert found, columns
    return found


def _ceilings(card):
    """TFLOP/s of a dense product, burst and sustained, and TB/s of a copy."""
    found = {row["what"]: row for row in _rows(f"{card}_timings", load="")}
    flops = [float(found[what]["tflops"]) for what in ("dense product", "dense product sustained")]
    return [*flops, float(found["copy"]["gb_s"]) / 1e3]


ABOUT = json.loads((RESULTS / "gpu" / "about.json").read_text())
TIMINGS, H100 = _rows("h200_timings"), _rows("h100_timings")
DENSE, _, COPY = _ceilings("h200")
LAYERS = sorted({row["shape"] for row in TIMINGS if row["what"] == "step"})


def test_figures_of_a_gpu_are_the_results():
    """Cells of every table of steps, passes and kernels, computed here without the code that makes the table."""
    ours, peer = (min(_times(TIMINGS, shape="sonic-c", what=what)) for what in ("step", "grouped_mm step+add"))
    (line,) = [line for line in gpu_pages.gpu_sorted_rows().splitlines() if line.startswith("| sonic-c ")]
    assert f"| {ours:.2f} | {peer:.2f} | **{peer / ours:.2f}** | " in line
    assert f"**Speed: {_beside_grouped_mm(TIMINGS)} times as fast**: " in README
    assert f"in {len(LAYERS)} layers, each by itself; {_beside_grouped_mm(TIMINGS, ' compiled')} where" in README
    # sonic-c is bound by FLOPs in all passes: 6 R H F in forward, 12 in backward.
    limit = 1e3 * 18 * 131072 * 4096 * 1024 / (1e12 * DENSE)
    (line,) = [line for line in gpu.gpu_steps().splitlines() if line.startswith("| sonic-c ")]
    assert f"| {ours:.2f} | {limit:.2f} | {100 * limit / ours:.0f}% | " in line
    # wgrad of qwen3-30b-8k is bound by main_grad: 8 bytes for each weight, and its operands in bf16.
    moved = 8 * 128 * 2 * 768 * 2048 + 2 * 65536 * (2 * 768 + 2048)
    limit, time = 1e-9 * moved / COPY, min(_times(TIMINGS, shape="qwen3-30b-8k", what="pass wgrad fc1"))
    (line,) = [line for line in gpu.gpu_passes().splitlines() if line.startswith("| qwen3-30b-8k ")]
    assert f"| {time:.2f} ({100 * limit / time:.0f}%) |" in line
    changes = [
        _times(TIMINGS, kernels="warp_specialized", shape=each, what="pass dgrad_act")[0]
        / _times(TIMINGS, kernels="default", shape=each, what="pass dgrad_act")[0]
        - 1
        for each in LAYERS
    ]
    assert f"| {100 * min(changes):+.0f}% to {100 * max(changes):+.0f}% |" in gpu_pages.gpu_two_sets()
    (kept,) = _times(TIMINGS, shape="sonic-c", what="fp8 sustained step, weights kept")
    hot = min(_times(TIMINGS, shape="sonic-c", what="sustained step"))
    (line,) = [line for line in gpu_pages.gpu_eight_bit().splitlines() if line.startswith("| sonic-c ")]
    assert line.endswith(f"| {hot:.2f} | {kept:.2f} | {hot / kept:.2f} |")
    launches = gpu_pages.gpu_eight_bit_launches()
    for what in ("_quantize_kernel", "_dgrad_act_quantize_kernel", "grouped_wgrad_fp8_block_kernel"):
        for time in _times(TIMINGS, shape="sonic-c", what=f"fp8 kernel {what}"):
            assert f" | {time:.2f} | " in launches


def test_kernels_know_the_ratio_of_the_ceilings():
    for card, ratio in FLOPS_A_BYTE.items():
        dense, _, copy = _ceilings(card.lower())
        assert round(dense / copy) == ratio


def _beside_grouped_mm(rows, kind=""):
    """By which factors steps of layers were faster than those of `grouped_mm` with the addition."""
    least, most = _beside(rows, rows, [(f"grouped_mm{kind} step+add", "step")])
    return f"{least:.1f} to {most:.1f}"


def _beside(others, ours, whats):
    """Least and largest quotient of the fastest times, over the layers and kinds of runs that both have."""
    found = []
    for mine, theirs in whats:
        for layer in {row["shape"] for row in ours}:
            times = [
                [float(row["ms"]) for row in rows if (row["shape"], row["what"]) == (layer, what)]
                for rows, what in ((ours, mine), (others, theirs))
            ]
            if all(times):
                found.append(min(times[0]) / min(times[1]))
    return min(found), max(found)


def _peak(what):
    (found,) = [int(row["mib"]) for row in TIMINGS if (row["shape"], row["what"]) == ("sonic-c", what)]
    return found


def _uneven(load, shape):
    return min(_times(_rows("h200_timings", load), shape=shape, what="step"))


def sentences():
    """Sentences with figures that are measured, by page: their text without figures, and the figures."""
    sonic, tiles = _rows("h200_sonicmoe"), _rows("h200_tiles")
    added, sustained = "forward+backward+main_grad", ", sustained 0.25 s"
    tokens = _beside(sonic, TIMINGS, [("tokens step", added), ("tokens sustained step", added + sustained)])
    alone = _beside(TIMINGS, sonic, [("forward+backward", "tokens step")])
    less = [f"{100 * (1 - ratio):.0f}" for ratio in tokens[::-1]]
    peak = [_peak("peak memory"), _peak("grouped_mm peak memory"), ABOUT["sonicmoe_peak_mib_of_a_step"]["sonic-c"]]
    uneven = [
        f"{_uneven(load, shape):.2f}"
        for load in ("zipf", "quarter empty")
        for shape in ("sonic-c", "qwen3-30b-8k", "deepseek-ep")
    ]
    ring = {"path": "warp_specialized", "BLOCK_M": "128", "BLOCK_N": "256", "GROUP_M": "8", "shape": "qwen3-30b-8k"}
    gemm, dgrad = (
        [
            f"{_times(tiles, **ring, **{'pass': name}, BLOCK_K=k, num_stages=stages, SUBTILES=subtiles)[0]:.3f}"
            for k, stages, subtiles in rings
        ]
        for name, rings in (
            ("gemm", (("64", "4", "4"), ("64", "3", "1"))),
            ("dgrad", (("32", "6", "8"), ("64", "3", "8"))),
        )
    )
    kept = "fp8 step, weights kept"
    wide = [shape.name for shape in SHAPES if shape.F >= 1024 and shape.name in {row["shape"] for row in TIMINGS}]
    in_8_bits = [
        min(_times(TIMINGS, shape=name, what="step")) / min(_times(TIMINGS, shape=name, what=kept))
        for name in wide
        if any((row["shape"], row["what"]) == (name, kept) for row in TIMINGS)
    ]
    quantize = [
        row["ms"] for row in TIMINGS if (row["shape"], row["what"]) == ("sonic-c", "fp8 kernel _quantize_kernel")
    ]
    rows, both, tokens = map(float, quantize)
    parts = [
        f"{_times(_rows('h200_fp8_variants'), run='3', shape='sonic-c', variant=variant, what=kernel)[0]:.2f}"
        for variant, kernel in (
            ("four parts", "12 grouped_wgrad_fp8_block_kernel"),
            ("two parts", "12 grouped_wgrad_fp8_block_kernel"),
            ("four parts", "over 12 grouped_wgrad_fp8_block_kernel"),
            ("two parts", "over 12 grouped_wgrad_fp8_block_kernel"),
            ("wrong: no promotion", "12 grouped_wgrad_fp8_block_kernel"),
            ("wrong: no MMA", "12 grouped_wgrad_fp8_block_kernel"),
        )
    ]
    slower = [
        _times(H100, kernels="warp_specialized", shape=name, what="pass wgrad fc1")[0]
        / _times(H100, kernels="default", shape=name, what="pass wgrad fc1")[0]
        for name in ("sonic-a", "sonic-b", "gpt-oss-20b")
    ]
    return [
        (
            "docs/eight_bit.md",
            "experts with an `F` of 1,024 or more are {:.2f} to {:.2f} times as fast as in bf16",
            [min(in_8_bits), max(in_8_bits)],
        ),
        ("docs/eight_bit.md", "On the H200 that is {:.2f} ms instead of {:.2f} for sonic-c", [both, rows + tokens]),
        (
            "README.md",
            "takes {} to {}% less time than SonicMoE and `main_grad.add_`, and {} to {}% more in a burst than SonicMoE",
            [*less, *(f"{100 * (1 / ratio - 1):.0f}" for ratio in alone[::-1])],
        ),
        ("README.md", "All figures are of commit {}, on one H200", [ABOUT["commit"]]),
        ("README.md", "steps were {} times as fast as `grouped_mm`'s", [_beside_grouped_mm(H100)]),
        (
            "docs/compared.md",
            "H100 of 80 GB. In that run a dense product reached {:.0f} TFLOP/s, sustained {:.0f}, and a copy "
            "{:.2f} TB/s",
            _ceilings("h100"),
        ),
        ("docs/compared.md", "fusedmlp took {} to {}% less time than SonicMoE with the addition", less),
        (
            "docs/compared.md",
            "SonicMoE without the addition took {} to {}% less time than fusedmlp",
            [f"{100 * (1 - ratio):.0f}" for ratio in alone[::-1]],
        ),
        (
            "docs/compared.md",
            "fusedmlp needs {} MiB, `grouped_mm` with the addition {}, and SonicMoE with it {}.",
            [f"{mib:,}" for mib in peak],
        ),
        (
            "docs/benchmarks.md",
            "steps of sonic-c, qwen3-30b-8k and deepseek-ep took {}, {} and {} ms, with a quarter of the experts empty "
            "{}, {} and {}.",
            uneven,
        ),
        (
            "docs/kernels.md",
            "Below {} FLOPs a byte on an H200 and {} on an H100 (their products over their copies, both measured: "
            "{:.0f} TFLOP/s over {:.2f} TB/s, {:.0f} over {:.2f}), memory is the limit.",
            [*FLOPS_A_BYTE.values(), DENSE, COPY, *_ceilings("h100")[::2]],
        ),
        (
            "docs/kernels.md",
            "On the H100, wgrad of fc1 that adds takes {:.0f} to {:.0f}% longer with the second set",
            [100 * min(slower) - 100, 100 * max(slower) - 100],
        ),
        ("docs/kernels.md", "(fc2 of qwen3: {} instead of {})", gemm),
        ("docs/kernels.md", "(qwen3: {} instead of {})", dgrad),
        (
            "docs/kernels.md",
            "With four parts, wgrad of fc1 takes {} instead of {} in sonic-c, and {} instead of {} where it overwrites."
            " Without promotion it would take {}, and without MMAs {}.",
            parts,
        ),
    ]


@pytest.mark.parametrize(("page", "text", "values"), sentences(), ids=lambda value: str(value)[:40])
def test_a_sentence_has_the_measured_figures(page, text, values):
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text.format(*values) in words


def test_figures_of_others_are_those_published():
    """The page says where each was published, and the FLOPs of backward that its text names are those of the limits."""
    found, page = gpu_pages.published()["Liger"], (ROOT / "docs" / "compared.md").read_text()
    assert Path(found["source"].split(",")[0]).name in page
    assert f"at `{found['commit']}`" in page
    for shape in SHAPES:
        if shape.name in found["tflops"]:
            costs = roofline.passes(shape, even(shape))
            flops = sum(costs[name].flops for name in roofline.BACKWARD)
            assert flops == 12 * shape.R * shape.H * shape.F
            row = f"| {shape.name}, backward | {found['tflops'][shape.name]['backward']} | "
            times = _times(TIMINGS, shape=shape.name, what="backward")
            assert row + f"{1e-9 * flops / min(times):.0f} |" in page
