"""Checks of the kernels on a real GPU, one per process: `PYTHONPATH=tests:. python -m gpu.checks STEP`.

    cases        every pass and path by itself, in 16, 32 and 8 bits (tests/cases/cases.py); --part 2/6: every sixth
    bf16, fp16   forward and backward against float64, over ragged, empty and misaligned loads and layouts
    recipes      layers of 8-bit recipes against float64 products of quantized operands
    sync         the same under PyTorch's sync debug mode "error"
    gradients    two micro-batches into every destination, on two streams and in two threads (gradients.py)
    graph        capture, then replays with other loads, against runs without a graph
    repeat       the same bits in every run, on a GPU in a hundred beside other work (bits.py)
    invariant    bits of a row of a batch-invariant layer, alone and among hundreds of others
    small        one small step, for compute-sanitizer

On a CPU the torch implementation runs, or with TRITON_INTERPRET=1 the interpreter, to try the checks themselves; cases
need the interpreter. With `--device sm_90` kernels are compiled for that GPU and launched on a driver that does
nothing, and no numbers are compared.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from bench.host.without_gpu import without_gpu
from fusedmlp.environment import triton_interpret
from gpu import bits
from gpu.gradients import DESTINATIONS, Micro
from gpu.layers import LOADS, SMALL_LOADS, Case, Counts, Layer, cases, compare

# Norm of a difference. Tensor cores of sm_90 keep 13 bits of products of 8 bits, aligned to the largest of 32: h loses
# up to 32 * 2^-14 of that one: in these layers up to 1.4 * 2^-8 of a result's norm, on a GPU as in the emulator
# (`emulation/test_truncation.py`). A scale of another block shows as 2^-4.
ALLOWED = 2**-7


@dataclass(frozen=True)
class On:
    """The device that checks run on. `executes`: it executes kernels, so there are numbers to compare."""

    device: str  # of tensors
    small: bool = False
    executes: bool = True
    part: tuple[int, int] = (1, 1)

    @property
    def impl(self) -> str:
        """The implementation."""
        return "triton" if self.device == "cuda" or not self.executes or triton_interpret() else "torch"

    @property
    def runs(self) -> int:
        """The number of runs that must agree; an interpreter is slow."""
        return 3 if self.device == "cuda" else 2

    @property
    def repeats(self) -> int:
        """The number of runs of a case in `repeat`: an order of blocks that shows may be rare."""
        return 100 if self.device == "cuda" else 2

    @property
    def loads(self) -> dict[str, Counts]:
        """Rows of each expert, by name."""
        return SMALL_LOADS if self.small else LOADS

    @property
    def cases(self) -> dict[str, Case]:
        """The layers, by name; one where kernels of tiny shapes are only compiled."""
        every = cases(self.small)
        return every if self.executes or not self.small else {"add": every["add"]}

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether all bits are equal, or nothing is known of them."""
        return not self.executes or torch.equal(one, other)


def _report(each: Iterable[tuple[str, Callable[[], str]]]) -> None:
    """Run all checks, and report all failures."""
    failures = 0
    for name, check in each:
        try:
            print(f"ok   {name}{check()}", flush=True)
        except Exception as error:  # after a fault of the GPU, all other checks fail, too, and are reported
            failures += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if failures:
        raise SystemExit(f"{failures} failures")


def numerics(dtype: torch.dtype, on: On) -> None:
    """Check every case and load."""

    def check(case: Case, counts: Counts) -> str:
        layer = Layer(case, counts, dtype, on.device)
        results = layer.run(on.impl)
        return f": error {compare(layer, results):.1e}" if on.executes else ""

    _report(
        (f"{dtype} {name}, {load}", lambda case=case, counts=counts: check(case, counts))
        for (name, case), (load, counts) in itertools.product(on.cases.items(), on.loads.items())
    )


