"""The `torch` implementation: plain PyTorch for the CPU, no autograd.

It walks over chunks: runs of experts that are small enough for the cache, whose products are one batched GEMM where all
have as many rows, and one GEMM each otherwise. All chunks share one set of buffers, and no temporary is as large as a
weight. Letters as in `functional.py`; in a chunk, `e` experts have `n` rows between them: `x_nH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sum

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.operators import torch_activation
from fusedmlp.operators.torch_chunks import CHUNK_ELEMENTS, Chunks
from fusedmlp.operators.types import MLPGrads, MLPOutput, Routing


def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """`[E]` rows per expert to `[E + 1]` int32 first rows; checks them, as their values can be seen here."""
    sizes = counts.tolist()
    if any(n < 0 for n in sizes):
        raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
    if sum(sizes) > num_rows:
        raise ValueError(f"tokens_per_expert: expected a sum of at most {num_rows} (rows of x); got {sum(sizes)}")
    return torch.tensor([0, *running_sum(sizes)], dtype=torch.int32, device=counts.device)


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Expert ids `[T, K]` to the order of rows; see `types.Routing`."""
    ids = top_k_index.flatten().long()
    sorted_ids, slots = ids.where((ids >= 0) & (ids < num_experts), num_experts).sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    offsets = torch.searchsorted(sorted_ids, experts, out_int32=True)
    rows = torch.empty_like(slots, dtype=torch.int32)
    rows[slots] = torch.arange(slots.numel(), dtype=torch.int32, device=ids.device)
    return Routing(offsets, slots.int(), rows)


