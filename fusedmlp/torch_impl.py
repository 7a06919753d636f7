"""The `torch` implementation: plain PyTorch for the CPU, batched GEMMs, no autograd.

It walks over chunks: runs of experts with about equal numbers of rows, padded to the longest, so that one batched
GEMM serves them all, and small enough for the cache. All chunks share one set of buffers, and no temporary is as
large as a weight. Letters as in `functional.py`; in a chunk, `e` experts of `C` rows each: `x_eCH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sum

import torch
from torch import Tensor

from fusedmlp import torch_activation
from fusedmlp.activation import Activation
from fusedmlp.mlp_types import MLPGrads, MLPOutput, Routing
from fusedmlp.torch_chunks import CHUNK_ELEMENTS, Chunks


def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """`[E]` rows per expert to `[E + 1]` int32 first rows; checks them, as their values can be seen here."""
    sizes = counts.tolist()
    if any(n < 0 for n in sizes):
        raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
    if sum(sizes) > num_rows:
        raise ValueError(f"tokens_per_expert: expected a sum of at most {num_rows} (rows of x); got {sum(sizes)}")
    return torch.tensor([0, *running_sum(sizes)], dtype=torch.int32, device=counts.device)


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Expert ids `[T, K]` to the order of rows; see `mlp_types.Routing`."""
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
    chunks = Chunks(offsets, x_RK.device, y_RN.shape[1], (w, 2), (bias, 1))
    for chunk in chunks:
        y_eCN = chunk.target("y", y_RN)
        torch.bmm(chunk.pad("x", x_RK), chunk.of(w, 2).transpose(1, 2), out=y_eCN)
        if bias:
            y_eCN.add_(chunk.of(bias, 1).unsqueeze(1))
        chunk.store(y_eCN, y_RN)
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
    chunks = Chunks(offsets, x_RH.device, h_RG.shape[1], (fc1, 2), (fc2, 2), (bias1, 1), (bias2, 1))
    for chunk in chunks:
        h_eCG, y_eCH = chunk.target("h", h_RG), chunk.target("y", y_RH)
        torch.bmm(chunk.pad("x", x_RH, tokens_R), chunk.of(fc1, 2).transpose(1, 2), out=h_eCG)
        if bias1:
            h_eCG.add_(chunk.of(bias1, 1).unsqueeze(1))
        chunk.store(h_eCG, h_RG)
        a_eCF = chunk.buffer("a", fc2[0].shape[-1])
        torch_activation.forward(kind, chunk.cast("h wide", h_eCG), a_eCF)
        probs_eC1 = None if probs_R is None else chunk.cast("p wide", chunk.pad("p", probs_R.unsqueeze(1)))
        if probs_eC1 is not None:
            a_eCF.mul_(probs_eC1)
        a_eCF = chunk.cast("a low", a_eCF, x_RH.dtype)
        torch.bmm(a_eCF, chunk.of(fc2, 2).transpose(1, 2), out=y_eCH)
        if bias2:
            bias_e1H = chunk.of(bias2, 1).unsqueeze(1)
            y_eCH.add_(bias_e1H if probs_eC1 is None else probs_eC1 * bias_e1H)
        chunk.store(y_eCH, y_RH)
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
    matrices, vectors = (fc1, fc2, dw1, dw2), (bias2, db1, db2)
    chunks = Chunks(offsets, x_RH.device, h_RG.shape[1], *[(t, 2) for t in matrices], *[(t, 1) for t in vectors])
    for chunk in chunks:
        dy_eCH = chunk.pad("dy", dy_RH, tokens_R)
        da_eCF = chunk.buffer("da low", ffn_size, dtype)
        torch.bmm(dy_eCH, chunk.of(fc2, 2), out=da_eCF)
        da_eCF = chunk.cast("da", da_eCF)
        h_eCG = chunk.cast("h wide", chunk.pad("h", h_RG))
        a_eCF, dh_eCG = chunk.buffer("a", ffn_size), chunk.buffer("dh", h_RG.shape[1])
        probs_eC1 = None
        if probs_R is None:
            torch_activation.backward(kind, h_eCG, da_eCF, a_eCF, dh_eCG)
        else:
            probs_eC1 = chunk.cast("p wide", chunk.pad("p", probs_R.unsqueeze(1)))
            dact_eCF = torch.mul(da_eCF, probs_eC1, out=chunk.buffer("dact", ffn_size))
            torch_activation.backward(kind, h_eCG, dact_eCF, a_eCF, dh_eCG)
            dprobs_eC1 = da_eCF.mul_(a_eCF).sum(2, keepdim=True)
            if bias2:  # y = probs * (... + bias2), so dprobs also gets dy . bias2
                bias_eH1 = chunk.of(bias2, 1).float().unsqueeze(2)
                # With `out`, as all products here: autocast leaves those alone.
                dprobs_eC1 += torch.bmm(chunk.cast("dy wide", dy_eCH), bias_eH1, out=chunk.buffer("dy.bias", 1))
            chunk.store(dprobs_eC1, grads.dprobs.unsqueeze(1), always=True)
            a_eCF.mul_(probs_eC1)
        a_eCF, dh_eCG = chunk.cast("a low", a_eCF, dtype), chunk.cast("dh low", dh_eCG, dtype)
        if need_dx:
            dx_eCH = chunk.target("dx", grads.dx)
            torch.bmm(dh_eCG, chunk.of(fc1, 2), out=dx_eCH)
            chunk.store(dx_eCH, grads.dx)
        if dw2:
            chunk.wgrad_(dw2, dy_eCH, a_eCF, accumulate2)
        if dw1:
            chunk.wgrad_(dw1, dh_eCG, chunk.pad("x", x_RH, tokens_R), accumulate1)
        if db2:
            chunk.bias_grad_(db2, dy_eCH, probs_eC1)
        if db1:
            chunk.bias_grad_(db1, dh_eCG, None)
        if keep:
            chunk.store(dh_eCG, grads.dh, always=True)
            chunk.store(a_eCF, grads.act_probs, always=True)
    chunks.clear_empty_experts_(dw1 if not accumulate1 else [], dw2 if not accumulate2 else [], db1, db2)
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
        chunks = Chunks(segment_offsets, dy[s].device, dy[s].shape[1], (dw, 2), (db, 1))
        for chunk in chunks:
            dy_eCN = chunk.pad("dy", dy[s], dy_rows[s] if dy_rows else None)
            if dw:
                chunk.wgrad_(dw, dy_eCN, chunk.pad("x", x[s], x_rows[s] if x_rows else None), add)
            if db:
                chunk.bias_grad_(db, dy_eCN, None)
        chunks.clear_empty_experts_(dw if not add else [], db)
