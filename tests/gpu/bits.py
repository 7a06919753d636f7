"""Bits of results: those of every run, beside other work on the GPU, and those of a row, alone and among others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from support import invariance
from support.invariance import Layer
from torch import Tensor

PRODUCTS = 24  # enqueued before a run: more milliseconds than the host needs to launch a layer
LARGEST = 4096  # rows and columns


class OtherWork:
    """Products on a stream of their own: blocks of a layer then run in other orders, and beside other blocks."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        if self._stream is not None:
            self._matrix = torch.ones(LARGEST, LARGEST, dtype=torch.bfloat16, device=device)
            self._stream.wait_stream(torch.cuda.current_stream())
        self._sizes = torch.Generator().manual_seed(0)

    def enqueue(self) -> None:
        """Enqueue products of other sizes than before; without a GPU nothing."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            for M, N, K in (1 + torch.randint(LARGEST, (PRODUCTS, 3), generator=self._sizes)).tolist():
                torch.mm(self._matrix[:M, :K], self._matrix[:K, :N])


def of(tensor: Tensor) -> Tensor:
    """A copy of the bytes: as numbers, zeros of both signs would be equal, and NaNs never."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def layers(device: str, impl: str, recipe: str | None, small: bool) -> Iterator[tuple[str, Layer]]:
    """Batch-invariant layers: of rows and of tokens in every dtype, of aligned and of odd sizes, and in 8 bits.

    Two `small` ones differ in all of these; an interpreter takes up to half a minute for each.
    """
    aligned = (64, 32) if small else (256, 128)
    sizes = (aligned, (aligned[0] + 1, aligned[1] + 3))
    functions = ("grouped_mlp", "moe_experts", "grouped_linear")
    kinds = [*itertools.product(functions, (torch.bfloat16, torch.float16, torch.float32), sizes)]
    for function, dtype, (H, F) in kinds[1:12:9] if small else kinds:
        options = {"H": H, "F": F, "dtype": dtype, "bias": H % 2 == 1, "device": device, "impl": impl}
        yield f"{function}, {dtype}, {H}, {F}", Layer(function, **options)
    for function in functions if recipe else ():
        yield (
            f"{function}, {recipe}",
            Layer(function, H=256, F=128, dtype=torch.bfloat16, device=device, impl=impl, recipe=recipe),
        )


def check(layer: Layer) -> str:
    """Compare rows alone with the same among 128 others, and among 512, for which other layers choose other tiles.

    All of these also where x and dy lie at an odd address.
    """
    number, rows = invariance.check(layer), [0, *4 * [*range(1, invariance.ROWS)]]
    crowds = [layer.run(rows, [1, 0, len(rows) - 1], odd=odd) for odd in (False, True)]
    for row in (0, 1, 77, 128):
        alone = layer.run([row], invariance.counts_of(row), odd=row == 1)
        places = [place for place, each in enumerate(rows) if each == row]
        for crowd, place, what in itertools.product(crowds, places, invariance.Results._fields):
            number += 1
            if not torch.equal(of(getattr(alone, what)[0]), of(getattr(crowd, what)[place])):
                raise AssertionError(f"{what} of row {row} differs from that at place {place} among {len(rows)} rows")
    return f": {number} comparisons"
