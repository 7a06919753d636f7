"""Weights and rows as their owners lay them out, and what kernels need to know about a load."""

import torch
import triton

from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing import plan
from fusedmlp.kernels.tiles import select, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = triton.knobs.runtime.interpret  # else kernels are compiled: for a GPU, or for the emulator of one

# Layouts in which owners keep weights, and the best path that loads them.
PLACES = {
    "packed": "tma",
    "reversed": "tma",
    "misaligned": "unaligned",
    "scattered": "pointer",
    "scattered misaligned": "unaligned",
}


def place(stacked, where, device):
    """`stacked` `[E, ...]` copied to where an owner might keep it, one tensor per expert unless packed."""
    stacked = stacked.to(device)
    dim = stacked.dim() - 1
    if where == "packed":
        return ExpertTensors.of([stacked], dim)
    count, size = stacked.shape[0], stacked[0].numel()
    step = -(-size // 16) * 16
    flat = torch.full((3 * (count + 1) * step + 1,), float("nan"), dtype=stacked.dtype, device=device)
    starts = {
        "reversed": [(count - 1 - e) * step for e in range(count)],
        "misaligned": [1 + e * step for e in range(count)],
        "scattered": [(e * e % (2 * count + 1)) * step for e in range(count)],
        "scattered misaligned": [(e * e % (2 * count + 1)) * step + 1 for e in range(count)],
    }[where]
    views = [flat[start : start + size].view(stacked.shape[1:]) for start in starts]
    for view, tensor in zip(views, stacked, strict=True):
        view.copy_(tensor)
    return ExpertTensors.of(views, dim)


def logical(described, layout):
    """`[out, in]` strides of weights stored `[in, out]`."""
    return described if layout == "out_in" else described._replace(strides=described.strides[::-1])


def among_others(rows, owned, index_dtype=torch.int32, seed=1):
    """`(tokens, row ids)`: the rows in another order, among rows of NaN; `tokens[row_ids]` has them in order again."""
    row_ids = torch.randperm(2 * rows.shape[0], generator=torch.Generator().manual_seed(seed))[: rows.shape[0]]
    tokens = torch.full((2 * rows.shape[0], rows.shape[1]), float("nan"), dtype=rows.dtype)
    tokens[row_ids] = rows.cpu()
    row_ids[owned:] = 10**6  # those of padding rows are not used
    return tokens.to(rows.device), row_ids.to(rows.device, index_dtype)


def tiles_of(counts, num_rows, device):
    offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
    return plan.Schedule(torch.tensor(offsets, dtype=torch.int32, device=device), num_rows)


def expected_path(kernel, dtype, device, best, sizes, can_warp_specialize=True):
    """`best`, or the next path that those sizes and that device allow.

    "warp_specialized" if the target uses such kernels, the pass has one, and the case can have it
    (`can_warp_specialize`).
    """
    target = select.target(torch.device(device), None, dtype)
    paths = {key.path for key in target.tiles if (key.kernel, key.format) == (kernel, table.FORMATS[dtype])}
    fits = can_warp_specialize and best in ("tma", "gather")
    if fits and target.warp_specializes and "warp_specialized" in paths:
        return "warp_specialized"
    if best in table.BY_DESCRIPTORS and best in paths:
        return best
    return "unaligned" if best == "unaligned" or any(size % 16 for size in sizes) else "pointer"
