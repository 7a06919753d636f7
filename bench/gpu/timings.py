"""Times of one shape on a GPU, in a process of its own: `python -m bench.gpu.timings SHAPE --csv FILE`.

For every load: every pass, forward, backward and both, beside `grouped_mm`, autograd and `main_grad.add_`, and Liger's
fused MoE when that can be imported (its rows are permuted inside, and the load is always even). With
FUSEDMLP_WARP_SPECIALIZED=1 the warp-specialized kernels alone, without peers. The ceilings, a dense bf16 product and a
large copy, are measured first and again last. Times are medians in ms by CUDA events.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from bench.limits import measure, roofline
from bench.limits.gpus import limit_ms
from bench.limits.measure import Ceilings, Layer
from bench.limits.shapes import LOADS, SHAPES, Shape
from fusedmlp.operators import triton_impl

COLUMNS = (
    "gpu",
    "driver",
    "torch",
    "triton",
    "kernels",
    "clock_mhz",
    "shape",
    "load",
    "what",
    "ms",
    "tflops",
    "gb_s",
    "of_limit",
)
TINY = Shape("tiny", 4, 32, 16, 40, 40)


def machine(device: str) -> dict[str, str]:
    """The columns with which every row of the CSV starts."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    versions["kernels"] = "warp_specialized" if triton_impl.SETTINGS.warp_specialized else "default"
    if device == "cpu":
        return {"gpu": "none", "driver": "none", **versions}
    return {"gpu": torch.cuda.get_device_name(), "driver": nvidia_smi("driver_version"), **versions}


def clock_mhz(device: str) -> str:
    """The multiprocessors' clock at this moment."""
    if device == "cpu":
        return ""
    return nvidia_smi("clocks.sm")


def nvidia_smi(field: str) -> str:
    """One property of the GPU; "unknown" where there is no nvidia-smi, as in some containers."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()


class GroupedMM:
    """PyTorch's grouped_mm with autograd; the gradients are then added to main_grad."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.ends = layer.counts.cumsum(0).to(torch.int32)

    def forward(self) -> torch.Tensor:
        """Run forward under plain autograd."""
        layer = self.layer
        gate, linear = F.grouped_mm(layer.x, layer.fc1.mT, offs=self.ends).chunk(2, dim=-1)
        a = (F.silu(gate) * linear * layer.probs.unsqueeze(1)).to(layer.x.dtype)
        return F.grouped_mm(a, layer.fc2.mT, offs=self.ends)

    def step(self) -> None:
        """Forward, backward and the adds."""
        self.layer.reset()
        self.forward().backward(self.layer.dy)
        for weight in (self.layer.fc1, self.layer.fc2):
            weight.main_grad.add_(weight.grad)
            weight.grad = None


def liger(layer: Layer, shape: Shape) -> Callable[[], None] | None:
    """Liger's fused MoE on `R / top-k` tokens, or None."""
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError:
        return None
    top_k = shape.R // shape.most
    device = layer.x.device
    x = torch.randn(shape.most, shape.H, dtype=layer.x.dtype, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    index = (torch.arange(shape.R, device=device) % shape.E).view(-1, top_k).to(torch.int32)
    weights = torch.rand(shape.most, top_k, device=device, dtype=x.dtype, requires_grad=True)

    def step() -> None:
        layer.reset()
        LigerFusedMoEFunction.apply(x, layer.fc1, layer.fc2, index, weights).backward(dy)
        for weight in (layer.fc1, layer.fc2):
            weight.main_grad.add_(weight.grad)
            weight.grad = None

    return step


def host_ms(run: Callable[[], object], repetitions: int = 2) -> float:
    """Stands in for `measure.time_ms` where there is no GPU, to try the rest of this file."""
    import time

    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - start) * 1e3 / repetitions


