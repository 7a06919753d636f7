"""`python -m fusedmlp bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from bench.limits import lines, measure, rates, roofline
from bench.limits import scope as scopes
from bench.limits.scope import Scope

Report = tuple[str, list[dict[str, Any]], Callable[[dict[str, Any]], str]]  # title, rows, a row as text


class Options(NamedTuple):
    """Options of a report; those of the model, but for the first two.

    `scope`: layers, loads and GPUs. `eight_bit`: the model or the roofline of layers with 8-bit recipes. `before`: an
    older table of budgets to compare with. `warp_specialized`: model those, and compare with the default kernels.
    `cublas`: TFLOP/s of cuBLAS at 8192 cubed on the machine that is meant.
    """

    scope: Scope = scopes.ALL
    eight_bit: bool = False
    before: Path | None = None
    warp_specialized: bool = False
    cublas: float | None = None


_DEFAULT = Options()


def run(what: Literal["roofline", "schedule", "model"], as_json: bool, options: Options = _DEFAULT) -> None:
    """Print the rows of one report.

    Raises:
        ValueError: no GPU or no layer of the scope has such a report.
    """
    header, rows, text = _REPORTS[what](options)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(header, rows, text)


def _roofline(options: Options) -> Report:
    scope = options.scope
    if options.eight_bit:
        from bench.limits import eight_bit  # needs Triton

        header = "shape, load, launch, GPU: GFLOP, MB, limit in ms"
        return header, _found(list(eight_bit.roofline_rows(scope)), _NO_RECIPE), lines.eight_bit_roofline_line
    rows = list(roofline.rows(scope))
    header = f"shape, load, pass: GFLOP, MB, limit in ms on {', '.join(gpu.name for gpu in scope.gpus)}"
    if torch.cuda.is_available():
        rows = list(measure.beside_limits(rows, scope))
        header += "; measured ms, and the share of the limit that this GPU's own ceilings set"
    return header, rows, lines.roofline_line


def _schedule(options: Options) -> Report:
    from bench.limits import balance  # needs Triton

    header = "shape, load, pass, GPU: tiles, tiles per multiprocessor, idle share of its time"
    return header, list(balance.rows(options.scope)), lines.schedule_line


def _model(options: Options) -> Report:
    from bench.limits import model  # needs Triton

    scope, before, cublas = options.scope, options.before, options.cublas
    if options.eight_bit:
        from bench.limits import eight_bit

        rows = _found(list(eight_bit.model_rows(scope)), _NO_RECIPE)
        return "\n".join((*_model_within(rows, scope), _EIGHT_BIT_MODEL)), rows, lines.eight_bit_model_line
    if not (rows := list(model.rows(before, options.warp_specialized, cublas, scope))):
        raise ValueError(_no_such_machine(cublas) if cublas else f"expected one of {', '.join(rates.RATES)}")
    compared = str(before) if before else "the default kernels" if options.warp_specialized else ""
    return "\n".join(_about_model(rows, compared, options)), rows, lines.model_line


def _found(rows: list[dict[str, Any]], otherwise: str) -> list[dict[str, Any]]:
    if not rows:
        raise ValueError(otherwise)
    return rows


_REPORTS: dict[str, Callable[[Options], Report]] = {"roofline": _roofline, "schedule": _schedule, "model": _model}
_NO_RECIPE = "expected a GPU with an 8-bit recipe, and sizes that are multiples of its blocks: 128, or 32 (mxfp8)"


_EIGHT_BIT_MODEL = (
    "8-bit recipes (see docs/eight_bit.md); on sm_90 with additions overlapped with products, and without\n"
    "shape, load, launch, GPU: us, us without; of the whole TFLOP/s, without, TFLOP/s in bf16, times faster, without"
)


def _model_within(rows: Iterable[dict[str, Any]], scope: Scope, cublas: float | None = None) -> Iterator[str]:
    within = {row["gpu"]: row["within"] for row in rows}
    shares = ", ".join(f"{gpu} {share:.0%}" for gpu, share in within.items())
    yield f"A model, not a measurement; nine of ten published figures that it had not seen are within: {shares}"
    for gpu in scope.gpus:
        if gpu.name not in within:
            known = cublas and gpu.architecture in rates.RATES
            why = f"no cuBLAS of {cublas:g} TFLOP/s" if known else f"no facts of such kernels for {gpu.architecture}"
            yield f"{gpu.name} is left out: {why}"


def _about_model(rows: Sequence[dict[str, Any]], before: str, options: Options) -> Iterator[str]:
    yield from _model_within(rows, options.scope, options.cublas)
    machines = "" if options.cublas else ", of the slowest and the fastest known machine"
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
        lines.family_line,
    )
    title = "\nStep of a design, GPU, M x N x K: times faster as measured, by the model"
    print_rows(title, kinds["step"], lines.step_line)
    title = "\nLayers of SonicMoE on an H100, hidden, ffn, experts, top-k: TFLOP/s measured, by the model, error"
    print_rows(title, kinds["layer"], lines.layer_line)
    print_rows(lines.COMPARED, kinds["backward"], lines.compared_line)
    title = "\nErrors of points by constants fitted to the other half, GPU, half: points, median, nine of ten"
    print_rows(title, kinds["held out"], lines.held_out_line)


def print_rows(header: str, rows: Iterable[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
    """A title and one line per row."""
    print(header)
    for row in rows:
        print(text(row))
