"""Quantization of weights by itself: a case's copies against PyTorch's definitions, laid out scale by scale."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from cases import experts
from cases.experts import DEVICE
from cases.quantize import E4M3, FLOAT_MAX, UNWRITTEN, values
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.operators import torch_quantize
from fusedmlp.recipe import BLOCKS


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    sizes: tuple[int, int, int] = (3, 256, 384)  # E, N, K
    dtype: torch.dtype = torch.bfloat16
    where: str = "packed"  # of `experts.PLACES`
    layout: str = "out_in"
    by_in: bool = True
    by_out: bool = True


def blocks(sizes, dtype=torch.float32):
    """`[E, N, K]`: `values`, with magnitudes of their own in every block of 128 x 128 and, in it, of 32 x 32."""
    E, N, K = sizes
    e, n, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    within = (3 * (n // 32 % 4) + 5 * (k // 32 % 4)) % 7
    steps = (within + 5 * e + 4 * (n // 128) + 3 * (k // 128)) % 31
    return torch.ldexp(values(E * N, K).view(sizes), steps - 39).to(dtype)


def special(sizes, recipe, dtype=torch.float32):
    """`blocks`, of which most have zeros of both signs, subnormal, largest and infinite numbers, or NaN, each in its
    turn and somewhere else. A block is one of 128 x 128, or for mxfp8 one of 32 x 32.
    """
    w, size = blocks(sizes), BLOCKS[recipe]
    places = product(range(sizes[0]), range(0, sizes[1], size), range(0, sizes[2], size))
    for number, (e, n, k) in enumerate(places):
        block = w[e, n : n + size, k : k + size]
        row, column = 7 * number % block.shape[0], 11 * number % block.shape[1]
        _make_special(block, number % 14, row, column)
    return w.to(dtype)


def _make_special(block, kind, row, column):
    everywhere = {0: 0.0, 1: -0.0, 2: 1e-45, 3: torch.inf, 4: torch.nan, 5: 3e-40}
    somewhere = {6: 3e38, 7: FLOAT_MAX, 8: torch.inf, 9: -torch.inf, 10: torch.nan, 11: 2.0**-127}
    if kind in everywhere:
        block[:] = everywhere[kind]
    elif kind in somewhere:
        block[row, column] = somewhere[kind]
    elif kind == 12:
        block[:] = torch.nan
        block[row, column] = -7.5
    # 13: as it is


def unwritten(case):
    """`(by_in, by_out)`, on the CPU, of which nothing is written."""

    def filled(shape, dtype):
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.full((size,), UNWRITTEN, dtype=torch.uint8).view(dtype).view(shape)

    (E, N, K), scale = case.sizes, quantized.SCALE_DTYPES[case.recipe]
    shapes = ((E, N, K), (E, K, N))
    return [Quantized(filled(s, E4M3), filled(quantized.weight_scales_shape(*s, case.recipe), scale)) for s in shapes]


def expected(w, case):
    """`(by_in, by_out)`, quantized as layers on the CPU do it: fp32 weights are cast to bf16 before."""
    w, copies, block = w.bfloat16() if w.dtype == torch.float32 else w, unwritten(case), BLOCKS[case.recipe]
    is_mxfp8 = case.recipe == "mxfp8"
    for copy, along in zip(copies, ((1, block), (block, 1)), strict=True):
        found = torch_quantize.quantize(w, case.recipe, along if is_mxfp8 else (block, block))
        of_in = copy is copies[0]
        copy.elements[:] = found.elements if of_in else found.elements.mT
        scales = found.scales if of_in else found.scales.mT
        if not is_mxfp8:
            copy.scales[:] = scales
            continue
        copy.scales[:] = 0  # those of zeros
        bits = scales.view(torch.uint8)
        # Scale of line m and block c of 32: chunks of 128 lines and 4 blocks.
        m, c = (torch.arange(size) for size in bits.shape[1:])
        m = m[:, None]
        copy.scales[:, c // 4, m // 128, m % 32, m % 128 // 32, c % 4] = bits
    return copies


def run(w, case):
    """`(by_in, by_out), launches`, of which an absent copy is unwritten."""
    copies = [Quantized(*(t.to(DEVICE) for t in copy)) for copy in unwritten(case)]
    kept = w if case.layout == "out_in" else w.mT.contiguous()
    placed = experts.logical(experts.place(kept, case.where, DEVICE), case.layout)
    wanted = [copy if on else None for copy, on in zip(copies, (case.by_in, case.by_out), strict=True)]
    with recording() as log, np.errstate(invalid="ignore"):  # the interpreter computes with numpy
        grouped_quantize_weights_(*wanted, placed, case.recipe)
    return copies, log


def check(case, w=None):
    """All bytes of both copies, of weights `w` or of `special` ones."""
    w = special(case.sizes, case.recipe, case.dtype) if w is None else w
    copies, launches = run(w, case)
    written = zip(expected(w, case), unwritten(case), (case.by_in, case.by_out), strict=True)
    for name, copy, (full, none, on) in zip(("by_in", "by_out"), copies, written, strict=True):
        for what, found, want in zip(copy._fields, copy, full if on else none, strict=True):
            different = found.cpu().view(torch.uint8) != want.view(torch.uint8)
            assert not different.any(), f"{name}, {what}: {int(different.sum())} bytes differ"
    return copies, launches
