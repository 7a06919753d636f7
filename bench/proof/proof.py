"""One row per kernel that a launch can need, with its problems."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from bench.proof import assembly, cases, cubin, resources
from bench.proof.compiling import Compiled, compiled, compiling_for
from fusedmlp.kernels.launching import direct
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.warp_specialized import gluon_missing
from fusedmlp.targets import TARGETS, Target

Dtype = Literal["bf16", "fp16", "fp32", "tf32"]
DTYPES: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,  # as torch's global setting allows on NVIDIA GPUs
}
TENSOR_MEMORY_COLUMNS = 512
# Bytes of a thread that a kernel may spill where no step of its main loop touches them. fc1_act spills in the
# epilogue of gelu, which has 6,000 instructions, as Triton 3.8.0 compiles it.
SPILLS_OUTSIDE_OF_STEPS = {"grouped_wgrad_fp8_block": 8, "grouped_fc1_act_fp8_block": 16}
# Kernel -> the one instruction with which it may update global memory. Blocks run in any order, so a sum over them
# differs from run to run; but each element of main_grad is in one tile of wgrad, which is added to it once.
UPDATES = {
    f"grouped_wgrad{kind}": "cp.reduce.async.bulk.tensor." for kind in ("", "_warp_specialized", "_fp8_block", "_mxfp8")
}
# The number of variants that stand for all of a configuration; for fp16, which needs what bf16 needs, of a kernel.
_VARIANTS: dict[Dtype, int] = {"bf16": 3, "fp32": 2, "tf32": 1, "fp16": 1}


@dataclass(frozen=True)
class Row:
    """One compiled kernel. Bytes: `spill_bytes` of one thread, `shared_bytes` of one block."""

    kernel: str
    config: str
    target: str
    dtype: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    tensor_core_instructions: int = 0
    tma_instructions: int = 0
    warnings: tuple[str, ...] = ()  # ptxas's, of wgmma
    hash: str = ""  # of the PTX or assembly; empty if it does not compile
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether the kernel is fit to ship."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        row = asdict(self) | {"ok": self.ok}
        del row["problems"]
        return row


class Task(NamedTuple):
    """The kernels that one worker process compiles."""

    target: str
    dtype: Dtype
    all_variants: bool = False
    only_hashes: bool = False  # rows have nothing but a hash, for which ptxas need not run
    one_variant: bool = False  # of each configuration, the first


def tasks(targets: Sequence[str], all_variants: bool = False, only_hashes: bool = False) -> list[Task]:
    """Everything to be proven for those targets, the longest first."""
    return [
        Task(target, dtype, all_variants, only_hashes)
        for dtype in DTYPES
        for target in targets
        if not (dtype == "tf32" and TARGETS[target].is_amd)
    ]


def prove(wanted: Sequence[Task], jobs: int, progress: Callable[[Task], None] = lambda _: None) -> list[Row]:
    """Compile every row of the tasks' tables, in `jobs` processes, which need `TRITON_INTERPRET` unset.

    Each row is compiled in the few variants of `cases.DEMANDING`, or in `all_variants`, which takes much longer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that every process starts with Triton imported

    def run(task: Task) -> list[Row]:
        # A process of its own: the compiler ends its process when it fails an assertion.
        with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as process:
            try:
                return process.submit(rows, task).result()
            except BrokenProcessPool:
                return [Row("?", "?", *task[:2], problems=("the compiler ended its process",))]

    done: dict[Task, list[Row]] = {}
    with ThreadPoolExecutor(jobs) as threads:
        futures = {threads.submit(run, task): task for task in wanted}
        try:
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                progress(futures[future])
        except BaseException:  # an interrupt: wait for no kernel
            threads.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                for child in multiprocessing.active_children():
                    child.kill()
                time.sleep(0.05)
            raise
    return [row for task in sorted(wanted, key=lambda task: list(TARGETS).index(task.target)) for row in done[task]]


