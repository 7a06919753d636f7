"""`python -m fusedmlp bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from bench.limits import measure, rates, roofline
from bench.limits.gpus import GPUS


def run(
    what: Literal["roofline", "schedule", "model"],
    as_json: bool,
    before: Path | None = None,
    warp_specialized: bool = False,
    eight_bit: bool = False,
    cublas: float | None = None,
) -> None:
    """Print the rows of one report.

    For the model, `before` is an older table of budgets to compare with; `warp_specialized`: model those,
    and compare with the default kernels; `cublas`: TFLOP/s of cuBLAS at 8192 cubed on the machine that is meant.
    `eight_bit`: the model or the roofline of layers with 8-bit recipes.

    Raises:
        ValueError: no GPU that the model knows reaches that.
    """
    if eight_bit:
        from bench.limits import eight_bit as layers  # needs Triton

        if what == "model":
            rows, text = list(layers.model_rows()), eight_bit_model_line
            header = "\n".join((*_model_within(rows), _EIGHT_BIT_MODEL))
        else:
            rows, text = list(layers.roofline_rows(GPUS)), eight_bit_roofline_line
            header = "shape, load, launch, GPU: GFLOP, MB, limit in ms"
    elif what == "model":
        from bench.limits import model  # needs Triton

        rows, text = list(model.rows(before, warp_specialized, cublas)), model_line
        if not rows:
            raise ValueError(_no_such_machine(cublas))
        compared = str(before) if before else "the default kernels" if warp_specialized else ""
        header = "\n".join(_about_model(rows, compared, cublas))
    elif what == "schedule":
        from bench.limits import balance  # needs Triton

        rows, text = list(balance.rows()), schedule_line
        header = "shape, load, pass, GPU: tiles, tiles per multiprocessor, idle share of its time"
    else:
        rows, text = list(roofline.rows()), roofline_line
        header = f"shape, load, pass: GFLOP, MB, limit in ms on {', '.join(gpu.name for gpu in GPUS)}"
        if torch.cuda.is_available():
            rows = list(measure.beside_limits(rows))
            header += "; measured ms, and the share of the limit that this GPU's own ceilings set"
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(header, rows, text)


_EIGHT_BIT_MODEL = (
    "8-bit recipes (see docs/eight_bit.md); on sm_90 with additions overlapped with products, and without\n"
    "shape, load, launch, GPU: us, us without; of the whole TFLOP/s, without, TFLOP/s in bf16, times faster, without"
)


def _model_within(rows: Iterable[dict[str, Any]], cublas: float | None = None) -> Iterator[str]:
    within = {row["gpu"]: row["within"] for row in rows}
    shares = ", ".join(f"{gpu} {share:.0%}" for gpu, share in within.items())
    yield f"A model, not a measurement; nine of ten published figures that it had not seen are within: {shares}"
    for gpu in GPUS:
        if gpu.name not in within:
            known = cublas and gpu.architecture in rates.RATES
            why = f"no cuBLAS of {cublas:g} TFLOP/s" if known else f"no facts of such kernels for {gpu.architecture}"
            yield f"{gpu.name} is left out: {why}"


def _about_model(rows: Sequence[dict[str, Any]], before: str, cublas: float | None) -> Iterator[str]:
    yield from _model_within(rows, cublas)
    machines = "" if cublas else ", of the slowest and the fastest known machine"
    columns = (
        f"us, TFLOP/s{machines}, share of the limit, cycles of a step and of a tile beside its steps, what bounds it"
    )
    yield f"shape, load, pass, GPU: {columns}" + (f"; us by {before}, times faster now" if before else "")


def _no_such_machine(cublas: float | None) -> str:
    expected = (
        f"about {rates.CUBLAS[name] * slowest:.0f} to {rates.CUBLAS[name] * fastest:.0f} for {name}"
        for name, (slowest, fastest) in rates.MACHINES.items()
    )
    return f"expected TFLOP/s of cuBLAS, {' or '.join(expected)}; got {cublas:g}"


def run_published(as_json: bool) -> None:
    """Print the model's errors at published points."""
    from bench.limits.published import table  # needs Triton

    rows = table.rows()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    names = ("family", "step", "layer", "backward", "held out")
    kinds = {kind: [row for row in rows if row["row"] == kind] for kind in names}
    print_rows(
        "GPU, machine, kernel: points, TFLOP/s measured, by the model, mean error, largest",
        kinds["family"],
        family_line,
    )
    print_rows("\nStep of a design, GPU, M x N x K: times faster as measured, by the model", kinds["step"], step_line)
    title = "\nLayers of SonicMoE on an H100, hidden, ffn, experts, top-k: TFLOP/s measured, by the model, error"
    print_rows(title, kinds["layer"], layer_line)
    print_rows(_COMPARED, kinds["backward"], compared_line)
    title = "\nErrors of points by constants fitted to the other half, GPU, half: points, median, nine of ten"
    print_rows(title, kinds["held out"], held_out_line)