def passes(on: On) -> None:
    """Run the cases that the emulator executes, too."""
    from cases import cases as listed
    from cases import tiles

    from fusedmlp.kernels.tiles import select
    from fusedmlp.operators import triton_impl

    if on.impl == "torch":
        raise SystemExit("cases: expected a GPU, or TRITON_INTERPRET=1, with which they are interpreted")

    def check(case: listed.Case) -> str:
        with tiles.of(case.shape, triton_impl.WARP_SPECIALIZED, descriptors=case.descriptors):
            try:
                case.run()
            except AssertionError:
                if on.executes:
                    raise
        return ""

    every = [*listed.of_recipes(select.architecture(torch.device(on.device))), *listed.cases()]
    if on.small:
        every = [case for case in every if case.quick and case.id.startswith("short-bf16")]
    which, parts = on.part
    _report((case.id, lambda case=case: check(case)) for case in every[which - 1 :: parts])


def largest(distances: dict[str, float]) -> float:
    """Return the largest of distances that are all allowed; a NaN is not."""
    if not all(distance <= ALLOWED for distance in distances.values()):
        raise AssertionError(f"expected distances of at most {ALLOWED}; got {distances}")
    return max(distances.values())


def recipes(on: On) -> None:
    """Check layers whose GEMMs have operands of 8 bits, where the GPU has such kernels."""
    from cases import cases as listed
    from support.eight_bit import distances
    from support.eight_bit_layer import LAYERS
    from support.eight_bit_layer import Layer as EightBitLayer

    from fusedmlp.kernels.tiles import select

    recipe = listed.RECIPES.get(select.architecture(torch.device(on.device)))

    def check(name: str, wgrad: str) -> str:
        layer = EightBitLayer(**LAYERS[name], device=on.device)
        got = layer.results(recipe=recipe, wgrad=wgrad, impl=on.impl)
        if not on.executes:
            return ""
        return f": distance {largest(distances(got, layer.expected(recipe, wgrad, fused_bias=True))):.1e}"

    def check_saved(name: str) -> str:
        one, other = (
            EightBitLayer(**LAYERS[name], device=on.device).results(recipe=recipe, save=save, impl=on.impl)
            for save in ("x", "tokens")
        )
        if not all(on.equal(one[key], other[key]) for key in one):
            raise AssertionError(f"{name}: results differ where the tokens' copy is saved")
        return ""

    layers = [*LAYERS][: 1 if on.small else None] if recipe else []
    grid = itertools.product(layers, ("recipe", "bf16"))
    _report((f"{recipe} {name}, wgrad {wgrad}", lambda n=name, w=wgrad: check(n, w)) for name, wgrad in grid)
    _report((f"{recipe} {name}, save tokens", lambda n=name: check_saved(n)) for name in layers)


def sync(on: On) -> None:
    """No case synchronises the host, once kernels are compiled."""
    for name, case in on.cases.items():
        layer = Layer(case, on.loads["ragged"], torch.bfloat16, on.device)
        layer.run(on.impl)
        if on.device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            layer.run(on.impl)
        finally:
            if on.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        print(f"ok   {name}: nothing synchronises", flush=True)


def gradients(on: On) -> None:
    """The sum of two micro-batches has the same bits in every destination, run for run."""

    def check(name: str, apart: bool) -> str:
        expected = Micro(on.device, on.impl, apart, on.small).expected()
        for _ in range(on.runs):
            got = DESTINATIONS[name](Micro(on.device, on.impl, apart, on.small))
            if not all(one is not None and on.equal(one, other) for one, other in zip(got, expected, strict=True)):
                raise AssertionError(f"{name}: the sum of two micro-batches differs from that of two steps")
        return ""

    grid = itertools.product(DESTINATIONS, (False, True))
    _report((f"{name}{', apart' * apart}", lambda n=name, a=apart: check(n, a)) for name, apart in grid)


