"""Runs of experts that one batched GEMM serves; see `torch_impl.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of a chunk's widest activation and of its weight gradient (4 MiB in fp32), measured best on 2 MiB of L2.
CHUNK_ELEMENTS = 1 << 20
# Rows after padding, relative to those before, up to which batching is worth it.
_MAX_PADDING = 1.5

# Tensors of all experts (packed, or a list), and the number of dimensions of one expert's.
Group = tuple[Sequence[Tensor], int]


class Chunks:
    """The chunks of one call, in order, and the buffers that they share.

    Args:
        offsets: `[E + 1]`, first row of every expert.
        device: of all tensors.
        width: features of the widest activation.
        groups: the tensors that chunks will slice with `of`. One that is a list limits chunks to single experts.
    """

    def __init__(self, offsets: Tensor, device: torch.device, width: int, *groups: Group) -> None:
        bounds = offsets.tolist()
        self.total: int = bounds[-1]  # rows from here on are padding
        self._sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
        self._bounds = bounds
        self.device = device
        self._width = width
        packed = all(_packed(tensors, dim) for tensors, dim in groups if tensors)
        weight = max((t[0][0].numel() for t, dim in groups if t and dim == 2 and packed), default=1)
        self._max_experts = max(1, CHUNK_ELEMENTS // weight) if packed else 1
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[Chunk]:
        first = 0
        while first < len(self._sizes):
            longest = total = self._sizes[first]
            last = first + 1
            while last < len(self._sizes) and self._fits(first, last, longest, total):
                longest, total = max(longest, self._sizes[last]), total + self._sizes[last]
                last += 1
            if total:
                yield Chunk(self, first, last, longest)
            first = last

    def _fits(self, first: int, last: int, longest: int, total: int) -> bool:
        """Whether expert `last` can join the chunk that starts at `first`."""
        size, count = self._sizes[last], last + 1 - first
        rows = count * max(longest, size)
        return (
            size > 0
            and total > 0
            and count <= self._max_experts
            and rows * self._width <= CHUNK_ELEMENTS
            and rows <= _MAX_PADDING * (total + size)
        )

    def clear_empty_experts_(self, *groups: Sequence[Tensor]) -> None:
        """Zero what the chunks, which have rows, did not write."""
        for e, size in enumerate(self._sizes):
            if size == 0:
                for tensors in groups:
                    if tensors:
                        (tensors[0][e] if len(tensors) == 1 < len(self._sizes) else tensors[e]).zero_()

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; the same memory for every chunk that asks for `name`."""
        numel = 1
        for size in shape:
            numel *= size
        held = self._buffers.get(name)
        if held is None or held.numel() < numel:
            held = self._buffers[name] = torch.empty(numel, dtype=dtype, device=self.device)
        return held[:numel].view(shape)


class Chunk:
    """`e` consecutive experts with at most `C` rows each."""

    def __init__(self, chunks: Chunks, first: int, last: int, longest: int) -> None:
        self._chunks = chunks
        self._experts = slice(first, last)
        self._rows = slice(chunks._bounds[first], chunks._bounds[last])
        self._shape = (last - first, longest)
        sizes = torch.tensor(chunks._sizes[first:last])
        # Padded form and rows, as indices into each other; None where every expert has `longest` rows.
        self._slots: Tensor | None = None  # of every row: its place in the padded form
        if len(set(chunks._sizes[first:last])) > 1:
            places = torch.arange(longest) < sizes.unsqueeze(1)  # [e, C]: has a row
            self._slots = places.flatten().nonzero().squeeze(1).to(chunks.device)
            self._sources = (places.flatten().cumsum(0) - 1).clamp(min=0).to(chunks.device)  # of every place: a row
            self._empty = (~places).flatten().nonzero().squeeze(1).to(chunks.device)

    def of(self, group: Sequence[Tensor], dim: int) -> Tensor:
        """This chunk's part of a packed tensor or of a list, `[e, ...]`."""
        if _packed(group, dim):
            return group[0][self._experts]
        return group[self._experts.start].unsqueeze(0)

    def pad(self, name: str, t_RN: Tensor, gather_R: Tensor | None = None) -> Tensor:
        """This chunk's rows as `[e, C, N]`; rows that are not there are zero. Row `r` is `t[gather[r]]`, if given."""
        if gather_R is None:
            rows = t_RN[self._rows]
            if self._slots is None:
                return rows.view(*self._shape, -1)
            sources = self._sources
        else:
            rows, sources = t_RN, gather_R[self._rows]
            if self._slots is not None:
                sources = sources[self._sources]
        padded = self.buffer(name, t_RN.shape[1], t_RN.dtype)
        places = padded.flatten(0, 1)
        torch.index_select(rows, 0, sources, out=places)
        if self._slots is not None:
            places.index_fill_(0, self._empty, 0)
        return padded

    def target(self, name: str, out_RN: Tensor) -> Tensor:
        """Where to compute this chunk's rows of `out`, `[e, C, N]`; then `store` it."""
        if self._slots is None:
            return out_RN[self._rows].view(*self._shape, -1)
        return self.buffer(name, out_RN.shape[1], out_RN.dtype)

    def store(self, t_eCN: Tensor, out_RN: Tensor, *, always: bool = False) -> None:
        """Put `[e, C, N]` into the rows of `out`; `always`: even without padding (it is not `out`'s own memory)."""
        rows = out_RN[self._rows]
        if self._slots is not None:
            torch.index_select(t_eCN.flatten(0, 1), 0, self._slots, out=rows)
        elif always:
            rows.copy_(t_eCN.flatten(0, 1))

    def buffer(self, name: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised `[e, C, width]`, shared with other chunks."""
        return self._chunks.buffer(name, (*self._shape, width), dtype)

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`tensor` in `dtype`: itself, or a copy in the buffer of that name."""
        return tensor if tensor.dtype == dtype else self.buffer(name, tensor.shape[-1], dtype).copy_(tensor)

    def wgrad_(self, dw: Sequence[Tensor], dy_eCN: Tensor, x_eCK: Tensor, accumulate: bool) -> None:
        """`dw (+)= dy^T x`; in the memory of `dw` itself where dtypes agree (CPU GEMMs do not mix them)."""
        dw_eNK, dy_eNC = self.of(dw, 2), dy_eCN.transpose(1, 2)
        if dw_eNK.dtype == dy_eCN.dtype:
            dw_eNK.baddbmm_(dy_eNC, x_eCK, beta=int(accumulate))
            return
        scratch = self._chunks.buffer("dw", dw_eNK.shape, dy_eCN.dtype)
        torch.bmm(dy_eNC, x_eCK, out=scratch)
        dw_eNK.add_(scratch) if accumulate else dw_eNK.copy_(scratch)

    def bias_grad_(self, db: Sequence[Tensor], dy_eCN: Tensor, probs_eC1: Tensor | None) -> None:
        """`db = sum over rows of probs * dy`."""
        wide = dy_eCN.float()
        self.of(db, 1).copy_((wide if probs_eC1 is None else wide * probs_eC1).sum(1))


def _packed(group: Sequence[Tensor], dim: int) -> bool:
    return len(group) == 1 and group[0].dim() > dim