def family_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['gpu']:<7}{row['machine']:<14}{row['family']:<36}"
    figures = f"{row['points']:4} {row['measured']:8.1f} {row['predicted']:8.1f}"
    return f"{name}{figures} {row['error']:+7.1%} {row['largest']:+7.1%}"


def step_line(row: dict[str, Any]) -> str:
    """One row as text."""
    size = f"{row['M']} x {row['N']} x {row['K']}"
    return f"{row['title']:<42}{row['gpu']:<7}{size:<22}{1 + row['measured']:6.3f} {1 + row['predicted']:6.3f}"


_COMPARED = (
    "\nBackward on an H100, TFLOP/s of this library (adds to fp32) and of SonicMoE (writes bf16)\n"
    "shape: passes alone on sorted rows, by the model: ours; ours, writing bf16; those with all epilogues hidden;\n"
    "  layers: theirs as published; the same with main_grad.add_; ours by the model's ratio, times faster"
)


def layer_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['direction']:<10}{row['H']:6}{row['F']:6}{row['E']:5}{row['top_k']:4}"
    return f"{name} {row['tflops']:7.0f} {row['predicted']:7.0f} {row['error']:+7.1%}"


def compared_line(row: dict[str, Any]) -> str:
    """One row as text."""
    alone = " ".join(f"{row[name]:7.0f}" for name in ("gemms", "gemms_writing", "gemms_hidden"))
    layers = f"{row['published']:7.0f} {row['published_and_added']:7.0f} {row['layer']:7.0f}"
    return f"{row['shape']:<10}{alone}  {layers} {row['layer'] / row['published_and_added']:6.2f}"


def held_out_line(row: dict[str, Any]) -> str:
    """One row as text."""
    return f"{row['gpu']:<7}{row['tested']:<6}{row['points']:4} {row['median']:6.1%} {row['ninety']:6.1%}"


def print_rows(header: str, rows: Iterable[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
    """A title and one line per row."""
    print(header)
    for row in rows:
        print(text(row))


def roofline_line(row: dict[str, Any]) -> str:
    """One row as text."""
    limits = " ".join(f"{row['limit_ms'][gpu.name]:8.3f}" for gpu in GPUS)
    measured = f"  {row['ms']:8.3f} {row['of_limit']:5.2f}" if "ms" in row else ""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<21}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {limits}{measured}"


def eight_bit_model_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<23}{row['gpu']:<10}"
    line = f"{name}{row['us']:9.1f} {row['us_apart']:9.1f}"
    if "tflops" not in row:
        return f"{line} {row['bound']}"
    rates = f" {row['tflops']:7.1f} {row['tflops_apart']:7.1f} {row['bf16_tflops']:7.1f}"
    return f"{line}{rates} {row['faster']:5.2f} {row['faster_apart']:5.2f}"


def eight_bit_roofline_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<23}{row['gpu']:<10}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {row['limit_ms']:8.3f}"


def schedule_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    return f"{name}{row['tiles']:8} {row['tiles_per_processor']:8.1f} {row['idle']:6.1%}"


def model_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    machines = "".join(f" {each:7.1f}" for each in row["machines"])
    line = f"{name}{row['us']:9.1f} {row['tflops']:7.1f}{machines} {row['of_limit']:6.1%}"
    tile = f" {row['step_cycles']:7.0f} {row['bubble_cycles']:7.0f} {row['bound']:<7}" if "bound" in row else " " * 24
    before = f" {row['us_before']:9.1f} {row['us_before'] / row['us']:6.2f}" if "us_before" in row else ""
    return (line + tile + before).rstrip()
