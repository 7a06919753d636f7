"""Kernels, tiles and paths of a layer's passes, read from the launches that their programs plan.

Programs are planned for uninitialised tensors with the layer's sizes and mean rows per expert, but few experts. A layer
is swiglu: E, H, F and R as in `fusedmlp.functional`, `dtype` by name, `weights` as of `experts`, `weight_layout` and
`batch_invariant`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.tiles.select import Chosen
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments
from fusedmlp.targets import TARGETS

# Launches of a step in their order, by the names that `bench --roofline` uses; in the second, backward sorts rows of
# tokens. Then those that read no rows of tokens.
STEP = ("fc1_act", "fc2", "dgrad_act", "dx", "wgrad fc2", "wgrad fc1")
STEP_SORTED = ("fc1_act", "fc2", "dgrad_act", "wgrad fc2", "wgrad fc1", "dx")
OF_ROWS = ("fc2", "dx")
# Reasons for the ring and the epilogue of a warp-specialized kernel.
_REGIMES = {
    "any": "",
    "small": "; four stages or more: small sizes",
    "mma_add": "; TMA adds to main_grad, as MMAs are the limit",
    "mma_write": "; TMA writes main_grad; MMAs are the limit",
    "memory_add": "; main_grad is loaded ahead, as memory is the limit",
    "memory_write": "; TMA writes main_grad; memory is the limit",
}
_EXPERTS, _ROWS = 3, 64


def passes(layer: dict[str, Any], target: str, card: str = "", *, tokens: bool = False) -> list[dict[str, str]]:
    """Plan a forward and a backward with fp32 `main_grad`; return the kernel, path, tile and reason of each launch.

    `card`: the name of the GPU, if one is known. `tokens`: return only those that read rows of tokens, planned as for
    `moe_experts`.
    """
    shape = None if layer["batch_invariant"] else table.shape_class(layer["R"] / layer["E"])
    planned_for = TARGETS[target].planned_for(shape, warp_specialized=triton_impl.WARP_SPECIALIZED)
    planned_for = replace(planned_for, flops_a_byte=select.flops_a_byte(card))
    forward, backward = _arguments(layer, tokens)
    programs = (
        triton_impl.grouped_mlp.program(planned_for, *forward.without_impl),
        triton_impl.grouped_mlp_backward_.program(planned_for, *backward.without_impl),
    )
    launches = [(launch, launch.chosen) for program in programs for launch in program.launches if launch.chosen]
    rows = []
    names = STEP_SORTED if launches[-1][1].key.kernel == "gemm" else STEP
    for name, (launch, chosen) in zip(names, launches, strict=True):
        if not tokens or name not in OF_ROWS:
            why = _why(launch, chosen, layer, target)
            why += "; rows of tokens are sorted first" if tokens and not _gathers(launch) else ""
            why += f"; not warp-specialized: {chosen.refused}" if chosen.refused else ""
            row = {"name": f"{name}, tokens" if tokens else name, "kernel": launch.name, "path": launch.path}
            rows.append(row | {"tile": launch.sizes, "why": why})
    return rows


def note(layer: dict[str, Any]) -> str:
    """Say where Megatron-core's DDP lays experts in another way than `passes` plans with, and what sets it right."""
    notes = {
        "megatron": "Planned with experts evenly spaced, as use_distributed_optimizer lays them. Padding that "
        "overlap_grad_reduce can put between them makes pointer of tma (docs/megatron.md); with "
        f"expert_model_parallel_size above 1, bucket_size={layer['H'] * layer['F']} spaces them evenly.",
        "megatron_ddp": "Planned with main_grad evenly spaced, at multiples of 16 bytes. A parameter of odd size can "
        "make wgrad unaligned; use_distributed_optimizer=True rules that out, and has weights in one buffer, too.",
    }
    return notes.get(layer["weights"], "")


