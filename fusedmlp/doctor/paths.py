"""Kernels, tiles and paths of a layer's passes, read from the launches that their programs plan.

Programs are planned for uninitialised tensors with the layer's sizes and mean rows per expert, but few experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.launching.run import Operator
from fusedmlp.kernels.tiles import table
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments

WEIGHTS = ("packed", "separate", "megatron", "megatron_ddp")
# Launches of a step in their order, by the names that `bench --roofline` uses.
STEP = ("fc1_act", "fc2", "dgrad_act", "dx", "wgrad fc2", "wgrad fc1")
# Those that gather rows, if these come from tokens.
GATHERING = ("fc1_act", "dgrad_act", "wgrad fc2", "wgrad fc1")
# Reasons for the ring and the epilogue of a warp-specialized kernel.
_REGIMES = {
    "any": "",
    "small": "; four stages or more: small sizes",
    "mma_add": "; TMA adds to main_grad: many rows an expert, so MMAs are the limit",
    "mma_write": "; TMA writes main_grad: many rows an expert, so MMAs are the limit",
    "memory_add": "; main_grad is loaded ahead: few rows an expert, so memory is the limit",
    "memory_write": "; TMA writes main_grad: few rows an expert, so memory is the limit",
}
_EXPERTS, _ROWS = 3, 64


@dataclass(frozen=True)
class Problem:
    """A swiglu layer, letters as in `fusedmlp.functional`."""

    E: int = 128
    H: int = 2048
    F: int = 768
    R: int = 65536
    dtype: torch.dtype = torch.bfloat16
    # "packed"; "separate": an allocation for each expert; "megatron": views of one buffer, last expert first, as
    # Megatron-core's DDP makes with the distributed optimizer; "megatron_ddp": without it, only main_grad lies so
    weights: str = "packed"
    weight_layout: str = "out_in"  # or "in_out"


@dataclass(frozen=True)
class Pass:
    """The launch of one pass."""

    name: str  # as in `bench --roofline`
    kernel: str
    path: str  # "warp_specialized", "tma", "gather", "pointer" or "unaligned"
    tile: str
    why: str


def passes(problem: Problem, target: str, *, tokens: bool = False) -> list[Pass]:
    """Plan a forward and a backward with fp32 `main_grad`; return their passes in the order of their launches.

    `tokens`: return only those that gather rows, planned as for `moe_experts`.
    """
    shape = table.shape_class(problem.R / problem.E)
    planned_for = TARGETS[target].planned_for(shape, warp_specialized=triton_impl.SETTINGS.warp_specialized)
    programs = (operator.program(planned_for, *args) for operator, args in _step(problem, tokens))
    launches = [launch for program in programs for launch in program.launches if launch.chosen]
    return [
        Pass(name, launch.name, launch.path, launch.sizes, _why(launch, problem, target))
        for name, launch in zip(STEP, launches, strict=True)
        if not tokens or name in GATHERING
    ]


def note(problem: Problem) -> str:
    """Say where Megatron-core's DDP lays experts in another way than `passes` plans with, and what sets it right."""
    size = problem.H * problem.F
    if problem.weights == "megatron":
        return (
            "Planned as use_distributed_optimizer lays weights and main_grad: evenly spaced, at multiples of 128 "
            "bytes. With overlap_grad_reduce too, padding at the end of a bucket can come between two experts; then "
            "they are not evenly spaced, and tma becomes pointer. There is no such padding with "
            "expert_model_parallel_size above 1, without biases, if lcm(128, expert data parallel size) divides "
            f"H * F = {size} (65536, not 128, with pad_buckets_for_high_nccl_busbw). Otherwise, with that size above "
            f"1, bucket_size={size} spaces them evenly."
        )
    if problem.weights == "megatron_ddp":
        return (
            "Planned as DDP without use_distributed_optimizer lays main_grad: evenly spaced in one buffer, at "
            "multiples of 16 bytes. It can be unaligned if the buffer has a parameter whose size is no multiple of 4 "
            "elements (of 8 for gradients in bf16); then so is the path of wgrad. use_distributed_optimizer=True "
            "starts every parameter at a multiple of 64 elements, and has weights in one buffer, too."
        )
    return ""


