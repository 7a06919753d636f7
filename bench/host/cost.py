"""Costs of a layer on the host of a GPU, measured without one: Triton's own launcher on a driver that does nothing.

    python -m bench.host [--json] [--profile ROW] [--seconds 30]

For a forward, a backward and both: Triton launches; other operators by which PyTorch launches kernels (no views, no
allocations); TMA descriptors built; tensors allocated; microseconds. Sizes are tiny, bf16, one thread. Rows take turns
in one process. A round is the median of its steps; the fastest round counts, as other processes use the machine, too.

Liger 0.8.5 (`pip install liger-kernel`) is a row, too: followed by the `main_grad.add_` that its gradients need, and
with its autotuner pinned (LIGER_FUSED_MOE_AUTOTUNE=0), its cheapest setting. Tensors are on the CPU: no row includes
the additional time of PyTorch and its allocator on a GPU, nor Liger's wait for the device, once a forward.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmlp
from bench.host import null_driver
from fusedmlp import calls, environment
from fusedmlp.operators import ops

H, F, T, K, DTYPE = 64, 64, 32, 2, torch.bfloat16
ROUND = 5
PARTS = ("forward", "backward", "both")
LIGER, BARE = "Liger, main_grad.add_", "kernel[grid], as many arguments"


class Row(NamedTuple):
    """A step in two parts: `backward` takes what `forward` returns, and leaves no gradient behind."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]


def layer(
    num_experts: int,
    *,
    tokens: bool = False,
    packed: bool = True,
    owner: str = "buffer",
    delay: bool = False,
    T: int = T,
) -> Row:
    """A step of fusedmlp into main_grad of a "buffer", or of an "owner", whose parameters may have a "flag"."""
    # fmt: off
    module = fusedmlp.GroupedMLP(num_experts, H, F, dtype=DTYPE, packed=packed, delay_wgrad=delay, impl="triton",
                                 accumulate_wgrad="main_grad")
    # fmt: on
    buffer = fusedmlp.MainGradBuffer(module.parameters()) if owner == "buffer" else None
    for param in module.parameters() if buffer is None else ():
        param.main_grad = torch.zeros(param.shape)
        if owner == "flag":
            param.grad_added_to_main_grad = False
    gets_grad, rows = [*module.parameters()], T if tokens else T * K
    x, dy = torch.randn(rows, H, dtype=DTYPE, requires_grad=True), torch.ones(rows, H, dtype=DTYPE)
    counts = torch.full((num_experts,), T * K // num_experts)
    index, weights = torch.arange(T * K, dtype=torch.int32).view(T, K) % num_experts, torch.rand(T, K, dtype=DTYPE)
    probs = (weights if tokens else weights.flatten()).requires_grad_()
    gets_grad += [x, probs]

    def forward() -> Tensor:
        if tokens:
            fc1, fc2 = module.fc1.weight, module.fc2.weight
            return fusedmlp.moe_experts(x, index, probs, fc1, fc2, impl="triton", accumulate_wgrad="main_grad")
        return module(x, counts, probs)

    def backward(y: Tensor, keep: Any = buffer) -> None:
        y.backward(dy)
        module.backward_dw()
        for tensor in gets_grad:
            tensor.grad = None

    return Row(forward, backward)


def liger(num_experts: int) -> Row:
    """The same step of the same layer with Liger's kernels."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    fc1 = torch.nn.Parameter(torch.randn(num_experts, 2 * F, H, dtype=DTYPE))
    fc2 = torch.nn.Parameter(torch.randn(num_experts, H, F, dtype=DTYPE))
    main_grads = [torch.zeros(w.shape) for w in (fc1, fc2)]
    index, weights = torch.arange(T * K, dtype=torch.int32).view(T, K) % num_experts, torch.rand(T, K, dtype=DTYPE)
    x, dy = torch.randn(T, H, dtype=DTYPE, requires_grad=True), torch.ones(T, H, dtype=DTYPE)
    weights.requires_grad_()

    def backward(y: Tensor) -> None:
        y.backward(dy)
        for w, main_grad in zip((fc1, fc2), main_grads, strict=True):
            assert w.grad is not None
            main_grad.add_(w.grad)
        fc1.grad = fc2.grad = x.grad = weights.grad = None

    return Row(lambda: LigerFusedMoEFunction.apply(x, fc1, fc2, index, weights), backward)


def engine(num_parameters: int) -> Row:
    """PyTorch's autograd alone: a layer with `num_parameters` parameters that returns no gradient for them."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.save_for_backward(x, *parameters)
            return dy

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            return dy, *[None] * (len(saved) - 1)

    dy, x = torch.ones(T * K, H, dtype=DTYPE), torch.ones(T * K, H, dtype=DTYPE, requires_grad=True)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)]

    def backward(y: Tensor) -> None:
        y.backward(dy)
        x.grad = None

    return Row(lambda: Nothing.apply(x, *parameters), backward)


# fmt: off
@triton.jit
def _bare_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr,
    C6: tl.constexpr, C7: tl.constexpr, C8: tl.constexpr, C9: tl.constexpr, C10: tl.constexpr, C11: tl.constexpr,
    C12: tl.constexpr, C13: tl.constexpr, C14: tl.constexpr,
):
    pass
# fmt: on


def bare() -> Row:
    """One launch of an empty kernel by Triton's own `kernel[grid]`, with as many arguments as our largest has."""
    pointers, numbers = [torch.zeros(16) for _ in range(17)], range(16, 16 * 14, 16)
    return Row(lambda: _bare_kernel[(1,)](*pointers, *numbers, *range(15)), lambda _: None)


