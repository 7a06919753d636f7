"""The `torch` implementation: plain PyTorch for the CPU, no autograd.

Products run over all rows (`torch_products.py`). The steps between them run in fp32 over blocks of rows that stay
in the cache. Weight gradients need no temporary of a weight's size. Letters as in `functional.py`; a block has `n`
rows: `h_nG`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.operators import torch_activation, torch_quantize
from fusedmlp.operators.torch_products import BLOCK_ELEMENTS, Rows, sum_rows_, transposed
from fusedmlp.operators.torch_quantize import empty_row_copies as empty_row_copies
from fusedmlp.operators.torch_quantize import quantize_weights as quantize_weights
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments, MLPGrads, MLPOutput, RowCopies, RowOrder
from fusedmlp.recipe import Formats

if TYPE_CHECKING:
    from fusedmlp.kernels.tiles.table import Recipe


def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """First rows, `[E + 1]` int32, from rows per expert, `[E]`; checks their values."""
    sizes = counts.tolist()
    if any(n < 0 for n in sizes):
        raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
    if sum(sizes) > num_rows:
        raise ValueError(f"tokens_per_expert: expected a sum of at most {num_rows} (rows of x); got {sum(sizes)}")
    return torch.tensor([0, *running_sum(sizes)], dtype=torch.int32, device=counts.device)


def order_rows(top_k_index: Tensor, probs: Tensor, num_experts: int) -> RowOrder:
    """The order of rows by expert, from expert ids `[T, K]`; see `types.RowOrder`."""
    ids = top_k_index.flatten().long()
    sorted_ids, slots = ids.where((ids >= 0) & (ids < num_experts), num_experts).sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    offsets = torch.searchsorted(sorted_ids, experts, out_int32=True)
    places = torch.empty_like(slots, dtype=torch.int32)
    places[slots] = torch.arange(slots.numel(), dtype=torch.int32, device=ids.device)
    row_ids = slots // max(1, top_k_index.shape[-1])
    return RowOrder(offsets, row_ids.int(), places, probs.flatten().index_select(0, slots))


def _combine(y_RH: Tensor, places_R: Tensor | None, num_tokens: int) -> Tensor:
    """Sum of every token's rows, `[T, H]`, in fp32, in the order of its choices; without places, the rows."""
    if places_R is None:
        return y_RH
    places_TK = places_R.view(num_tokens, places_R.numel() // max(num_tokens, 1))
    out_TH = y_RH.new_empty(num_tokens, y_RH.shape[1])
    step = max(1, BLOCK_ELEMENTS // y_RH.shape[1])
    for part_tH, places_tK in zip(out_TH.split(step), places_TK.split(step), strict=True):
        sum_tH = torch.zeros_like(part_tH, dtype=torch.float32)
        for places_t in places_tK.unbind(1):
            sum_tH += y_RH.index_select(0, places_t)
        part_tH.copy_(sum_tH)
    return out_TH


def quantize_rows(x_RC: Tensor, offsets: Tensor, num_experts: int, recipe: Recipe) -> RowCopies:
    """Both 8-bit copies of rows."""
    return torch_quantize.quantize_rows(x_RC, Rows(offsets, x_RC.shape[0]).sizes, recipe)


def grouped_gemm(
    x_RK: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    offsets: Tensor,
    recipe: str,
    batch_invariant: bool,
) -> Tensor:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    rows = Rows(offsets, x_RK.shape[0], batch_invariant)
    y_RN = rows.product(x_RK, w, transposed=True, recipe=Formats.decode(recipe).gemms)
    if bias:
        rows.add_bias_(y_RN, bias)
    return y_RN


def grouped_mlp(*args: Any) -> MLPOutput:
    """Forward: `(y, h)`; see `functional.grouped_mlp` for the equation."""
    given = MLPArguments(*args)
    x_RH, kind, gemms = given.x, Activation.decode(given.activation), Formats.decode(given.recipe).gemms
    num_rows = (x_RH if given.row_ids is None else given.row_ids).shape[0]
    rows = Rows(given.offsets, num_rows, given.batch_invariant)
    probs_R1 = None if given.probs is None else given.probs.float().unsqueeze(1)
    if given.x_scales is not None:  # quantized once more, to the same values
        x_RH = torch_quantize.dequantized_rows(x_RH, given.x_scales, gemms)
    x_of_R = rows.gather(x_RH, given.row_ids)
    h_RG = rows.product(x_of_R, given.fc1, transposed=True, recipe=gemms)
    t1_Rr = rows.adapt_(h_RG, x_of_R, given.lora1)
    del x_of_R  # as large as y, which is yet to come
    if given.bias1:
        rows.add_bias_(h_RG, given.bias1)
    a_RF = x_RH.new_empty(rows.number, h_RG.shape[1] // (2 if kind.gated else 1))
    wide = _Wide(x_RH)
    for block in rows.blocks(h_RG.shape[1]):
        a_nF = wide.out("a", a_RF[block])
        torch_activation.forward(kind, wide.copy("h", h_RG[block]), a_nF, given.batch_invariant)
        if probs_R1 is None:
            wide.store(a_nF, a_RF[block])
        else:
            torch.mul(a_nF, probs_R1[block], out=a_RF[block])
    y_RH = rows.product(a_RF, given.fc2, transposed=True, recipe=gemms)
    t2_Rr = rows.adapt_(y_RH, a_RF, given.lora2)
    if given.bias2:
        rows.add_bias_(y_RH, given.bias2, probs_R1)
    del a_RF  # larger than the sums, which are yet to come
    return MLPOutput(_combine(y_RH, given.places, x_RH.shape[0]), h_RG, t1_Rr, t2_Rr)


def grouped_mlp_backward_(*args: Any) -> MLPGrads:
    """Backward: write the gradients of weights to `dw*` and of biases to `db*`; return the others.

    An empty `dw*` or `db*` is not computed; `accumulate*` adds to `dw*`. `keep` also returns the operands of delayed
    weight gradients.
    """
    given = MLPBackwardArguments(*args)
    x_RH, h_RG = given.x, given.h
    kind, (gemms, wgrad), wide = Activation.decode(given.activation), Formats.decode(given.recipe), _Wide(h_RG)
    rows = Rows(given.offsets, h_RG.shape[0], given.batch_invariant)
    probs_R1 = None if given.probs is None else given.probs.float().unsqueeze(1)
    dprobs_R = h_RG.new_empty(0 if given.probs is None else rows.number, dtype=torch.float32)
    dy_RH = rows.gather(given.dy, given.row_ids)
    da_RF = rows.product(dy_RH, given.fc2, transposed=False, recipe=gemms)
    u2_Rr = rows.adapt_(da_RF, dy_RH, transposed(given.lora2))
    dh_RG = torch.empty_like(h_RG)
    for block in rows.blocks(h_RG.shape[1]):
        h_nG, grad_nF = wide.copy("h", h_RG[block]), wide.copy("grad", da_RF[block])
        a_nF, dh_nG = wide.buffer("a", grad_nF), wide.out("dh", dh_RG[block])
        if probs_R1 is None:
            torch_activation.backward(kind, h_nG, grad_nF, a_nF, dh_nG, given.batch_invariant)
            da_RF[block].copy_(a_nF)
        else:
            dact_nF = torch.mul(grad_nF, probs_R1[block], out=wide.buffer("dact", grad_nF))
            torch_activation.backward(kind, h_nG, dact_nF, a_nF, dh_nG, given.batch_invariant)
            sum_rows_(dprobs_R[block], grad_nF.mul_(a_nF))
            torch.mul(a_nF, probs_R1[block], out=da_RF[block])
        wide.store(dh_nG, dh_RG[block])
    act_probs_RF = da_RF  # overwritten in place
    if given.bias2 and given.probs is not None:  # y = probs * (... + bias2), so dprobs also gets dy . bias2
        rows.dot_bias_(dprobs_R, dy_RH, given.bias2)
    dx_RH = rows.product(dh_RG, given.fc1, transposed=False, recipe=gemms) if given.need_dx else None
    u1_Rr = rows.adapt_(dx_RH, dh_RG, transposed(given.lora1))
    dx = None if dx_RH is None else _combine(dx_RH, given.places, given.dy.shape[0])
    del dx_RH  # as large as the rows of x, which are yet to come
    rows.adapter_grads_(given.dlora2, dy_RH, act_probs_RF, given.t2, u2_Rr)
    if given.dw2:
        rows.wgrad_(given.dw2, dy_RH, act_probs_RF, given.accumulate2, recipe=wgrad)
    if given.db2:
        rows.bias_grad_(given.db2, dy_RH, probs_R1)
    if given.x_scales is not None and given.dw1:
        x_RH = torch_quantize.dequantized_tokens(x_RH, given.x_scales, rows.sizes, gemms)
    if given.dw1 or given.dlora1:
        x_RH = rows.gather(x_RH, given.row_ids)
    rows.adapter_grads_(given.dlora1, dh_RG, x_RH, given.t1, u1_Rr)
    if given.dw1:
        rows.wgrad_(given.dw1, dh_RG, x_RH, given.accumulate1, recipe=wgrad)
    if given.db1:
        rows.bias_grad_(given.db1, dh_RG)
    dprobs = None
    if given.probs is not None:
        dprobs = rows.pad(dprobs_R)
        dprobs = (dprobs if given.places is None else dprobs.index_select(0, given.places)).to(given.probs.dtype)
    return MLPGrads(dx, dprobs, rows.pad(dh_RG) if given.keep else None, act_probs_RF if given.keep else None)


def grouped_wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dy_row_ids: Sequence[Tensor],
    x_row_ids: Sequence[Tensor],
    accumulate: bool,
    recipe: str,
) -> None:
    """`dw[e] (+)= sum over segments s of dy[s][rows of e]^T @ x[s][rows of e]`; `db` the column sums of a single dy."""
    if db and len(offsets) > 1:
        raise ValueError(f"db: expected one segment; got {len(offsets)}")
    wgrad = Formats.decode(recipe).wgrad
    for s, segment_offsets in enumerate(offsets):
        dy_row_ids_R, x_row_ids_R = (ids[s] if ids else None for ids in (dy_row_ids, x_row_ids))
        rows = Rows(segment_offsets, (dy[s] if dy_row_ids_R is None else dy_row_ids_R).shape[0])
        dy_RN = rows.gather(dy[s], dy_row_ids_R)
        if dw:
            x_RK = rows.gather(x[s], x_row_ids_R)
            rows.wgrad_(dw, dy_RN, x_RK, accumulate or s > 0, recipe=wgrad)
        if db:
            rows.bias_grad_(db, dy_RN)


class _Wide:
    """Blocks of rows in fp32: the blocks themselves, if in fp32, or buffers that all blocks of a call share."""

    def __init__(self, like: Tensor) -> None:
        self._narrow = like.dtype != torch.float32
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like_nN: Tensor) -> Tensor:
        """An uninitialised fp32 buffer of the shape of `like_nN`."""
        held = self._buffers.get(name)
        if held is None:  # the first block is the longest
            held = self._buffers[name] = torch.empty_like(like_nN, dtype=torch.float32)
        return held[: like_nN.shape[0]]

    def copy(self, name: str, t_nN: Tensor) -> Tensor:
        """The block in fp32."""
        return self.buffer(name, t_nN).copy_(t_nN) if self._narrow else t_nN

    def out(self, name: str, t_nN: Tensor) -> Tensor:
        """An uninitialised output in fp32 for the block; `store` then copies it there."""
        return self.buffer(name, t_nN) if self._narrow else t_nN

    def store(self, wide_nN: Tensor, t_nN: Tensor) -> None:
        """Copy an output of `out` to its block, unless it is the block."""
        if self._narrow:
            t_nN.copy_(wide_nN)