def graph(on: On) -> None:
    """Replay captured steps: plain, with tables of addresses (of experts' tensors, of micro-batches), and of tokens."""
    names = ("add", "apart", "fused queue", "tokens", "tokens, apart, fused queue")
    for name in filter(on.cases.get, names):
        _replay(name, on.cases[name], on)


def _replay(name: str, case: Case, on: On) -> None:
    """A captured step, replayed with other loads of no more rows, equals the step without a graph."""
    loads = ((20, 0, 7, 3), (0, 30, 0, 0)) if on.small else ((300, 0, 100, 56), (0, 456, 0, 0))
    layer, fresh = (Layer(case, loads[0], torch.bfloat16, on.device) for _ in range(2))
    if on.device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer.run()
        torch.cuda.current_stream().wait_stream(stream)
        layer.x.grad = layer.probs.grad = None
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = layer.run()
    for counts in loads:
        for one in (layer, fresh):
            one.load(counts)
            for param in itertools.chain(*one.weights):
                param.main_grad.fill_(0.5)
        if on.device == "cuda":
            captured.replay()
        else:
            results = layer.run(on.impl)
        expected = fresh.run(on.impl)
        for key, want in expected.items():
            if not on.equal(results[key], want):
                raise AssertionError(f"{name}, {key}: the replay differs at load {counts}")
        print(f"ok   {name}: replay at load {counts}", flush=True)


def repeat(on: On) -> None:
    """Equal inputs give the same bits, whatever else the GPU does meanwhile."""
    other_work = bits.OtherWork(on.device)

    def run(case: Case) -> dict[str, torch.Tensor]:
        layer = Layer(case, on.loads["ragged"], torch.bfloat16, on.device)
        other_work.enqueue()
        return {key: bits.of(result) for key, result in layer.run(on.impl).items()}

    def check(case: Case) -> str:
        first = run(case)
        for number in range(2, on.repeats + 1):
            differing = [key for key, result in run(case).items() if not on.equal(first[key], result)]
            if differing:
                raise AssertionError(f"{', '.join(differing)} of run {number} differ from those of the first")
        return f": the same bits in {on.repeats} runs" if on.executes else ""

    _report((name, lambda case=case: check(case)) for name, case in on.cases.items())


def invariant(on: On) -> None:
    """Bits of a row of a batch-invariant layer do not depend on other rows, nor on addresses."""
    recipe: str | None = "fp8_block"
    if on.impl == "triton":
        from cases import cases as listed

        from fusedmlp.kernels.tiles import select

        recipe = listed.RECIPES.get(select.architecture(torch.device(on.device)))

    def check(layer: bits.Layer) -> str:
        try:
            return bits.check(layer)
        except AssertionError:
            if on.executes:
                raise
        return ""

    every = bits.layers(on.device, on.impl, recipe, on.small)
    if on.small and not on.executes:
        every = itertools.islice(every, 1)
    _report((name, lambda layer=layer: check(layer)) for name, layer in every)


def small_step(on: On) -> None:
    """Every case once, for a memory checker."""
    for case in on.cases.values():
        Layer(case, on.loads["ragged"], torch.bfloat16, on.device).run(on.impl)
    print("ok   small steps", flush=True)


STEPS: dict[str, Callable[[On], None]] = {
    "cases": passes,
    "bf16": lambda on: numerics(torch.bfloat16, on),
    "fp16": lambda on: numerics(torch.float16, on),
    "recipes": recipes,
    "sync": sync,
    "gradients": gradients,
    "graph": graph,
    "repeat": repeat,
    "invariant": invariant,
    "small": small_step,
}


def main(arguments: list[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or a GPU that is not there, such as sm_90")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th of the cases, from the K-th on")
    parsed = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    which, parts = map(int, parsed.part.split("/"))
    missing = parsed.device.startswith("sm_")
    on = On("cpu" if missing else parsed.device, parsed.small, not missing, (which, parts))
    with without_gpu(parsed.device) if missing else nullcontext():
        STEPS[parsed.step](on)


if __name__ == "__main__":
    main(sys.argv[1:])