def rows_of(shape: Shape, load: str, ceiling: Ceilings, device: str) -> Iterator[dict[str, Any]]:
    """Every time of one load. A peer or a list of passes that fails is reported and left out."""
    counts = LOADS[load](shape)
    layer = Layer(shape, counts, device)
    passes = roofline.passes(shape, counts)
    time_ms = measure.time_ms if device == "cuda" else host_ms
    forward_backward = [passes[name] for name in roofline.FORWARD + roofline.BACKWARD]

    def row(what: str, ms: float, launches: list[Any]) -> dict[str, Any]:
        flops, num_bytes = (sum(getattr(launch, name) for launch in launches) for name in ("flops", "bytes"))
        limit = sum(limit_ms(launch.flops, launch.bytes, *ceiling) for launch in launches)
        rates = {"tflops": round(flops / ms / 1e9, 1), "gb_s": round(num_bytes / ms / 1e6, 1)}
        return {"load": load, "what": what, "ms": round(ms, 4), **rates, "of_limit": round(limit / ms, 3)}

    forward = time_ms(layer.forward)
    both = time_ms(layer.step)
    yield row("forward", forward, [passes[name] for name in roofline.FORWARD])
    yield row("backward", max(both - forward, 1e-6), [passes[name] for name in roofline.BACKWARD])
    yield row("forward + backward", both, forward_backward)
    peers: dict[str, Callable[[], object] | None] = {}
    if not triton_impl.SETTINGS.warp_specialized:
        peers["grouped_mm"] = GroupedMM(layer).step
    if load == "even" and not triton_impl.SETTINGS.warp_specialized:
        peers["liger"] = liger(layer, shape)
    for name, step in peers.items():
        if step is not None:
            with _reporting(f"{name} on {shape.name}, {load}"):
                yield row(f"{name} forward + backward", time_ms(step), forward_backward)
    if device == "cuda":
        with _reporting(f"passes on {shape.name}, {load}"):
            times = measure.pass_times(layer.step)
            overwriting = measure.pass_times(partial(layer.step, overwrite=True))
            times |= {f"{name}, overwrite": overwriting[name] for name in times if name.startswith("wgrad")}
            for name, ms in times.items():
                yield row(name, ms, [passes[name]])


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Print a failure inside, and go on."""
    try:
        yield
    except Exception as error:
        print(f"FAIL {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def measure_shape(shape: Shape, device: str, path: Path) -> None:
    """Append the rows of every load to the CSV as they come."""
    fixed = machine(device)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()

        def write(row: dict[str, Any]) -> None:
            writer.writerow(fixed | {"clock_mhz": clock_mhz(device), "shape": shape.name} | row)
            file.flush()
            print(f"{shape.name:<14}{row['load']:<15}{row['what']:<30}{row['ms']!s:>9} ms", end=" ")
            print(f"{row['tflops']!s:>7} TFLOP/s {row['gb_s']!s:>7} GB/s {row['of_limit']!s:>6}", flush=True)

        def write_ceilings() -> Ceilings:
            found = measure.ceilings() if device == "cuda" else Ceilings(1e12, 1e11)
            flops, gb_s = round(found.flops / 1e12, 1), round(found.bandwidth / 1e9, 1)
            write({"load": "", "what": "dense product", "ms": "", "tflops": flops, "gb_s": "", "of_limit": ""})
            write({"load": "", "what": "copy", "ms": "", "tflops": "", "gb_s": gb_s, "of_limit": ""})
            return found

        ceiling = write_ceilings()
        for load in LOADS:
            for row in rows_of(shape, load, ceiling, device):
                write(row)
            if device == "cuda":
                torch.cuda.empty_cache()
        write_ceilings()


def main(arguments: list[str]) -> None:
    """Command line."""
    shapes = {shape.name: shape for shape in (*SHAPES, TINY)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parsed = parser.parse_args(arguments)
    measure_shape(shapes[parsed.shape], parsed.device, parsed.csv)


if __name__ == "__main__":
    main(sys.argv[1:])
