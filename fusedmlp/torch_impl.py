"""The `torch` implementation: plain PyTorch for the CPU, one GEMM per expert, no autograd.

It walks over chunks of experts, so that pre-activations and their gradients stay in the cache and no
temporary is as large as a weight. Letters as in `functional.py`; `sizes` are rows per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate as running_sum

import torch
from torch import Tensor

from fusedmlp import activation as act
from fusedmlp.activation import Activation
from fusedmlp.mlp_types import MLPGrads, MLPOutput

# Elements of the pre-activation in one chunk (2 MiB in fp32): about an L2 cache.
_CHUNK_ELEMENTS = 1 << 19


def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """`[E]` rows per expert to `[E + 1]` int32 first rows; checks them, as the CPU can see their values."""
    sizes = counts.tolist()
    if any(n < 0 for n in sizes):
        raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
    if sum(sizes) > num_rows:
        raise ValueError(f"tokens_per_expert: expected a sum of at most {num_rows} (rows of x); got {sum(sizes)}")
    return torch.tensor([0, *running_sum(sizes)], dtype=torch.int32, device=counts.device)


def grouped_gemm(x_RK: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    sizes, total = _sizes(offsets)
    experts, biases = _matrices(w), _vectors(bias)
    y_RN = x_RK.new_empty(x_RK.shape[0], experts[0].shape[0])
    _gemm(x_RK[:total], experts, sizes, out=y_RN[:total])
    if biases:
        _add_bias(y_RN[:total], biases, sizes, None)
    y_RN[total:].zero_()
    return y_RN


def grouped_mlp(
    x_RH: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    bias1: Sequence[Tensor],
    bias2: Sequence[Tensor],
    offsets: Tensor,
    probs_R: Tensor | None,
    activation: str,
) -> MLPOutput:
    """Forward: `(y, h)`; see `functional.grouped_mlp` for the equation."""
    sizes, total = _sizes(offsets)
    fc1, fc2, bias1, bias2 = _matrices(fc1), _matrices(fc2), _vectors(bias1), _vectors(bias2)
    kind = Activation.decode(activation)
    num_rows = x_RH.shape[0]
    h_RG = x_RH.new_empty(num_rows, fc1[0].shape[0])
    y_RH = x_RH.new_empty(num_rows, fc2[0].shape[0])
    for experts, rows in _chunks(sizes, h_RG.shape[1]):
        h, n = h_RG[rows], sizes[experts]
        _gemm(x_RH[rows], fc1[experts], n, out=h)
        if bias1:
            _add_bias(h, bias1[experts], n, None)
        probs = None if probs_R is None else probs_R[rows]
        a = act.forward(kind, _wide(h))
        if probs is not None:
            a = a * probs.unsqueeze(1)
        y = y_RH[rows]
        _gemm(a.to(x_RH.dtype), fc2[experts], n, out=y)
        if bias2:
            _add_bias(y, bias2[experts], n, probs)
    y_RH[total:].zero_()
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
    sizes, total = _sizes(offsets)
    fc1, fc2, dw1, dw2 = (_matrices(group) for group in (fc1, fc2, dw1, dw2))
    bias2, db1, db2 = (_vectors(group) for group in (bias2, db1, db2))
    kind = Activation.decode(activation)
    grads = MLPGrads.empty(x_RH, h_RG, fc2[0].shape[1], probs_R, need_dx, keep)
    scratch1, scratch2 = _scratch(dw1, x_RH.dtype), _scratch(dw2, x_RH.dtype)
    for experts, rows in _chunks(sizes, h_RG.shape[1]):
        n, dy, x = sizes[experts], dy_RH[rows], x_RH[rows]
        da = _gemm(dy, [w.t() for w in fc2[experts]], n)
        a, dh = _activation_backward(kind, h_RG[rows], da, rows, probs_R, grads.dprobs)
        if bias2 and probs_R is not None:
            _add_bias_dprobs(grads.dprobs[rows], dy, bias2[experts], n)
        if need_dx:
            _gemm(dh, [w.t() for w in fc1[experts]], n, out=grads.dx[rows])
        _wgrad_(dw2[experts], dy, a, n, accumulate2, scratch2)
        _wgrad_(dw1[experts], dh, x, n, accumulate1, scratch1)
        _bias_grad_(db2[experts], dy, n, None if probs_R is None else probs_R[rows])
        _bias_grad_(db1[experts], dh, n, None)
        if keep:
            grads.dh[rows], grads.act_probs[rows] = dh, a
    for padded in (grads.dx, grads.dprobs):
        padded[total:].zero_()
    return grads


def grouped_wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """`dw[e] (+)= sum over segments s of dy[s][rows of e]^T @ x[s][rows of e]`; `db` the column sums of dy."""
    dw, db = _matrices(dw), _vectors(db)
    scratch = _scratch(dw, x[0].dtype) if x else None
    segments = []
    for s, segment_offsets in enumerate(offsets):
        sizes, total = _sizes(segment_offsets)
        segments.append((sizes, dy[s][:total].split(sizes), x[s][:total].split(sizes) if dw else ()))
    for e in range(len(dw)):  # each expert's gradient is touched by all segments while it is in the cache
        for s, (sizes, dy_e, x_e) in enumerate(segments):
            _wgrad_(dw[e : e + 1], dy_e[e], x_e[e], [sizes[e]], accumulate or s > 0, scratch)
    if db:  # bias gradients are never delayed: there is one segment
        sizes, total = _sizes(offsets[0])
        _bias_grad_(db, dy[0][:total], sizes, None)


def _sizes(offsets: Tensor) -> tuple[list[int], int]:
    bounds = offsets.tolist()
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)], bounds[-1]


def _matrices(group: Sequence[Tensor]) -> list[Tensor]:
    """A packed weight `[E, N, K]`, or E weights `[N, K]`, as a list of E."""
    return list(group[0].unbind(0)) if group and group[0].dim() == 3 else list(group)


def _vectors(group: Sequence[Tensor]) -> list[Tensor]:
    """A packed bias `[E, N]`, or E biases `[N]`, as a list of E."""
    return list(group[0].unbind(0)) if group and group[0].dim() == 2 else list(group)


def _chunks(sizes: list[int], width: int) -> Iterator[tuple[slice, slice]]:
    """Runs of whole experts with at most `_CHUNK_ELEMENTS` of pre-activation (one expert at least)."""
    first, row, rows = 0, 0, 0
    for e, n in enumerate(sizes):
        if e > first and (rows + n) * width > _CHUNK_ELEMENTS:
            yield slice(first, e), slice(row, row + rows)
            first, row, rows = e, row + rows, 0
        rows += n
    yield slice(first, len(sizes)), slice(row, row + rows)


def _wide(t: Tensor) -> Tensor:
    """The dtype in which elementwise work is done."""
    return t if t.dtype == torch.float32 else t.float()


def _gemm(x: Tensor, w: Sequence[Tensor], sizes: list[int], out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape[0], w[0].shape[0])
    for x_e, w_e, out_e, n in zip(x.split(sizes), w, out.split(sizes), sizes, strict=True):
        if n:
            torch.mm(x_e, w_e.t(), out=out_e)
    return out


def _add_bias(y: Tensor, bias: Sequence[Tensor], sizes: list[int], probs: Tensor | None) -> None:
    scales = [None] * len(sizes) if probs is None else probs.unsqueeze(1).split(sizes)
    for y_e, b_e, p_e in zip(y.split(sizes), bias, scales, strict=True):
        y_e.add_(b_e if p_e is None else _wide(p_e) * b_e)


def _add_bias_dprobs(dprobs: Tensor, dy: Tensor, bias: Sequence[Tensor], sizes: list[int]) -> None:
    # y = probs * (... + bias2), so dprobs also gets dy . bias2.
    for dprobs_e, dy_e, b_e in zip(dprobs.split(sizes), dy.split(sizes), bias, strict=True):
        dprobs_e.add_(_wide(dy_e).mv(_wide(b_e)))


def _activation_backward(
    activation: Activation, h: Tensor, da: Tensor, rows: slice, probs_R: Tensor | None, dprobs_R: Tensor
) -> tuple[Tensor, Tensor]:
    """`(act * probs, dh)` of one chunk in the dtype of h; fills the chunk of dprobs."""
    wide_da = _wide(da)
    if probs_R is None:
        a, dh = act.backward(activation, _wide(h), wide_da)
        return a.to(h.dtype), dh.to(h.dtype)
    probs = _wide(probs_R[rows]).unsqueeze(1)
    a, dh = act.backward(activation, _wide(h), wide_da * probs)
    dprobs_R[rows] = (wide_da * a).sum(1)
    return (a * probs).to(h.dtype), dh.to(h.dtype)


def _scratch(dw: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """A buffer of one expert's size where the GEMM cannot add into `dw` itself (CPU GEMMs do not mix dtypes)."""
    return dw[0].new_empty(dw[0].shape, dtype=dtype) if dw and dw[0].dtype != dtype else None


def _wgrad_(
    dw: Sequence[Tensor], dy: Tensor, x: Tensor, sizes: list[int], accumulate: bool, scratch: Tensor | None
) -> None:
    for dw_e, dy_e, x_e, n in zip(dw, dy.split(sizes), x.split(sizes), sizes, strict=False):
        if n == 0:
            if not accumulate:
                dw_e.zero_()
        elif scratch is None:
            dw_e.addmm_(dy_e.t(), x_e, beta=int(accumulate))
        else:
            torch.mm(dy_e.t(), x_e, out=scratch)
            dw_e.add_(scratch) if accumulate else dw_e.copy_(scratch)


def _bias_grad_(db: Sequence[Tensor], dy: Tensor, sizes: list[int], probs: Tensor | None) -> None:
    scales = [None] * len(sizes) if probs is None else probs.split(sizes)
    for db_e, dy_e, p_e in zip(db, dy.split(sizes), scales, strict=False):
        wide = _wide(dy_e)
        db_e.copy_(wide.sum(0) if p_e is None else _wide(p_e) @ wide)