def rows() -> dict[str, Row]:
    """The rows to measure, by name."""
    with_liger = {LIGER: liger(8)} if find_spec("liger_kernel") else {}
    return {
        "moe_experts, packed": layer(8, tokens=True),
        "moe_experts, packed, warp-specialized (128 rows an expert)": layer(8, tokens=True, T=512),
        **with_liger,
        "grouped_mlp, packed": layer(8),
        "grouped_mlp, 8 experts, one tensor each": layer(8, packed=False),
        "grouped_mlp, 64 experts, packed": layer(64),
        "grouped_mlp, 64 experts, one tensor each": layer(64, packed=False),
        "grouped_mlp, 64 experts, one tensor each, of an owner": layer(64, packed=False, owner="owner"),
        "grouped_mlp, 64 experts, one tensor each, with the flag": layer(64, packed=False, owner="flag"),
        "grouped_mlp, 64 experts, one tensor each, delayed": layer(64, packed=False, delay=True),
        "autograd alone, 128 parameters": engine(128),
        BARE: bare(),
    }


@contextmanager
def as_on_a_gpu() -> Iterator[null_driver.Counters]:
    """Make CPU tensors in this context take the code paths of tensors on a GPU."""
    counters, allocate, strided, ones = null_driver.install(), torch.empty, torch.empty_strided, torch.ones

    # Kernels, which write nothing, would fill indices, sizes and flags.
    def empty(*size: Any, **options: Any) -> Tensor:
        return (allocate if options.get("dtype", DTYPE).is_floating_point else ones)(*size, **options)

    def empty_strided(size: Any, strides: Any, **options: Any) -> Tensor:
        return strided(size, strides, **options) if options["dtype"].is_floating_point else ones(size, **options)

    with ExitStack() as patches:
        for patch in (
            mock.patch.object(environment, "triton_interpret", _yes),  # lets impl="triton" take CPU tensors
            mock.patch.object(calls, "offsets", _offsets),
            mock.patch.object(torch, "empty", empty),
            mock.patch.object(torch, "empty_strided", empty_strided),
        ):
            patches.enter_context(patch)
        yield counters


def _yes() -> bool:
    return True


def _offsets(counts: Tensor, x: Tensor, impl: str) -> Tensor:
    """Make offsets by kernels, as of counts on a GPU; `calls.offsets` would read CPU counts on the host."""
    return ops.expert_offsets(counts, x.shape[0], impl)  # type: ignore[no-any-return]


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators that launch something, and the tensors that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.launching = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedmlp":  # count the operators that it runs
            with self:
                return getattr(ops, func._opname).run(*args)
        new = sum(r.alias_info is None for r in func._schema.returns if "Tensor" in str(r.type))
        self.allocated += new
        allocates = new and func.__name__.startswith(("empty", "new_empty", "ones"))  # ones: see `as_on_a_gpu`
        self.launching += not (func.is_view or allocates)
        return func(*args, **(kwargs or {}))


def count(row: Row, counters: null_driver.Counters) -> dict[str, dict[str, int]]:
    """Counts by kind: of a forward, of a backward, and their sum."""

    def now() -> dict[str, int]:
        launches, descriptors = counters.read()
        return {
            "launches": launches,
            "descriptors": descriptors,
            "operators": operators.launching,
            "allocations": operators.allocated,
        }

    with Operators() as operators:
        start = now()
        result = row.forward()
        middle = now()
        row.backward(result)
        end = now()
    return {
        name: dict(zip(PARTS, (middle[name] - first, last - middle[name], last - first), strict=True))
        for name, first, last in ((name, start[name], end[name]) for name in start)
    }


def _step(row: Row) -> tuple[float, float, float]:
    start = time.perf_counter()
    result = row.forward()
    middle = time.perf_counter()
    row.backward(result)
    end = time.perf_counter()
    return middle - start, end - middle, end - start


def measure(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """`{row: {"us", "launches", "operators", "descriptors", "allocations": {"forward", "backward", "both"}}}`."""
    with as_on_a_gpu() as counters:
        steps = rows()
        for row in steps.values():
            for _ in range(4):  # compile kernels, remember programs, encode descriptors
                _step(row)
        counted = {name: count(row, counters) for name, row in steps.items()}
        rounds: dict[str, list[list[float]]] = {name: [] for name in steps}
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or not all(rounds.values()):
            for name, row in steps.items():
                times = zip(*(_step(row) for _ in range(ROUND)), strict=True)
                rounds[name].append([1e6 * statistics.median(part) for part in times])
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, of_row in rounds.items():
        fastest = (round(min(part), 1) for part in zip(*of_row, strict=True))
        found[name] = {"us": dict(zip(PARTS, fastest, strict=True)), **counted[name]}
    return found


def profile(name: str) -> None:
    """Where Python's time goes in one row, by cProfile."""
    with as_on_a_gpu():
        row = rows()[name]
        for _ in range(10):
            _step(row)
        with cProfile.Profile() as profiler:
            for _ in range(200):
                _step(row)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="spent on the times of all rows")
    parser.add_argument("--json", action="store_true", help="print an object instead of a table")
    parser.add_argument("--profile", metavar="ROW", help="print where the time of one row goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        profile(arguments.profile)
        return
    results = measure(arguments.seconds)
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    counts = ("launches", "operators", "descriptors", "allocations")
    print(f"{'':58}{'us: forward, backward, both':>28}  {'  '.join(counts)}")
    for name, row in results.items():
        times = "".join(f"{row['us'][part]:9.1f}" for part in PARTS)
        print(f"{name:58}{times:>28}", *(f"{row[what]['both']:{len(what) + 1}}" for what in counts))
    if LIGER not in results:
        print(f"{LIGER}: liger-kernel is not installed")
