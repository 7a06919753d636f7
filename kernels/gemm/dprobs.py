"""Gradients of routing probabilities, from the partial sums of pass (3), one for each column tile and one for a bias:
`dprobs[r] = sum_j partial[j, r]`.

They are added in fp32 in the order of j, and rounded once: the same bits every run. The programs of pass (4) share the
work or, where there is no dx, those of a launch of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.tiles import round_to


class Dprobs(NamedTuple):
    """Partial sums that a launch adds up, and the output: tensors or, in a plan, arrays."""

    partial: Any  # [num_partials, R], fp32
    places: Any  # [R] integers: `out[i]` is the sum for row `places[i]`; None: for row i
    out: Any  # [R], any floating dtype


@triton.jit
def sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, indices):
    """`dprobs[i] = sum_j partial[j, r]` for all i below `num_rows`; r is `dprobs_rows[i]`, or i without `dprobs_rows`.

    All programs of a launch share the work. `indices`: `arange(0, BLOCK)`; a program sums BLOCK rows at a time.
    """
    BLOCK: tl.constexpr = indices.shape[0]
    for start in range(tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        index = start + indices
        mask, row = index < num_rows, index
        if dprobs_rows_ptr is not None:
            row = tl.load(dprobs_rows_ptr + index, mask=mask, other=0)
        part_ptr = partial_ptr
        acc = tl.load(part_ptr + row, mask=mask, other=0.0)
        for _ in range(1, num_partials):
            part_ptr += num_rows
            acc += tl.load(part_ptr + row, mask=mask, other=0.0)
        tl.store(dprobs_ptr + index, round_to(acc, dprobs_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_partials", "num_rows"])
def sum_partials_kernel(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, BLOCK: tl.constexpr):
    """`sum_partials` alone; `partial` `[num_partials, num_rows]`, `dprobs_rows` and `dprobs` `[num_rows]`."""
    sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, tl.arange(0, BLOCK))
