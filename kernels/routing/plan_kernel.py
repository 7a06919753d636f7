"""Device functions that write plans, and the kernel that makes one alone: see `plan.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _whole_table(tiles):
    return (3 * (1 + tiles) + 3) // 4 * 4


@triton.jit
def write_plan(
    program,
    first_g,
    end_g,
    plan_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write one program's part of a plan. `first_g`, `end_g`: rows of the experts, of padding, of empty groups."""
    ORDER_AT: tl.constexpr = (NUM_EXPERTS + 4) // 4 * 4
    TABLES_AT: tl.constexpr = 2 * ORDER_AT
    ORDERS: tl.constexpr = (NUM_EXPERTS + BLOCK_E - 1) // BLOCK_E
    if program == 0:
        g = tl.arange(0, BLOCK_G)
        tl.store(plan_ptr + g, first_g, mask=g <= NUM_EXPERTS)
    if program < ORDERS:
        write_order(program, end_g - first_g, plan_ptr + ORDER_AT, NUM_EXPERTS, BLOCK_G, BLOCK_E)
    table_ptr = plan_ptr + TABLES_AT
    program -= ORDERS
    groups = tl.minimum(num_rows, NUM_EXPERTS + 1)
    for i in tl.static_range(len(BLOCKS)):
        most = groups - 1 + (num_rows - groups + BLOCKS[i]) // BLOCKS[i]
        programs = tl.cdiv(most, BLOCK_T)
        if (program >= 0) & (program < programs):
            write_tiles(program, first_g, end_g, table_ptr, NUM_EXPERTS, BLOCKS[i], BLOCK_G, BLOCK_T)
        table_ptr += _whole_table(most)
        program -= programs


@triton.jit
def write_order(
    program,
    rows_g,
    order_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the experts by falling number of rows, `[E]`, then how many have rows."""
    own, others = program * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_G)
    expert_g = others < NUM_EXPERTS
    rows_g = tl.where(expert_g, rows_g, 0)
    own_rows = tl.gather(rows_g, own, 0)
    before = (rows_g[None, :] > own_rows[:, None]) | (
        (rows_g[None, :] == own_rows[:, None]) & (others[None, :] < own[:, None])
    )
    rank = tl.sum((before & expert_g[None, :]).to(tl.int32), axis=1)
    used = tl.sum((rows_g > 0).to(tl.int32), axis=0)
    tl.store(order_ptr + rank, own, mask=own < NUM_EXPERTS)
    if program == 0:
        tl.store(order_ptr + NUM_EXPERTS, used)


@triton.jit
def write_tiles(
    program,
    first_g,
    end_g,
    tiles_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write a table: the number of the experts' tiles, the number with those of padding rows, one unused element; then
    for each tile its expert (E: padding), its first row and the end of the expert's rows. The rest is not written.
    """
    g = tl.arange(0, BLOCK_G)
    tile_ends = tl.cumsum((end_g - first_g + BLOCK_M - 1) // BLOCK_M, 0)
    used = tl.max(tile_ends, 0)
    if program == 0:
        tl.store(tiles_ptr, tl.max(tl.where(g < NUM_EXPERTS, tile_ends, 0), 0))
        tl.store(tiles_ptr + 1, used)
    # Binary search for the groups that end before tile t: [BLOCK_T, BLOCK_G] comparisons would not fit registers.
    t = program * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.zeros((BLOCK_T,), dtype=tl.int32)
    half = BLOCK_G // 2
    while half > 0:
        group = tl.where(tl.gather(tile_ends, group + half - 1, 0) <= t, group + half, group)
        half = half // 2
    before = tl.where(group > 0, tl.gather(tile_ends, tl.maximum(group - 1, 0), 0), 0)
    tile_ptr, mask = tiles_ptr + 3 * (1 + t), t < used
    tl.store(tile_ptr, group, mask=mask)
    tl.store(tile_ptr + 1, tl.gather(first_g, group, 0) + (t - before) * BLOCK_M, mask=mask)
    tl.store(tile_ptr + 2, tl.gather(end_g, group, 0), mask=mask)


@triton.jit
def groups_of_counts(n_g, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_G: tl.constexpr):
    """`(first rows, ends)` of all groups, in `[0, num_rows]` whatever the counts `n_g` (0 after the experts) are."""
    n_g = tl.maximum(n_g.to(tl.int64), 0)
    ends = tl.cumsum(n_g, 0)
    first_g = tl.minimum(ends - n_g, num_rows).to(tl.int32)
    end_g = tl.where(tl.arange(0, BLOCK_G) < NUM_EXPERTS, tl.minimum(ends, num_rows), num_rows).to(tl.int32)
    return tl.where(tl.arange(0, BLOCK_G) <= NUM_EXPERTS, first_g, end_g), end_g


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    counts_ptr,
    offsets_ptr,
    plan_ptr,
    valid_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write a `plan` of `counts` `[E]`, with `valid` `[]`, or of first rows, `offsets` `[E + 1]`."""
    g = tl.arange(0, BLOCK_G)
    if counts_ptr is not None:
        n_g = tl.load(counts_ptr + g, mask=g < NUM_EXPERTS, other=0).to(tl.int64)
        if tl.program_id(0) == 0:
            tl.store(valid_ptr, (tl.min(n_g, 0) >= 0) & (tl.sum(tl.maximum(n_g, 0), 0) <= num_rows))
        first_g, end_g = groups_of_counts(n_g, num_rows, NUM_EXPERTS, BLOCK_G)
    else:
        first_g = tl.load(offsets_ptr + g, mask=g <= NUM_EXPERTS, other=num_rows)
        end_g = tl.load(offsets_ptr + g + 1, mask=g < NUM_EXPERTS, other=num_rows)
    write_plan(tl.program_id(0), first_g, end_g, plan_ptr, num_rows, NUM_EXPERTS, BLOCKS, BLOCK_G, BLOCK_T, BLOCK_E)