def combine(y_RH: Tensor, rows_R: Tensor, num_tokens: int) -> Tensor:
    """Every token's rows added up, in fp32, in the order of its choices: `[T, H]`."""
    rows_TK = rows_R.view(num_tokens, rows_R.numel() // max(num_tokens, 1))
    out_TH = y_RH.new_empty(num_tokens, y_RH.shape[1])
    step = max(1, CHUNK_ELEMENTS // y_RH.shape[1])
    for part_tH, rows_tK in zip(out_TH.split(step), rows_TK.split(step), strict=True):
        sum_tH = torch.zeros_like(part_tH, dtype=torch.float32)
        for rows_t in rows_tK.unbind(1):
            sum_tH += y_RH.index_select(0, rows_t)
        part_tH.copy_(sum_tH)
    return out_TH


def grouped_gemm(x_RK: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    y_RN = x_RK.new_empty(x_RK.shape[0], w[0].shape[-2])
    chunks = Chunks(offsets, y_RN.shape[1], w)
    for chunk in chunks:
        y_nN = chunk.product(chunk.rows(x_RK), w, chunk.rows(y_RN), transposed=True)
        if bias:
            y_nN.add_(chunk.bias(bias))
    y_RN[chunks.total :].zero_()
    return y_RN


def grouped_mlp(
    x_RH: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    bias1: Sequence[Tensor],
    bias2: Sequence[Tensor],
    offsets: Tensor,
    tokens_R: Tensor | None,
    probs_R: Tensor | None,
    activation: str,
) -> MLPOutput:
    """Forward: `(y, h)`; see `functional.grouped_mlp` for the equation."""
    kind = Activation.decode(activation)
    num_rows = (x_RH if tokens_R is None else tokens_R).shape[0]
    h_RG, y_RH = x_RH.new_empty(num_rows, fc1[0].shape[-2]), x_RH.new_empty(num_rows, x_RH.shape[1])
    chunks = Chunks(offsets, h_RG.shape[1], fc1, fc2)
    for chunk in chunks:
        h_nG = chunk.product(chunk.gather("x", x_RH, tokens_R), fc1, chunk.rows(h_RG), transposed=True)
        if bias1:
            h_nG.add_(chunk.bias(bias1))
        a_nF = chunk.buffer("a", x_RH, fc2[0].shape[-1])
        torch_activation.forward(kind, chunk.cast("h wide", h_nG), a_nF)
        probs_n1 = None if probs_R is None else chunk.rows(probs_R).float().unsqueeze(1)
        if probs_n1 is not None:
            a_nF.mul_(probs_n1)
        y_nH = chunk.product(chunk.cast("a low", a_nF, x_RH.dtype), fc2, chunk.rows(y_RH), transposed=True)
        if bias2:
            bias_nH = chunk.bias(bias2)
            y_nH.add_(bias_nH if probs_n1 is None else probs_n1 * bias_nH)
    for padded in (h_RG, y_RH):
        padded[chunks.total :].zero_()
    return MLPOutput(y_RH, h_RG)


def grouped_mlp_backward_(
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    db1: Sequence[Tensor],
    db2: Sequence[Tensor],
    dy_RH: Tensor,
    x_RH: Tensor,
    h_RG: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    bias2: Sequence[Tensor],
    offsets: Tensor,
    tokens_R: Tensor | None,
    probs_R: Tensor | None,
    activation: str,
    accumulate1: bool,
    accumulate2: bool,
    need_dx: bool,
    keep: bool,
) -> MLPGrads:
    """Backward: writes or adds the gradients of the weights into `dw*`, `db*`; returns the others.

    An empty `dw*` or `db*` is not computed; `accumulate*` adds to `dw*`. `keep` also returns what a delayed
    weight gradient needs.
    """
    kind, dtype = Activation.decode(activation), x_RH.dtype
    ffn_size = fc2[0].shape[-1]
    grads = MLPGrads.empty(x_RH, h_RG, ffn_size, probs_R, need_dx, keep)
    chunks = Chunks(offsets, h_RG.shape[1], fc1, fc2, dw1, dw2)
    for chunk in chunks:
        dy_nH, h_nG = chunk.gather("dy", dy_RH, tokens_R), chunk.cast("h wide", chunk.rows(h_RG))
        da_nF = chunk.product(dy_nH, fc2, chunk.buffer("da low", x_RH, ffn_size, dtype), transposed=False)
        da_nF = chunk.cast("da", da_nF)
        a_nF, dh_nG = chunk.buffer("a", x_RH, ffn_size), chunk.buffer("dh", x_RH, h_RG.shape[1])
        probs_n1 = None
        if probs_R is None:
            torch_activation.backward(kind, h_nG, da_nF, a_nF, dh_nG)
        else:
            probs_n1 = chunk.rows(probs_R).float().unsqueeze(1)
            dact_nF = torch.mul(da_nF, probs_n1, out=chunk.buffer("dact", x_RH, ffn_size))
            torch_activation.backward(kind, h_nG, dact_nF, a_nF, dh_nG)
            dprobs_n = chunk.rows(grads.dprobs).copy_(da_nF.mul_(a_nF).sum(1))
            if bias2:  # y = probs * (... + bias2), so dprobs also gets dy . bias2
                dprobs_n += (dy_nH.float() * chunk.bias(bias2).float()).sum(1)
            a_nF.mul_(probs_n1)
        a_nF, dh_nG = chunk.cast("a low", a_nF, dtype), chunk.cast("dh low", dh_nG, dtype)
        if need_dx:
            chunk.product(dh_nG, fc1, chunk.rows(grads.dx), transposed=False)
        if dw2:
            chunk.wgrad_(dw2, dy_nH, a_nF, accumulate2)
        if dw1:
            chunk.wgrad_(dw1, dh_nG, chunk.gather("x", x_RH, tokens_R), accumulate1)
        if db2:
            chunk.bias_grad_(db2, dy_nH, probs_n1)
        if db1:
            chunk.bias_grad_(db1, dh_nG, None)
        if keep:
            chunk.rows(grads.dh).copy_(dh_nG)
            chunk.rows(grads.act_probs).copy_(a_nF)
    for padded in grads:
        padded[chunks.total :].zero_()
    return grads


def grouped_wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dy_rows: Sequence[Tensor],
    x_rows: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """`dw[e] (+)= sum over segments s of dy[s][rows of e]^T @ x[s][rows of e]`; `db` the column sums of dy[0]."""
    for s, segment_offsets in enumerate(offsets):
        add = accumulate or s > 0
        for chunk in Chunks(segment_offsets, dy[s].shape[1], dw):
            dy_nN = chunk.gather("dy", dy[s], dy_rows[s] if dy_rows else None)
            if dw:
                chunk.wgrad_(dw, dy_nN, chunk.gather("x", x[s], x_rows[s] if x_rows else None), add)
            if db:
                chunk.bias_grad_(db, dy_nN, None)
