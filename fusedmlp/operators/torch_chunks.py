"""Runs of experts that share buffers, and the products of their rows; see `torch_impl.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of a chunk's widest activation and of its largest weight (8 MiB in fp32): larger ones
# save little time and take more memory, smaller ones cost time on 2 MiB of L2.
CHUNK_ELEMENTS = 1 << 21

# One tensor for each expert: slices of a packed one, or a list.
_Each = Tensor | Sequence[Tensor]


class Chunks:
    """The chunks of one call, in order, and the buffers that they share.

    Args:
        offsets: `[E + 1]`, first row of every expert.
        width: features of the widest activation.
        weights: the weights and weight gradients that chunks will use; each group is one packed tensor or a list.
    """

    def __init__(self, offsets: Tensor, width: int, *weights: Sequence[Tensor]) -> None:
        self.bounds: list[int] = offsets.tolist()
        self.sizes = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        self.total = self.bounds[-1]  # rows from here on are padding
        largest = max((group[0].shape[-1] * group[0].shape[-2] for group in weights if group), default=1)
        self._most_experts = max(1, CHUNK_ELEMENTS // largest)
        self._most_rows = CHUNK_ELEMENTS // width
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[Chunk]:
        first = 0
        while first < len(self.sizes):
            last = first + 1
            while (
                last < min(len(self.sizes), first + self._most_experts)
                and self.bounds[last + 1] - self.bounds[first] <= self._most_rows
            ):
                last += 1
            yield Chunk(self, first, last)
            first = last

    def buffer(self, name: str, like: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """An uninitialised tensor on the device of `like`; the same memory for every chunk that asks for `name`."""
        numel = 1
        for size in shape:
            numel *= size
        held = self._buffers.get(name)
        if held is None or held.numel() < numel:
            held = self._buffers[name] = torch.empty(numel, dtype=dtype, device=like.device)
        return held[:numel].view(shape)


class Chunk:
    """`e` consecutive experts with `n` rows between them."""

    def __init__(self, chunks: Chunks, first: int, last: int) -> None:
        self._chunks = chunks
        self._experts = slice(first, last)
        self._sizes = chunks.sizes[first:last]
        self._rows = slice(chunks.bounds[first], chunks.bounds[last])
        # Experts with as many rows each are one batched product.
        self._even = len(set(self._sizes)) == 1

    def rows(self, t_RN: Tensor) -> Tensor:
        """This chunk's rows, in place."""
        return t_RN[self._rows]

    def gather(self, name: str, t_RN: Tensor, gather_R: Tensor | None) -> Tensor:
        """This chunk's rows, of which row `r` is `t[gather[r]]`, if `gather` is given."""
        if gather_R is None:
            return t_RN[self._rows]
        rows = gather_R[self._rows]
        out = self._chunks.buffer(name, t_RN, t_RN.dtype, (rows.shape[0], t_RN.shape[1]))
        return torch.index_select(t_RN, 0, rows, out=out)

    def buffer(self, name: str, like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised `[n, width]`, shared with other chunks."""
        return self._chunks.buffer(name, like, dtype, (self._rows.stop - self._rows.start, width))

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`tensor` in `dtype`: itself, or a copy in the buffer of that name."""
        return tensor if tensor.dtype == dtype else self.buffer(name, tensor, tensor.shape[-1], dtype).copy_(tensor)

    def product(self, x_nK: Tensor, w: Sequence[Tensor], out_nN: Tensor, *, transposed: bool) -> Tensor:
        """`out = x @ w[e]`, or `x @ w[e]^T`, for the rows of every expert; with `out`, which autocast leaves alone."""
        w_eNK = self._of(w, 2)
        if self._even and isinstance(w_eNK, Tensor):
            torch.bmm(self._by_expert(x_nK), w_eNK.mT if transposed else w_eNK, out=self._by_expert(out_nN))
        else:
            for x, w_NK, out in zip(self._split(x_nK), w_eNK, self._split(out_nN), strict=True):
                torch.mm(x, w_NK.t() if transposed else w_NK, out=out)
        return out_nN

    def wgrad_(self, dw: Sequence[Tensor], dy_nN: Tensor, x_nK: Tensor, accumulate: bool) -> None:
        """`dw[e] (+)= dy^T x`; in the memory of `dw` itself where dtypes agree (CPU GEMMs do not mix them)."""
        dw_eNK = self._of(dw, 2)
        if dw[0].dtype == dy_nN.dtype:
            self._add_products_(dw_eNK, dy_nN, x_nK, accumulate)
            return
        shape = (len(self._sizes), dy_nN.shape[1], x_nK.shape[1])
        scratch_eNK = self._chunks.buffer("dw", dy_nN, dy_nN.dtype, shape)
        self._add_products_(scratch_eNK, dy_nN, x_nK, False)
        if isinstance(dw_eNK, Tensor) and all(self._sizes):
            dw_eNK.add_(scratch_eNK) if accumulate else dw_eNK.copy_(scratch_eNK)
            return
        for size, dw_NK, scratch_NK in zip(self._sizes, dw_eNK, scratch_eNK, strict=True):
            if not accumulate:
                dw_NK.copy_(scratch_NK)
            elif size:
                dw_NK.add_(scratch_NK)

    def _add_products_(self, dw_eNK: _Each, dy_nN: Tensor, x_nK: Tensor, accumulate: bool) -> None:
        if self._even and self._sizes[0] and isinstance(dw_eNK, Tensor):
            dw_eNK.baddbmm_(self._by_expert(dy_nN).mT, self._by_expert(x_nK), beta=int(accumulate))
            return
        for size, dw_NK, dy, x in zip(self._sizes, dw_eNK, self._split(dy_nN), self._split(x_nK), strict=True):
            if size or not accumulate:  # without rows, adding would still read and write all of dw
                dw_NK.addmm_(dy.t(), x, beta=int(accumulate))

    def bias(self, bias: Sequence[Tensor]) -> Tensor:
        """Every row's bias, `[n, N]`."""
        bias_eN = self._of(bias, 1)
        if not isinstance(bias_eN, Tensor):
            bias_eN = torch.stack(list(bias_eN))
        return bias_eN.repeat_interleave(torch.tensor(self._sizes, device=bias_eN.device), 0)

    def bias_grad_(self, db: Sequence[Tensor], dy_nN: Tensor, probs_n1: Tensor | None) -> None:
        """`db[e] = sum over rows of probs * dy`."""
        wide = dy_nN.float()
        for db_, dy in zip(self._of(db, 1), self._split(wide if probs_n1 is None else wide * probs_n1), strict=True):
            db_.copy_(dy.sum(0))

    def _split(self, t_nN: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = t_nN.split(self._sizes)
        return parts

    def _by_expert(self, t_nN: Tensor) -> Tensor:
        return t_nN.view(len(self._sizes), self._sizes[0], t_nN.shape[1])

    def _of(self, group: Sequence[Tensor], dim: int) -> _Each:
        """These experts' part of one packed tensor, `[e, ...]`, or of a list; `dim`: dimensions of one expert's."""
        packed = len(group) == 1 and group[0].dim() > dim
        return group[0][self._experts] if packed else group[self._experts]