def rows(task: Task) -> list[Row]:
    """Compile one target's kernels for one dtype; a kernel that several cases launch is one row, named by the first."""
    torch.set_num_threads(1)
    target = TARGETS[task.target]
    formats: set[table.Format] = {table.FORMATS[DTYPES[task.dtype]]}
    if task.dtype == "bf16":
        formats |= {*table.RECIPES[task.target]}
    of_format = {key: tile for key, tile in table.TABLES[task.target].items() if key.format in formats}
    found: dict[str, tuple[Compiled, str]] = {}
    unused = {(*key[:2], tile) for key, tile in of_format.items()}
    wanted = _wanted(task)
    with compiling_for(target, binaries=not task.only_hashes):
        for shape, with_tma, warp_specialized, chosen in _settings(of_format, task):
            planned_for = target.planned_for(shape, with_tma, warp_specialized, task.dtype == "tf32")
            for case, call in chosen.items():
                for launch in filter(wanted, cases.launches(call(DTYPES[task.dtype]), planned_for)):
                    if launch.chosen:
                        unused.discard((*launch.chosen.key[:2], launch.chosen.tile))
                    made = compiled(launch)
                    key = getattr(made.kernel, "hash", None) or repr((launch.name, launch.sizes, case))
                    found.setdefault(key, (made, case))
    if task.dtype == "fp16":  # its configurations are those of bf16
        unused.clear()
    unreached = [
        Row(kernel, f"{path} {tile}", *task[:2], problems=("no launch uses this configuration",))
        for kernel, path, tile in sorted(unused, key=str)
    ]
    return [*judge(list(found.values()), task), *unreached]


def _settings(of_format: table.Tiles, task: Task) -> Iterator[tuple[table.ShapeClass, bool, bool, cases.Cases]]:
    """`(shape class, whether descriptors can be used, whether kernels are warp-specialized, cases)`, which together use
    the whole table; then cases that the table does not have.
    """
    yield from _settings_of_table(of_format, task)
    if task.dtype == "bf16":  # once: these cases have every dtype
        yield "long", True, False, cases.quantizing(table.RECIPES[task.target])
        for recipe in sorted({key.format for key in of_format} & {*table.RECIPES[task.target]}):
            yield "long", True, False, cases.eight_bit(recipe)


def _settings_of_table(
    of_format: table.Tiles, task: Task
) -> Iterator[tuple[table.ShapeClass, bool, bool, cases.Cases]]:
    warp_specialized = any(key.path == "warp_specialized" for key in of_format) and not gluon_missing()
    shapes: list[table.ShapeClass] = ["long"]
    if any(tile != of_format[key._replace(shape="long")] for key, tile in of_format.items() if key.shape == "short"):
        shapes.append("short")
    if not task.all_variants:
        for shape in shapes:
            yield shape, True, False, cases.DEMANDING
        if warp_specialized:
            yield "long", True, True, cases.WARP_SPECIALIZED
        return
    all_cases = cases.DEMANDING | cases.CORE
    if task.dtype in ("bf16", "fp32"):
        all_cases = all_cases | cases.VARIATIONS
    if task.dtype == "bf16":
        all_cases = all_cases | cases.ONCE
    for shape in shapes:
        yield shape, True, False, all_cases if shape == "long" else cases.DEMANDING | cases.CORE
        if any(key.path in table.BY_DESCRIPTORS for key in of_format):
            yield shape, False, False, cases.CORE
    if warp_specialized:
        yield "long", True, True, all_cases


def _wanted(task: Task) -> Callable[[Launch], bool]:
    """Selects the launches to compile; those without a tile of the table are the same for all tasks of a target."""
    seen: dict[Any, set[Any]] = defaultdict(set)

    def wanted(launch: Launch) -> bool:
        if task.all_variants or (launch.chosen is None and task.dtype == "bf16"):
            return True
        key = launch.chosen and launch.chosen.key._replace(shape="long")
        adapted = launch.arguments.get("rank") is not None
        what = (launch.name, adapted) if task.dtype == "fp16" else (key, launch.sizes, adapted)
        kind = direct.compiled_kind(launch)
        if launch.chosen is None or kind in seen[what]:
            return False
        seen[what].add(kind)
        return len(seen[what]) <= (1 if task.one_variant else _VARIANTS[task.dtype])

    return wanted


