"""Times of one shape and load, in groups: `python -m bench.gpu.timings SHAPE LOAD GROUP...`; see GROUPS.

A row a time goes to timings.csv in the folder $BENCH_GPU_OUT as it comes. Times are medians in ms by CUDA events: of
runs before which the L2 is flushed and the GPU waits, or, "sustained", of runs back to back. A row with "+add" ends
with `main_grad.add_`. A group that is in measured.txt is not measured again; one that fails leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import fusedmlp
from bench.gpu import lora as adapted
from bench.gpu import peers
from bench.gpu.card import Card
from bench.gpu.rows import COLUMNS, Table
from bench.host.without_gpu import without_gpu
from bench.limits import measure, roofline
from bench.limits.gpus import limit_ms
from bench.limits.measure import Layer
from bench.limits.shapes import LOADS, SHAPES, Shape
from fusedmlp.recipe import BLOCKS

SMALL = (Shape("tiny", 4, 128, 128, 64, 32), Shape("host", 8, 256, 256, 2048, 1024))
RECIPES = {9: ("fp8", "fp8_block"), 10: ("mxfp8", "mxfp8"), 12: ("mxfp8", "mxfp8")}  # by compute capability
FORWARD, BACKWARD = roofline.FORWARD, roofline.BACKWARD
STEP = FORWARD + BACKWARD
Rows = Iterator[dict[str, Any]]
Run = Callable[[], object]


@dataclass
class Subject:
    """A layer to time; tensors are made when a group first needs them."""

    shape: Shape
    load: str
    device: str
    card: Card
    ceilings: tuple[float, float] | None  # FLOP/s and bytes/s of this GPU, if measured

    @cached_property
    def layer(self) -> Layer:
        return Layer(self.shape, LOADS[self.load](self.shape), self.device)

    @cached_property
    def tokens(self) -> peers.Tokens | None:
        """None for rows of several ranks."""
        return peers.Tokens(self.shape, self.device) if self.shape.most < self.shape.R else None

    @cached_property
    def costs(self) -> dict[str, Any]:
        return roofline.passes(self.shape, LOADS[self.load](self.shape))

    def row(self, what: str, ms: float, passes: tuple[str, ...] = (), **other: Any) -> dict[str, Any]:
        """A row; where it is of passes, with their rates and their share of the limit."""
        costs, found = [self.costs[each] for each in passes], {"what": what, "ms": round(ms, 4), **other}
        if costs:
            found["tflops"] = round(sum(cost.flops for cost in costs) / ms / 1e9, 1)
            found["gb_s"] = round(sum(cost.bytes for cost in costs) / ms / 1e6, 1)
        if costs and self.ceilings:
            limit = sum(limit_ms(cost.flops, cost.bytes, *self.ceilings) for cost in costs)
            found["of_limit"] = round(limit / ms, 3)
        return found

    def burst(self, name: str, forward: Run, step: Run, suffix: str = "") -> Rows:
        """Rows of forward, of a step and, by their difference, of backward."""
        yield self.row(f"{name}forward", first := measure.time_ms(forward, 8), FORWARD)
        yield self.row(f"{name}step{suffix}", whole := measure.time_ms(step, 8), STEP)
        yield self.row(f"{name}backward{suffix}", max(whole - first, 1e-4), BACKWARD)

    def sustained(self, what: str, step: Run) -> dict[str, Any]:
        ms, joules = measure.sustained(step, 0.6, self.card.joules)
        return self.row(what, ms, STEP, joules="" if joules is None else round(joules, 3))

    def kernels(self, name: str, step: Run) -> Rows:
        for kernel, ms in measure.kernel_medians(step, 5):
            yield self.row(f"{name} kernel {kernel}", ms)


def ceilings(on: Subject) -> Rows:
    found, n = measure.ceilings(), 8192 if on.device == "cuda" else 8
    a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=on.device).normal_() for _ in range(2))
    ms, _ = measure.sustained(lambda: a @ b, 0.4, on.card.joules)
    for what, flops in (("dense product", found.flops), ("dense product sustained", 2e3 * n**3 / ms)):
        yield {"what": what, "load": "", "ms": round(2e3 * n**3 / flops, 4), "tflops": round(flops / 1e12, 1)}
    yield {"what": "copy", "load": "", "gb_s": round(found.bandwidth / 1e9, 1)}


def steps(on: Subject) -> Rows:
    yield from on.burst("", on.layer.forward, on.layer.step)
    yield on.row("step, overwrite", measure.time_ms(partial(on.layer.step, True), 6), STEP)


def first(on: Subject) -> Rows:
    """The first micro-batch of a step, which stores gradients and reads none; bf16 ones where there is no main_grad."""
    if on.tokens:
        yield on.row("tokens step, overwrite", measure.time_ms(partial(on.tokens.step, True), 6), STEP)
        on.tokens.overwrite(False)
    for name, layer in (("step, grad None", on.layer), ("tokens step, grad None", on.tokens)):
        if layer:
            with layer.without_main_grad():
                yield on.row(name, measure.time_ms(layer.step, 6), STEP)


def passes(on: Subject) -> Rows:
    for name, ms in measure.pass_times(on.layer.step, 5).items():
        yield on.row(f"pass {name}", ms, (name,))
    for name, ms in measure.pass_times(partial(on.layer.step, True), 5).items():
        if name.startswith("wgrad"):
            yield on.row(f"pass {name}, overwrite", ms, (f"{name}, overwrite",))


def sustained(on: Subject) -> Rows:
    forward, _ = measure.sustained(on.layer.forward, 0.25, on.card.joules)
    yield on.row("sustained forward", forward, FORWARD)
    yield (step := on.sustained("sustained step", on.layer.step))
    yield on.row("sustained backward", max(step["ms"] - forward, 1e-4), BACKWARD)


def tokens(on: Subject) -> Rows:
    if on.tokens:
        yield from on.burst("tokens ", on.tokens.forward, on.tokens.step)
        yield on.sustained("tokens sustained step", on.tokens.step)
        yield from on.kernels("tokens", on.tokens.step)


def eight_bit(on: Subject) -> Rows:
    layer, (name, recipe) = on.layer, RECIPES.get(torch.cuda.get_device_capability()[0], ("", ""))
    if not recipe or any(size % BLOCKS[recipe] for size in (on.shape.H, on.shape.F)):
        return

    def forward(**more: Any) -> torch.Tensor:
        options = {"probs": layer.probs, "recipe": recipe, **more}
        return fusedmlp.grouped_mlp(layer.x, layer.fc1, layer.fc2, layer.counts, **options)

    def step(**more: Any) -> None:
        layer.reset()
        forward(**more).backward(layer.dy)

    kept = partial(step, quantized_weights=fusedmlp.quantize_weights(layer.fc1, layer.fc2, recipe))
    yield from on.burst(f"{name} ", forward, step)
    yield on.row(f"{name} step, weights kept", measure.time_ms(kept, 6), STEP)
    yield on.row(f"{name} step, weights kept, tokens saved", measure.time_ms(partial(kept, save="tokens"), 6), STEP)

    layer.overwrite(True)
    yield on.row(f"{name} step, weights kept, overwrite", measure.time_ms(kept, 6), STEP)
    layer.overwrite(False)
    yield on.sustained(f"{name} sustained step, weights kept", kept)
    yield from on.kernels(name, kept)


def peak(on: Subject) -> Rows:
    for name, run in (("peak memory", on.layer.step), ("grouped_mm peak memory", peers.GroupedMM(on.layer).step)):
        on.layer.reset()
        yield {"what": name, "mib": round(measure.peak_bytes(run) / 2**20)}


def host(on: Subject) -> Rows:
    """Rows of a small layer, where the host is the limit."""
    runs = {"step": on.layer.step, "grouped_mm step+add": peers.GroupedMM(on.layer).step}
    for name, run in (runs | ({"tokens step": on.tokens.step} if on.tokens else {})).items():
        yield on.row(f"host {name}", measure.host_ms(run))


def lora(on: Subject) -> Rows:
    """Adapters beside frozen experts: no pass of `roofline.py` is theirs."""
    for prefix, layer in (("", on.layer), ("tokens ", on.tokens)):
        for what, run in adapted.steps(layer).items() if layer else ():
            yield on.row(f"{prefix}{what}", measure.time_ms(run, 6))
            yield {"what": f"{prefix}{what}, peak memory", "mib": round(measure.peak_bytes(run) / 2**20)}
    yield from on.kernels("LoRA", adapted.steps(on.layer)["LoRA step"])


def grouped_mm(on: Subject, name: str = "grouped_mm", activate: Any = peers.activate) -> Rows:
    peer = peers.GroupedMM(on.layer, activate)
    yield from on.burst(f"{name} ", peer.forward, peer.step, "+add")
    yield on.row(f"{name} step, grad None", measure.time_ms(peer.first_step, 6), STEP)
    yield on.sustained(f"{name} sustained step+add", peer.step)


def compiled(on: Subject) -> Rows:
    """The activation by inductor, the fairer peer."""
    backend = "inductor" if on.device == "cuda" else "eager"
    return grouped_mm(on, "grouped_mm compiled", torch.compile(peers.activate, backend=backend))


def _from_tokens(make: Callable[..., peers.Steps], on: Subject) -> Rows:
    for what, run in make(on.tokens, on.shape).items() if on.tokens else ():
        yield on.row(f"{make.__name__} {what}", measure.time_ms(run, 6), STEP)
        yield on.sustained(f"{make.__name__} sustained {what}", run)


_OWN = (ceilings, steps, first, passes, sustained, tokens, eight_bit, lora, grouped_mm, peak, host, compiled)
GROUPS: dict[str, Callable[[Subject], Rows]] = {each.__name__: each for each in _OWN}
GROUPS |= {each.__name__: partial(_from_tokens, each) for each in (peers.liger, peers.sonicmoe)}


def measure_groups(groups: list[str], shape: Shape, load: str, device: str, out: Path) -> int:
    """Write the rows of groups; return how many groups failed."""
    table, card, measured, failed = Table(out / "timings.csv"), Card(device), out / "measured.txt", 0
    kernels = "warp_specialized" if os.environ.get("FUSEDMLP_WARP_SPECIALIZED") == "1" else "default"
    fixed = json.loads((out / "machine.json").read_text()) | {"kernels": kernels, "shape": shape.name, "load": load}
    rates = {row["what"]: row for row in table.read()}
    known = {"dense product", "copy"} <= set(rates)
    of_gpu = (1e12 * float(rates["dense product"]["tflops"]), 1e9 * float(rates["copy"]["gb_s"])) if known else None
    on = Subject(shape, load, "cuda" if device == "cuda" else "cpu", card, of_gpu)
    for group in groups:
        name = f"{shape.name}, {load}, {kernels}: {group}"
        if measured.exists() and name in measured.read_text().splitlines():
            continue
        try:
            for row in GROUPS[group](on):
                table.append({**fixed, "clock_mhz": card.clock_mhz(), **row}, COLUMNS)
                print(f"{kernels} {shape.name} {load}: {row}")
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            vars(on).pop("tokens", None)  # large, and rarely needed twice
            with measured.open("a") as file:
                print(name, file=file)
    return failed


def main(arguments: list[str]) -> int:
    """Command line."""
    shapes = {shape.name: shape for shape in (*SHAPES, *SMALL)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--device", default="cuda", help="cuda, or a GPU that is not there, such as sm_90")
    parsed = parser.parse_args(arguments)
    out = Path(os.environ["BENCH_GPU_OUT"])
    with nullcontext() if parsed.device == "cuda" else without_gpu(parsed.device):
        return int(bool(measure_groups(parsed.groups, shapes[parsed.shape], parsed.load, parsed.device, out)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
