"""Which kernels a layer's passes launch, with which tiles, and how tiles are moved: asked of the launchers themselves.

Launchers run on uninitialised tensors of the layer's sizes, with nothing launched or compiled, and with few experts:
only the class of the load, by mean rows per expert, decides besides sizes and addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.doctor.recorder import Launch, recording
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels.tiles import configs
from fusedmlp.operators import triton_impl

WEIGHTS = ("packed", "separate", "megatron")
# Kernels of a step in the order of their launches, by the names that `bench --roofline` gives them.
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
    # "packed"; "separate": each expert's tensors are allocations of their own; "megatron": views of one buffer, last
    # expert first, those of main_grad without any alignment
    weights: str = "packed"


@dataclass(frozen=True)
class Pass:
    """What one pass launches."""

    name: str  # as in `bench --roofline`
    kernel: str
    path: str  # "specialised", "tma", "pointer" or "unaligned"
    tile: str
    why: str


def passes(problem: Problem, target: str) -> list[Pass]:
    """The passes of a forward and a backward with fp32 `main_grad`, in the order of their launches."""
    launches: list[Launch] = []

    def note(launch: Launch) -> bool:
        if launch.kernel.startswith("grouped_"):
            launches.append(launch)
        return False

    shape = configs.shape_class(problem.R / problem.E)
    with recording(TARGETS[target], shape, specialised=configs.SPECIALISED, wanted=note):
        _step(problem)
    return [
        Pass(name, launch.kernel, launch.path, launch.tile, _why(launch, problem, target))
        for name, launch in zip(STEP, launches, strict=True)
    ]


def _step(problem: Problem) -> None:
    H, F = problem.H, problem.F
    x, dy, h = (torch.empty(_ROWS, width, dtype=problem.dtype) for width in (H, H, 2 * F))
    offsets = torch.empty(_EXPERTS + 1, dtype=torch.int32)
    probs = torch.empty(_ROWS)
    shapes = ((2 * F, H), (H, F))
    weights = [_experts(problem.weights, shape, problem.dtype) for shape in shapes]
    grads = [_experts(problem.weights, shape, torch.float32, first=1) for shape in shapes]
    encoded = Activation("swiglu").encoded
    triton_impl.grouped_mlp(x, *weights, [], [], offsets, None, probs, encoded)
    triton_impl.grouped_mlp_backward_(
        *grads, [], [], dy, x, h, *weights, [], offsets, None, None, probs, encoded, True, True, True, False
    )


def _experts(where: str, shape: tuple[int, int], dtype: torch.dtype, first: int = 0) -> list[Tensor]:
    """Memory that is never touched; in Megatron's order the buffer starts `first` elements late."""
    if where == "packed":
        return [torch.empty(_EXPERTS, *shape, dtype=dtype)]
    if where == "separate":
        return [torch.empty(shape, dtype=dtype) for _ in range(_EXPERTS)]
    size = shape[0] * shape[1]
    buffer = torch.empty(_EXPERTS * size + first, dtype=dtype)[first:]
    return [buffer[e * size : (e + 1) * size].view(shape) for e in reversed(range(_EXPERTS))]


def _why(launch: Launch, problem: Problem, target: str) -> str:
    """The first reason, in the order in which launchers look."""
    if launch.path == "specialised":
        return "descriptors, and a task for each warp"
    if launch.path == "tma":
        return "descriptors: the GPU has TMA, and all bases and rows are multiples of 16 bytes"
    odd = [f"{letter}={size}" for letter, size in (("H", problem.H), ("F", problem.F)) if size % 16]
    if launch.path == "unaligned":
        cause = f"{' and '.join(odd)} not a multiple of 16" if odd else "an address is not a multiple of 16 bytes"
        return f"no vectors: {cause}"
    if not TARGETS[target].has_tma:
        return f"pointers: {target} has no TMA"
    kernel = launch.kernel.removeprefix("grouped_")
    if (kernel, "tma", 8 * problem.dtype.itemsize) not in configs.TABLES[target]:
        return f"pointers: no configuration with descriptors for {problem.dtype}"
    if problem.weights == "separate":
        return "pointers: experts lie in allocations of their own"
    return "pointers: no descriptor fits the sizes and addresses"
