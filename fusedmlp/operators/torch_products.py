"""Products of rows, sorted by expert, with their expert's weights, on the CPU; see `torch_impl.py`.

Three methods, chosen only here, by measurements on two cores (fp32 and bf16, 8 to 128 experts):

- Even loads: one batched product. Its threads divide the experts. With a product for each expert, threads divide each
  small product, which took up to twice as long.
- Uneven loads: `F.grouped_mm`, which loops over experts without Python: 4 to 9 us less per expert. Padding loads to a
  batch was slower, except for bf16 and a hundred small experts.
- Otherwise (a list of weights, strides that are not multiples of 16 bytes): one product per expert.

In all of these, bits of a row depend on how many rows there are. `batch_invariant` products have one size: CHUNK rows,
the last ones padded, as `w x^T`, whose results did not depend on the rows' number, place or address (MKL and oneDNN of
torch 2.13, AVX-512, AVX2 and AMX, one to twelve threads; as `x w^T` they did).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp.kernels.operands.quantized import is_quantized
from fusedmlp.operators.torch_quantize import dequantized_weights, rounded, rounded_weights
from fusedmlp.recipe import BLOCKS

# Elements that fit the caches of two cores: of weight gradients in the rows' dtype before they are added to an fp32
# main_grad, and of the widest activation in a block of rows.
SCRATCH_ELEMENTS = 1 << 20
BLOCK_ELEMENTS = 1 << 19
CHUNK = 64
# MKL divides the rows of a product with few output features among threads, and those at the seams get other code.
_NARROW = 32
# PyTorch's threads share a sum if it is the only one and has 32,768 elements.
_SUMMED = 1 << 14

# The tensors of all experts: one packed tensor, or a list.
_Each = Tensor | Sequence[Tensor]


class Rows:
    """The division of a call's rows among experts.

    Args:
        offsets: `[E + 1]` int32: first row of every expert, then the end of the last.
        number: `R`, the number of rows; rows after the last expert's are padding.
        batch_invariant: bits of a row's product depend on nothing but the row and the weights.
    """

    def __init__(self, offsets: Tensor, number: int, batch_invariant: bool = False) -> None:
        self.number, self._ends, self._batch_invariant = number, offsets[1:], batch_invariant
        bounds: list[int] = offsets.tolist()
        self.bounds, self.total = bounds, bounds[-1]
        self.sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
        self.even = len(set(self.sizes)) == 1

    def gather(self, t_TN: Tensor, row_ids_R: Tensor | None) -> Tensor:
        """Rows `t[row_ids[r]]`, with padding rows uninitialised; `t` itself without `row_ids`."""
        if row_ids_R is None:
            return t_TN
        out_RN = t_TN.new_empty(self.number, t_TN.shape[1])
        torch.index_select(t_TN, 0, row_ids_R[: self.total], out=out_RN[: self.total])
        return out_RN

    def split(self, t_RN: Tensor) -> tuple[Tensor, ...]:
        """Every expert's rows."""
        parts: tuple[Tensor, ...] = t_RN[: self.total].split(self.sizes)
        return parts

    def blocks(self, width: int) -> Iterator[slice]:
        """Blocks of all rows but padding; `width` columns of a block stay in the cache."""
        step = max(1, BLOCK_ELEMENTS // width)
        for start in range(0, self.total, step):
            yield slice(start, min(start + step, self.total))

    def product(self, x_RK: Tensor, w: Sequence[Tensor], *, transposed: bool, recipe: str = "") -> Tensor:
        """`[R, N]`: `x @ w[e]`, or `x @ w[e]^T`; zero in padding. (Autocast would change products without an `out`.)

        An 8-bit `recipe` quantizes both operands in blocks along what is contracted, or takes a quantized copy of the
        weights, in which that is the last dimension.
        """
        if recipe:
            x_RK = rounded(x_RK, recipe, (1, BLOCKS[recipe]))
            if is_quantized(w):
                w, transposed = [dequantized_weights(w, recipe)], True
            else:
                w = rounded_weights(w, recipe, transposed)
        w_EKN = _each(w, 2)
        if isinstance(w_EKN, Tensor):
            w_EKN = w_EKN.mT if transposed else w_EKN
            if not (self.even or self._batch_invariant) and _takes_groups(x_RK, w_EKN):
                return self.pad(F.grouped_mm(x_RK, w_EKN, offs=self._ends))
        elif transposed:
            w_EKN = [w_NK.t() for w_NK in w_EKN]
        out_RN = x_RK.new_empty(self.number, w_EKN[0].shape[1])
        if self._batch_invariant:
            self._products_of_chunks(x_RK, w_EKN, out_RN)
        elif self.even and isinstance(w_EKN, Tensor):
            torch.bmm(self._by_expert(x_RK), w_EKN, out=self._by_expert(out_RN))
        else:
            for x, w_KN, out in zip(self.split(x_RK), w_EKN, self.split(out_RN), strict=True):
                torch.mm(x, w_KN, out=out)
        return self.pad(out_RN)

    def _products_of_chunks(self, x_RK: Tensor, w_EKN: _Each, out_RN: Tensor) -> None:
        N, padding = out_RN.shape[1], max(0, _NARROW - out_RN.shape[1])
        chunk_CK, product_NC = x_RK.new_zeros(CHUNK, x_RK.shape[1]), x_RK.new_empty(N + padding, CHUNK)
        for x, w_KN, out in zip(self.split(x_RK), w_EKN, self.split(out_RN), strict=True):
            w_NK = w_KN.t()
            if not (w_NK.is_contiguous() or w_KN.is_contiguous()):
                w_NK = w_NK.contiguous()  # oneDNN multiplies what lies between rows by zero, also NaN
            w_NK = F.pad(w_NK, (0, 0, 0, padding)) if padding else w_NK
            for x_cK, out_cN in zip(x.split(CHUNK), out.split(CHUNK), strict=True):
                if size := x_cK.shape[0]:
                    chunk_CK[:size] = x_cK
                    torch.mm(w_NK, chunk_CK.t(), out=product_NC)
                    out_cN.copy_(product_NC.t()[:size, :N])

    def adapt_(self, out_RN: Tensor | None, x_RK: Tensor, lora: Sequence[Tensor] | None) -> Tensor | None:
        """`out += B (A x)` with an adapter `[A, B]`; return `A x`, `[R, r]`. None without an adapter.

        In fp32: narrow products in 16 bits take longer.
        """
        if not lora:
            return None
        A, B = (factor.float() for factor in lora)
        t_Rr = self.product(x_RK.float(), [A], transposed=True)
        if out_RN is not None:
            sum_RN = out_RN.float()
            if self._batch_invariant:
                sum_RN += self.product(t_Rr, [B], transposed=True)
            elif self.even:
                self._by_expert(sum_RN).baddbmm_(self._by_expert(t_Rr), B.mT)
            else:
                for out, t, B_Nr in zip(self.split(sum_RN), self.split(t_Rr), B, strict=True):
                    out.addmm_(t, B_Nr.t())
            out_RN.copy_(sum_RN)
        return t_Rr.to(x_RK.dtype)

    def adapter_grads_(
        self, dlora: Sequence[Tensor], dy_RN: Tensor, x_RK: Tensor, t_Rr: Tensor | None, u_Rr: Tensor | None
    ) -> None:
        """Write the gradients of A and B, if they are wanted, from `t = A x` and `u = B^T dy`, summed unrounded."""
        if dlora and t_Rr is not None and u_Rr is not None:
            dA, dB = dlora
            self.wgrad_([dA], u_Rr, x_RK, False, recipe="bf16")
            self.wgrad_([dB], dy_RN, t_Rr, False, recipe="bf16")

    def pad(self, t_RN: Tensor) -> Tensor:
        """Zero the padding rows; return `t_RN`."""
        if self.total < self.number:
            t_RN[self.total :].zero_()
        return t_RN

    def wgrad_(self, dw: Sequence[Tensor], dy_RN: Tensor, x_RK: Tensor, accumulate: bool, *, recipe: str = "") -> None:
        """`dw[e] (+)= dy^T x`, through scratch memory if dtypes differ, as CPU GEMMs do not mix them.

        Products are then rounded to the dtype of the operands, unless there is a recipe: operands are cast to that of
        `dw`. An 8-bit recipe quantizes both before, in blocks along the rows of an expert.
        """
        dw_ENK = _each(dw, 2)
        if recipe in BLOCKS:
            dy_RN, x_RK = self._rounded(dy_RN, recipe), self._rounded(x_RK, recipe)
        if recipe:
            dy_RN, x_RK = dy_RN.to(dw[0].dtype), x_RK.to(dw[0].dtype)
        if dw[0].dtype == dy_RN.dtype:
            self._add_products_(dw_ENK, dy_RN, x_RK, accumulate)
            return
        size = dw[0].shape[-2] * dw[0].shape[-1]
        step = max(1, SCRATCH_ELEMENTS // size)
        scratch_eNK = dy_RN.new_empty(min(step, len(self.sizes)), *dw[0].shape[-2:])
        for first in range(0, len(self.sizes), step):
            experts = slice(first, min(first + step, len(self.sizes)))
            part, begin = self._of(experts), self.bounds[experts.start]
            dy, x = dy_RN[begin : self.bounds[experts.stop]], x_RK[begin : self.bounds[experts.stop]]
            if not part.even and _takes_groups(dy.t(), x):
                products = F.grouped_mm(dy.t(), x, offs=part._ends)
            else:
                products = scratch_eNK[: len(part.sizes)]
                part._add_products_(products, dy, x, False)
            _add_(dw_ENK[experts], products, part.sizes, accumulate)

    def _rounded(self, t_RN: Tensor, recipe: str) -> Tensor:
        out_RN = torch.empty_like(t_RN)
        for t_rN, out_rN in zip(self.split(t_RN), self.split(out_RN), strict=True):
            out_rN.copy_(rounded(t_rN, recipe, (BLOCKS[recipe], 1)))
        return out_RN

    def _of(self, experts: slice) -> Rows:
        """`Rows` of a slice of the experts, counted from its first row."""
        begin = self.bounds[experts.start]
        offsets = torch.tensor([bound - begin for bound in self.bounds[experts.start : experts.stop + 1]])
        return Rows(offsets.int(), self.bounds[experts.stop] - begin)

    def _add_products_(self, dw_ENK: _Each, dy_RN: Tensor, x_RK: Tensor, accumulate: bool) -> None:
        if self.even and self.total and isinstance(dw_ENK, Tensor):
            dw_ENK.baddbmm_(self._by_expert(dy_RN).mT, self._by_expert(x_RK), beta=int(accumulate))
            return
        for size, dw_NK, dy, x in zip(self.sizes, dw_ENK, self.split(dy_RN), self.split(x_RK), strict=True):
            if size or not accumulate:  # without rows, adding would still read and write all of dw
                dw_NK.addmm_(dy.t(), x, beta=int(accumulate))

    def add_bias_(self, y_RN: Tensor, bias: Sequence[Tensor], probs_R1: Tensor | None = None) -> None:
        """`y += probs * bias[e]`."""
        probs = [None] * len(self.sizes) if probs_R1 is None else self.split(probs_R1)
        for y, b_N, p in zip(self.split(y_RN), _each(bias, 1), probs, strict=True):
            y.add_(b_N if p is None else p * b_N)

    def bias_grad_(self, db: Sequence[Tensor], dy_RN: Tensor, probs_R1: Tensor | None = None) -> None:
        """`db[e] = sum over rows of probs * dy`."""
        probs = [None] * len(self.sizes) if probs_R1 is None else self.split(probs_R1)
        for db_N, dy, p in zip(_each(db, 1), self.split(dy_RN), probs, strict=True):
            db_N.copy_((dy.float() if p is None else dy.float() * p).sum(0))

    def dot_bias_(self, out_R: Tensor, dy_RN: Tensor, bias: Sequence[Tensor]) -> None:
        """`out += dy . bias[e]`, in fp32."""
        for out, dy, b_N in zip(self.split(out_R), self.split(dy_RN), _each(bias, 1), strict=True):
            out.add_(sum_rows_(torch.empty_like(out), dy.float() * b_N.float()))

    def _by_expert(self, t_RN: Tensor) -> Tensor:
        return t_RN[: self.total].view(len(self.sizes), self.sizes[0], t_RN.shape[1])


def transposed(lora: Sequence[Tensor] | None) -> list[Tensor]:
    """An adapter's `[B^T, A^T]`, as backward applies it."""
    return [w.mT for w in reversed(lora or ())]


def sum_rows_(out_R: Tensor, t_RN: Tensor) -> Tensor:
    """`out = t.sum(1)`, whose bits do not depend on the number of rows."""
    first, *others = t_RN.split(_SUMMED, 1)
    torch.sum(first, 1, out=out_R)
    for other in others:
        out_R += other.sum(1)
    return out_R


def _each(group: Sequence[Tensor], dim: int) -> _Each:
    """One packed tensor, `[E, ...]`, or a list with one for each expert; `dim`: dimensions of one expert's tensor."""
    return group[0] if len(group) == 1 and group[0].dim() > dim else group


def _takes_groups(a: Tensor, b: Tensor) -> bool:
    """Whether `F.grouped_mm` takes `a` and `b`, and its result has no gaps between rows.

    Rows or columns must be contiguous, and their strides, and rows of the result, multiples of 16 bytes.
    """
    if b.shape[-1] * b.element_size() % 16:
        return False
    for t in (a, b):
        rows, columns = (t.stride(-2), t.stride(-1), t.shape[-1]), (t.stride(-1), t.stride(-2), t.shape[-2])
        if t.device.type != "cpu":
            return False
        if not any(
            step == 1 and apart >= size and apart * t.element_size() % 16 == 0 for apart, step, size in (rows, columns)
        ):
            return False
    return True


def _add_(dw: _Each, products_eNK: Tensor, sizes: list[int], accumulate: bool) -> None:
    """Write or add products to `dw` in its dtype. Adding does not touch `dw` of experts without rows."""
    if not isinstance(dw, Tensor):
        for size, dw_NK, product_NK in zip(sizes, dw, products_eNK, strict=True):
            if not accumulate:
                dw_NK.copy_(product_NK)
            elif size:
                dw_NK.add_(product_NK)
    elif accumulate:
        start = 0
        for with_rows, run in groupby(sizes, bool):
            end = start + len(list(run))
            if with_rows:
                dw[start:end].add_(products_eNK[start:end])
            start = end
    else:
        dw.copy_(products_eNK)