def _step(problem: Problem, tokens: bool) -> Iterator[tuple[Operator, tuple[Any, ...]]]:
    H, F = problem.H, problem.F
    # As many rows as make the plans of the load; nothing is written.
    rows = max(_ROWS, -(-_EXPERTS * problem.R // problem.E))
    x, dy, h = (torch.empty(rows, width, dtype=problem.dtype) for width in (H, H, 2 * F))
    offsets = torch.empty(_EXPERTS + 1, dtype=torch.int32)
    row_ids = torch.empty(rows, dtype=torch.int32) if tokens else None
    probs = torch.empty(rows)
    shapes = ((2 * F, H), (H, F))
    of_weights = problem.weights.replace("megatron_ddp", "separate")
    weights = [_stored(problem, of_weights, shape, problem.dtype) for shape in shapes]
    grads = [_stored(problem, problem.weights, shape, torch.float32) for shape in shapes]
    forward = MLPArguments(
        x=x,
        x_scales=None,
        fc1=weights[0],
        fc2=weights[1],
        bias1=[],
        bias2=[],
        offsets=offsets,
        row_ids=row_ids,
        probs=probs,
        activation=Activation("swiglu").encoded,
        recipe="",
        impl="triton",
    )
    yield triton_impl.grouped_mlp, forward.without_impl
    backward = MLPBackwardArguments.of(
        forward,
        dw1=grads[0],
        dw2=grads[1],
        db1=[],
        db2=[],
        dy=dy,
        h=h,
        places=row_ids,
        accumulate1=True,
        accumulate2=True,
        need_dx=True,
        keep=False,
    )
    yield triton_impl.grouped_mlp_backward_, backward.without_impl


def _stored(problem: Problem, where: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return `experts` of that shape `[out, in]`, in the problem's layout."""
    if problem.weight_layout == "out_in":
        return experts(where, _EXPERTS, shape, dtype)
    return [stored.mT for stored in experts(where, _EXPERTS, shape[::-1], dtype)]


def experts(where: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised tensors of so many experts, as `Problem.weights` lays them."""
    if where == "packed":
        return [torch.empty(count, *shape, dtype=dtype)]
    if where == "separate":
        return [torch.empty(shape, dtype=dtype) for _ in range(count)]
    size = prod(shape)
    buffer = torch.empty(count * size, dtype=dtype)
    return [buffer[e * size : (e + 1) * size].view(shape) for e in reversed(range(count))]


def _why(launch: Launch, problem: Problem, target: str) -> str:
    """Return the reasons for a launch's path."""
    refused = launch.chosen.refused if launch.chosen else ""
    return (
        f"{_reason(launch, problem, target)}; not warp-specialized: {refused}"
        if refused
        else _reason(launch, problem, target)
    )


def _reason(launch: Launch, problem: Problem, target: str) -> str:
    """Return the first reason that applies, in the order in which passes are planned."""
    if launch.path == "warp_specialized" and launch.chosen:
        gathers = ""
        if launch.chosen.key.gathered:
            gathers = ", threads copy rows" if target == "sm_90" else ", TMA gathers rows"
        return f"descriptors, warp-specialized{gathers}{_REGIMES[launch.chosen.key.regime]}"
    if launch.path == "gather":
        return "descriptors, but for rows that are gathered: threads load these"
    if launch.path == "tma":
        return "descriptors: the GPU has TMA, and all bases and rows are multiples of 16 bytes"
    misaligned = [f"{letter}={size}" for letter, size in (("H", problem.H), ("F", problem.F)) if size % 16]
    if launch.path == "unaligned":
        if misaligned:
            return f"no vectors: {' and '.join(misaligned)} not a multiple of 16"
        return "no vectors: an address is not a multiple of 16 bytes"
    if not TARGETS[target].has_tma:
        return f"pointers: {target} has no TMA"
    kernel = launch.name.removeprefix("grouped_")
    if not any(key[:3] == (kernel, "tma", table.FORMATS[problem.dtype]) for key in table.TABLES[target]):
        return f"pointers: no configuration with descriptors for {problem.dtype}"
    if problem.weights in ("separate", "megatron_ddp"):
        return "pointers: experts lie in allocations of their own"
    return "pointers: no descriptor fits the sizes and addresses"
