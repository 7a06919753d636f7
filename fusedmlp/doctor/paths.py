"""Kernels, tiles and paths of a layer's passes, read from the launches that their programs plan.

Programs are planned for uninitialised tensors with the layer's sizes, but few rows and experts. Besides sizes and
addresses, a plan depends on the shape class of the load, which is set from the layer's mean rows per expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pass:
    """The launch of one pass."""

    name: str  # as in `bench --roofline`
    kernel: str
    path: str  # "warp_specialized", "tma", "pointer" or "unaligned"
    tile: str
    why: str


def passes(problem: Problem, target: str) -> list[Pass]:
    """Plan a forward and a backward with fp32 `main_grad`; return their passes in the order of their launches."""
    shape = table.shape_class(problem.R / problem.E)
    planned_for = TARGETS[target].planned_for(shape, warp_specialized=triton_impl.SETTINGS.warp_specialized)
    programs = (operator.program(planned_for, *args) for operator, args in _step(problem))
    launches = [launch for program in programs for launch in program.launches if launch.chosen]
    return [
        Pass(name, launch.name, launch.path, launch.sizes, _why(launch, problem, target))
        for name, launch in zip(STEP, launches, strict=True)
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


def _step(problem: Problem) -> Iterator[tuple[Operator, tuple[Any, ...]]]:
    H, F = problem.H, problem.F
    x, dy, h = (torch.empty(_ROWS, width, dtype=problem.dtype) for width in (H, H, 2 * F))
    offsets = torch.empty(_EXPERTS + 1, dtype=torch.int32)
    probs = torch.empty(_ROWS)
    shapes = ((2 * F, H), (H, F))
    of_weights = problem.weights.replace("megatron_ddp", "separate")
    weights = [_experts(of_weights, shape, problem.dtype) for shape in shapes]
    grads = [_experts(problem.weights, shape, torch.float32) for shape in shapes]
    forward = MLPArguments(
        x=x,
        fc1=weights[0],
        fc2=weights[1],
        bias1=[],
        bias2=[],
        offsets=offsets,
        row_ids=None,
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
        places=None,
        accumulate1=True,
        accumulate2=True,
        need_dx=True,
        keep=False,
    )
    yield triton_impl.grouped_mlp_backward_, backward.without_impl


def _experts(where: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised expert tensors."""
    if where == "packed":
        return [torch.empty(_EXPERTS, *shape, dtype=dtype)]
    if where == "separate":
        return [torch.empty(shape, dtype=dtype) for _ in range(_EXPERTS)]
    size = shape[0] * shape[1]
    buffer = torch.empty(_EXPERTS * size, dtype=dtype)
    return [buffer[e * size : (e + 1) * size].view(shape) for e in reversed(range(_EXPERTS))]


def _why(launch: Launch, problem: Problem, target: str) -> str:
    """Return the reason for a launch's path: the first that applies, in the order in which passes are planned."""
    if launch.path == "warp_specialized":
        return "descriptors, warp-specialized"
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
