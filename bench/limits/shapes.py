"""The layers that every report covers, and how their rows fall on the experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A gated layer as one GPU has it; letters as in `fusedmlp.functional`."""

    name: str
    E: int
    H: int
    F: int
    R: int  # routed rows
    most: int  # rows that one expert can get: each token once


def _model(name: str, E: int, H: int, F: int, top_k: int, tokens: int) -> Shape:
    return Shape(name, E, H, F, top_k * tokens, tokens)


SHAPES = (
    _model("qwen3-30b-8k", 128, 2048, 768, 8, 8192),
    _model("qwen3-30b-32k", 128, 2048, 768, 8, 32768),
    _model("sonic-a", 128, 1536, 256, 8, 24576),
    _model("sonic-b", 256, 4096, 256, 16, 32768),
    _model("sonic-c", 64, 4096, 1024, 4, 32768),
    _model("sonic-d", 64, 4096, 2048, 4, 32768),
    _model("mixtral", 8, 4096, 14336, 2, 8192),
    Shape("deepseek-ep", 8, 7168, 2048, 32768, 32768),  # rows from all ranks, for the experts of one
    _model("gpt-oss-20b", 32, 2880, 2880, 4, 8192),
    _model("qwen3.5", 512, 4096, 1024, 10, 8192),
)


def even(shape: Shape) -> list[int]:
    """The same number of rows for every expert, to within one."""
    return [shape.R // shape.E + (e < shape.R % shape.E) for e in range(shape.E)]


def zipf(shape: Shape) -> list[int]:
    """Rows in proportion to 1/1, 1/2, 1/3, ... for experts in a fixed random order, none above `shape.most`."""
    experts = list(range(shape.E))
    random.Random(0).shuffle(experts)
    rows = [0] * shape.E
    left = shape.R
    for rank, e in enumerate(experts):
        share = left / rank_weight(rank, shape.E)
        rows[e] = min(round(share), shape.most, left)
        left -= rows[e]
    return rows


def rank_weight(rank: int, experts: int) -> float:
    """Rows of the ranks from `rank` (counted from 0) on, in units of the rows of that rank."""
    return sum((rank + 1) / (r + 1) for r in range(rank, experts))


def quarter_empty(shape: Shape) -> list[int]:
    """Every fourth expert gets none, the others the same."""
    used = [e for e in range(shape.E) if e % 4 != 3]
    rows = [0] * shape.E
    for i, e in enumerate(used):
        rows[e] = shape.R // len(used) + (i < shape.R % len(used))
    return rows


LOADS: dict[str, Callable[[Shape], list[int]]] = {"even": even, "zipf": zipf, "quarter empty": quarter_empty}
