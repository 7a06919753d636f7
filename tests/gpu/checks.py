"""Checks of the kernels on a real GPU, one per process: `PYTHONPATH=tests:. python -m gpu.checks STEP`.

    cases        passes by themselves, as the emulator executes them at every commit (tests/cases/cases.py)
    all-cases    the same for every pass and path, which takes a while
    bf16, fp16   forward and backward against float64, over ragged, empty and misaligned loads and layouts
    sync         the same under PyTorch's sync debug mode "error"
    graph        capture, then replays with other loads, against runs without a graph
    repeat       the same bits in every run
    small        one small step, for compute-sanitizer

On a CPU the torch implementation runs, or with TRITON_INTERPRET=1 the interpreter, to try the checks themselves; cases
need the interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable

import torch

from fusedmlp.environment import triton_interpret
from gpu.layers import LOADS, SMALL_LOADS, Case, Layer, cases, compare


def numerics(dtype: torch.dtype, device: str, small: bool) -> None:
    """Check every case and load, and report all failures."""
    failures = 0
    for (name, case), (load, counts) in itertools.product(
        cases(small).items(), (SMALL_LOADS if small else LOADS).items()
    ):
        layer = Layer(case, counts, dtype, device)
        try:
            print(f"ok   {dtype} {name}, {load}: error {compare(layer, layer.run(_impl(device))):.1e}", flush=True)
        except Exception as error:  # after a fault of the GPU, all other cases fail, too, and are reported
            failures += 1
            print(f"FAIL {dtype} {name}, {load}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if failures:
        raise SystemExit(f"{failures} failures")


def passes(device: str, small: bool, everything: bool = False) -> None:
    """Run the cases that the emulator executes, too, and report all failures."""
    from cases import cases as listed
    from cases import tiles

    from fusedmlp.operators import triton_impl

    if device == "cpu" and not triton_interpret():
        raise SystemExit("cases: expected a GPU, or TRITON_INTERPRET=1, with which they are interpreted")
    failures = 0
    for case in listed.cases():
        if not (everything or (case.quick and (not small or case.id.startswith("short-bf16")))):
            continue
        try:
            with tiles.of(case.shape, triton_impl.SETTINGS, descriptors=case.descriptors):
                case.run()
            print(f"ok   {case.id}", flush=True)
        except Exception as error:
            failures += 1
            print(f"FAIL {case.id}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if failures:
        raise SystemExit(f"{failures} failures")


def sync(device: str, small: bool) -> None:
    """No case synchronises the host, once kernels are compiled."""
    for name, case in cases(small).items():
        layer = Layer(case, (SMALL_LOADS if small else LOADS)["ragged"], torch.bfloat16, device)
        layer.run(_impl(device))
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            layer.run(_impl(device))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        print(f"ok   {name}: nothing synchronises", flush=True)


def graph(device: str, small: bool) -> None:
    """Replay captured steps: plain, with tables of addresses (of experts' tensors, of micro-batches), and of tokens."""
    for name in ("add", "apart", "fused queue", "tokens", "tokens, apart, fused queue"):
        _replay(name, cases(small)[name], device, small)


def _replay(name: str, case: Case, device: str, small: bool) -> None:
    """A captured step, replayed with other loads of no more rows, equals the step without a graph."""
    loads = ((20, 0, 7, 3), (0, 30, 0, 0)) if small else ((300, 0, 100, 56), (0, 456, 0, 0))
    layer, fresh = (Layer(case, loads[0], torch.bfloat16, device) for _ in range(2))
    if device == "cuda":
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
        if device == "cuda":
            captured.replay()
        else:
            results = layer.run(_impl(device))
        expected = fresh.run(_impl(device))
        for key, want in expected.items():
            if not torch.equal(results[key], want):
                raise AssertionError(f"{name}, {key}: the replay differs at load {counts}")
        print(f"ok   {name}: replay at load {counts}", flush=True)


def repeat(device: str, small: bool) -> None:
    """Equal inputs give the same bits."""
    for name, case in cases(small).items():
        runs = [
            Layer(case, (SMALL_LOADS if small else LOADS)["ragged"], torch.bfloat16, device).run(_impl(device))
            for _ in range(3)
        ]
        for other, key in itertools.product(runs[1:], runs[0]):
            if not torch.equal(runs[0][key], other[key]):
                raise AssertionError(f"{name}: {key} differs between runs")
        print(f"ok   {name}: the same bits", flush=True)


def small_step(device: str, small: bool) -> None:
    """Every case once, for a memory checker."""
    for case in cases(small).values():
        Layer(case, SMALL_LOADS["ragged"], torch.bfloat16, device).run(_impl(device))
    print("ok   small steps", flush=True)


def _impl(device: str) -> str:
    return "triton" if device == "cuda" or triton_interpret() else "torch"


STEPS: dict[str, Callable[[str, bool], None]] = {
    "cases": passes,
    "all-cases": lambda device, small: passes(device, small, everything=True),
    "bf16": lambda device, small: numerics(torch.bfloat16, device, small),
    "fp16": lambda device, small: numerics(torch.float16, device, small),
    "sync": sync,
    "graph": graph,
    "repeat": repeat,
    "small": small_step,
}


def main(arguments: list[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parsed = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    STEPS[parsed.step](parsed.device, parsed.small)


if __name__ == "__main__":
    main(sys.argv[1:])
