"""Quantization to 8 bits by itself: a case's copies against PyTorch's definitions, laid out scale by scale."""

from dataclasses import dataclass

import numpy as np
import torch

from cases import experts
from cases.experts import DEVICE
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.operators import torch_quantize
from fusedmlp.recipe import BLOCKS

E4M3 = torch.float8_e4m3fn
UNWRITTEN = 0xA5  # in every byte of copies that a kernel leaves alone
FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    counts: tuple[int, ...] = (130, 0, 70, 1)
    padding: int = 5
    C: int = 160
    dtype: torch.dtype = torch.bfloat16
    row_copy: bool = True
    token_copy: bool = True
    row_ids: torch.dtype | None = None  # of the index by which rows are gathered


def values(num_rows, C, dtype=torch.float32, seed=0):
    """`[num_rows, C]`: rows of any size, with all results of e4m3, ties between them, and what lies below."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, C)
    mantissa = torch.randint(16, 32, shape, generator=generator) / 32.0  # 5 bits: one more than e4m3 has
    sign = 1.0 - 2.0 * torch.randint(0, 2, shape, generator=generator)
    exponent = torch.randint(-20, 1, shape, generator=generator) + torch.arange(num_rows)[:, None] % 25
    return torch.ldexp(sign * mantissa, exponent).to(dtype)


def special(num_rows, C, dtype=torch.float32):
    """`values` with blocks of zeros of both signs, of subnormal, largest and infinite numbers, and with NaN."""
    x = values(num_rows, C)
    x[:, 1::7] *= 2.0**-130
    x[0], x[1], x[2, ::2] = 0.0, -0.0, -0.0
    x[3], x[4, 3], x[5, C - 1] = 1e-45, 3e38, FLOAT_MAX
    x[6, 2], x[7, 2::32], x[8] = torch.inf, -torch.inf, torch.inf
    x[9, 5], x[10], x[11] = torch.nan, torch.nan, -torch.nan
    x[12].view(torch.int32)[:] = -0x7FFFFF  # a signaling NaN with a sign
    x[13], x[13, 4], x[14, ::3], x[14, 1::3] = torch.nan, -torch.inf, torch.nan, FLOAT_MAX
    x[:, 3], x[:, 4], x[:, 5], x[:, 6] = 0.0, torch.nan, 1e-40, -0.0
    return x.to(dtype)


def unwritten(case, num_tiles):
    """`(row copy, token copy)`, on the CPU, of which nothing is written."""

    def filled(shape, dtype):
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), UNWRITTEN, dtype=torch.uint8).view(dtype)

    num_rows, scale = sum(case.counts) + case.padding, quantized.SCALE_DTYPES[case.recipe]
    scales = quantized.scales_shape(num_tiles, case.C, case.recipe)
    elements = [(num_rows, case.C), quantized.token_copy_shape(num_tiles, case.C, case.recipe)]
    return [Quantized(filled(shape, E4M3), filled(scales, scale)) for shape in elements]


def expected(x, case, num_tiles):
    """`(row copy, token copy)` of rows in order, padding rows among them."""
    copies, tile, first = unwritten(case, num_tiles), 0, 0
    for count in case.counts:
        for start in range(first, first + count, 128):
            of_tile = torch.zeros(128, case.C, dtype=x.dtype)
            rows = min(128, first + count - start)
            of_tile[:rows] = x[start : start + rows]
            _place(case, copies, of_tile, start, rows, tile)
            tile += 1
        first += count
    return copies


def _place(case, copies, x, first, rows, tile):
    """Quantize a tile, `[128, C]`, both ways, and put it where it belongs.

    A scale belongs to a line (a row of the row copy, a column of the token copy) and to a block along it.
    """
    block, row_copy, token_copy = BLOCKS[case.recipe], *copies
    is_mxfp8, bits = case.recipe == "mxfp8", torch.uint8 if case.recipe == "mxfp8" else torch.float32
    by_row, by_column = (torch_quantize.quantize(x, case.recipe, of) for of in ((1, block), (block, 1)))
    row_copy.elements[first : first + rows] = by_row.elements[:rows]
    token_copy.elements[tile] = by_column.elements if is_mxfp8 else by_column.elements.T
    for copy, scales in ((row_copy, by_row.scales.view(bits)), (token_copy, by_column.scales.view(bits).T)):
        copy.scales[tile] = 0 if is_mxfp8 else 1.0  # those of zeros
        for line in range(scales.shape[0]):
            for number in range(scales.shape[1]):
                # A chunk is 128 columns: blocks of the row copy, lines of the token copy.
                chunk, i, b = number * block // 128, line, number % (128 // block)
                if copy is token_copy:
                    chunk, i, b = line // 128, line % 128, number
                place = (chunk, i % 32, i // 32, b) if is_mxfp8 else (chunk, i)
                copy.scales[(tile, *place)] = scales[line, number]


def run(x, case):
    """`(row copy, token copy), launch` of rows in order, of which an absent copy is unwritten."""
    owned = sum(case.counts)
    schedule = experts.tiles_of(case.counts, x.shape[0], DEVICE)
    num_tiles, row_ids = schedule.max_tiles(128), None
    copies = [Quantized(*(t.to(DEVICE) for t in copy)) for copy in unwritten(case, num_tiles)]
    x = x.to(DEVICE)
    if case.row_ids:
        x, row_ids = experts.among_others(x, owned, case.row_ids)
    wanted = [copy if on else None for copy, on in zip(copies, (case.row_copy, case.token_copy), strict=True)]
    with recording() as log, np.errstate(invalid="ignore"):  # the interpreter computes with numpy
        grouped_quantize_(*wanted, x, schedule, case.recipe, row_ids_R=row_ids)
    return copies, [launch for launch in log if launch.name == "quantize"]


def check(case, x=None):
    """All bytes of both copies, of rows `x` or of `special` ones."""
    owned = sum(case.counts)
    if x is None:
        x = special(max(owned, 15), case.C, case.dtype)[:owned]
    if case.padding:
        x = torch.cat([x, torch.full((case.padding, case.C), torch.nan, dtype=x.dtype)])
    copies, launches = run(x, case)
    num_tiles = copies[1].elements.shape[0]
    written = zip(
        expected(x, case, num_tiles), unwritten(case, num_tiles), (case.row_copy, case.token_copy), strict=True
    )
    for name, copy, (full, none, on) in zip(("row copy", "token copy"), copies, written, strict=True):
        for what, found, want in zip(copy._fields, copy, full if on else none, strict=True):
            different = found.cpu().view(torch.uint8) != want.view(torch.uint8)
            assert not different.any(), f"{name}, {what}: {int(different.sum())} bytes differ"
    return copies, launches