def _arguments(layer: dict[str, Any], tokens: bool) -> tuple[MLPArguments, MLPBackwardArguments]:
    H, F, dtype = layer["H"], layer["F"], getattr(torch, layer["dtype"])
    # As many rows as make the plans of the load; nothing is written.
    rows = max(_ROWS, -(-_EXPERTS * layer["R"] // layer["E"]))
    x, dy, h = (torch.empty(rows, width, dtype=dtype) for width in (H, H, 2 * F))
    offsets, probs = torch.empty(_EXPERTS + 1, dtype=torch.int32), torch.empty(rows)
    row_ids = torch.empty(rows, dtype=torch.int32) if tokens else None

    def stored(where: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        if layer["weight_layout"] == "out_in":
            return experts(where, _EXPERTS, shape, dtype)
        return [weight.mT for weight in experts(where, _EXPERTS, shape[::-1], dtype)]

    of_weights = layer["weights"].replace("megatron_ddp", "separate")
    fc1, fc2 = (stored(of_weights, shape, dtype) for shape in ((2 * F, H), (H, F)))
    dw1, dw2 = (stored(layer["weights"], shape, torch.float32) for shape in ((2 * F, H), (H, F)))
    swiglu = Activation("swiglu").encoded
    settings: dict[str, Any] = {"recipe": "", "batch_invariant": layer["batch_invariant"], "impl": "triton"}
    forward = MLPArguments(x, None, fc1, fc2, [], [], offsets, row_ids, row_ids, probs, swiglu, **settings)
    rest: dict[str, Any] = {"accumulate1": True, "accumulate2": True, "need_dx": True, "keep": False}
    rest |= {"dw1": dw1, "dw2": dw2, "dy": dy, "h": h}
    rest |= {name: [] for name in ("db1", "db2", "dlora1", "dlora2")}
    return forward, MLPBackwardArguments.of(forward, **rest)


def experts(where: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised tensors of so many experts.

    `where`: "packed" in one; "separate": an allocation for each; "megatron": views of one buffer, last expert first, as
    Megatron-core's DDP makes with the distributed optimizer; "megatron_ddp": without it, only `main_grad` lies so.
    """
    if where == "packed":
        return [torch.empty(count, *shape, dtype=dtype)]
    if where == "separate":
        return [torch.empty(shape, dtype=dtype) for _ in range(count)]
    size = prod(shape)
    buffer = torch.empty(count * size, dtype=dtype)
    return [buffer[e * size : (e + 1) * size].view(shape) for e in reversed(range(count))]


def _gathers(launch: Launch) -> bool:
    """Return whether the kernel itself gathers rows."""
    return any("row_ids" in name and value is not None for name, value in launch.arguments.items())


def _why(launch: Launch, chosen: Chosen, layer: dict[str, Any], target: str) -> str:
    """Return the first reason for a launch's path that applies, in the order in which passes are planned."""
    if launch.path == "warp_specialized":
        copied = ", threads copy rows" if target == "sm_90" else ", TMA gathers rows"
        return f"descriptors, warp-specialized{copied if chosen.key.gathered else ''}{_REGIMES[chosen.key.regime]}"
    if launch.path == "gather":
        return "descriptors, but for rows that are gathered: threads load these"
    if launch.path == "tma":
        return "descriptors: the GPU has TMA, and all bases and rows are multiples of 16 bytes"
    if launch.path == "unaligned":
        odd = " and ".join(f"{size}={layer[size]}" for size in "HF" if layer[size] % 16)
        return f"no vectors: {f'{odd} not' if odd else 'an address is not'} a multiple of 16{'' if odd else ' bytes'}"
    if not TARGETS[target].has_tma:
        return f"pointers: {target} has no TMA"
    kernel, dtype = launch.name.removeprefix("grouped_"), getattr(torch, layer["dtype"])
    if not any(key[:3] == (kernel, "tma", table.FORMATS[dtype]) for key in table.TABLES[target]):
        return f"pointers: no configuration with descriptors for {dtype}"
    if layer["weights"] in ("separate", "megatron_ddp"):
        return "pointers: experts lie in allocations of their own"
    return "pointers: no descriptor fits the sizes and addresses"