def judge(launches: Sequence[tuple[Compiled, str]], task: Task) -> list[Row]:
    """The rows of launches, each with the name of its case."""
    return [_row(made, case, task) for made, case in launches]


def _row(made: Compiled, case: str, task: Task) -> Row:
    launch, kernel = made.launch, made.kernel
    config = f"{launch.path} {launch.sizes}; {case}"
    if isinstance(kernel, Exception):
        text = " ".join(f"{type(kernel).__name__}: {kernel}".split())
        return Row(launch.name, config, *task[:2], problems=(f"does not compile: {text[:200]}",))
    source, is_amd = resources.source(kernel)
    code = assembly.hash_of(source, is_amd=is_amd)
    if task.only_hashes:
        return Row(launch.name, config, *task[:2], hash=code)
    used = resources.of(kernel)
    is_gemm = launch.name.startswith("grouped_") and not _sums_biases_alone(launch)
    warnings = cubin.warnings(kernel, made.log)
    found = [f"{code}: wgmma serialized" for code in warnings]
    spills_allowed = SPILLS_OUTSIDE_OF_STEPS.get(launch.name, 0)
    found += problems(
        used, TARGETS[task.target], task.dtype, launch.path, is_gemm=is_gemm, spills_allowed=spills_allowed
    )
    if used.spill and spills_allowed and assembly.spills_in_a_step(cubin.sass(kernel)):
        found.append("spills in a step")
    if launch.chosen and launch.chosen.key.format == "mxfp8":
        found += problems_of_mxfp8(used)
    found += problems_of_order(used, launch.name)
    return Row(
        launch.name,
        config,
        *task[:2],
        used.registers,
        used.spill,
        used.shared,
        sum(used.tensor_core.values()),
        used.tma,
        warnings,
        code,
        tuple(found),
    )


def _sums_biases_alone(launch: Launch) -> bool:
    """Whether it is a wgrad without a right operand."""
    right = [value for name, value in launch.arguments.items() if name in ("right_ptr", "right_desc")]
    return launch.name.startswith("grouped_wgrad") and all(value is None for value in right)


def problems(
    used: resources.Resources, target: Target, dtype: Dtype, path: table.Path, *, is_gemm: bool, spills_allowed: int = 0
) -> Iterator[str]:
    """Why a kernel is not fit to ship. GEMMs in exact fp32 may do without tensor cores, which have no such mode."""
    if used.spill > spills_allowed:
        yield f"spills {used.spill} bytes a thread"
    if used.shared > target.shared_bytes:
        yield f"shared memory {used.shared:,} over {target.shared_bytes:,} bytes"
    if used.tensor_memory > TENSOR_MEMORY_COLUMNS:
        yield f"tensor memory {used.tensor_memory} over {TENSOR_MEMORY_COLUMNS} columns"
    if is_gemm and dtype != "fp32" and not used.tensor_core:
        yield "a GEMM without tensor-core instructions"
    if is_gemm and target.name == "sm_90" and dtype in ("bf16", "fp16") and "wgmma" not in used.tensor_core:
        yield "a 16-bit GEMM without wgmma"
    if path in table.BY_DESCRIPTORS and target.has_tma and not used.tma:
        yield "descriptors without TMA instructions"


def problems_of_mxfp8(used: resources.Resources) -> Iterator[str]:
    """Triton compiles `tl.dot_scaled` to products of bf16 where it knows no instruction that takes scales."""
    others = sum(used.tensor_core.values()) - used.scaled
    if others:
        yield f"{others} tensor-core instructions without scales"


def problems_of_order(used: resources.Resources, kernel: str) -> Iterator[str]:
    """Updates of memory in the order in which threads happen to run: results could have other bits in every run."""
    for instruction in used.updates:
        if kernel not in UPDATES or not instruction.startswith(UPDATES[kernel]):
            yield f"{instruction} updates memory in any order"


def default_jobs() -> int:
    """One process for each core that this process may use."""
    return len(os.sched_getaffinity(0))
