"""Layers, loads and GPUs that a report covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bench.limits.gpus import GPU, GPUS
from bench.limits.shapes import LOADS, SHAPES, Shape, even


class Scope(NamedTuple):
    """Layers, functions that give the rows of each expert by the load's name, and GPUs. Default: all that are known."""

    shapes: tuple[Shape, ...] = SHAPES
    loads: Mapping[str, Callable[[Shape], list[int]]] = LOADS
    gpus: tuple[GPU, ...] = GPUS


ALL = Scope()


def of(layer: tuple[int, int, int, int] | None, architecture: str | None) -> Scope:
    """Scope of one's own layer, `(experts, hidden, ffn, rows)`, with even loads, and of the GPUs of an architecture.

    None: all layers and loads; all GPUs.

    Raises:
        ValueError: no GPU of that architecture is known.
    """
    gpus = tuple(gpu for gpu in GPUS if architecture in (None, gpu.architecture))
    if not gpus:
        known = ", ".join(dict.fromkeys(gpu.architecture for gpu in GPUS))
        raise ValueError(f"expected the architecture of a GPU whose ceilings are known ({known}); got {architecture}")
    if layer is None:
        return Scope(gpus=gpus)
    E, H, F, R = layer
    return Scope((Shape("your layer", E, H, F, R, most=R),), {"even": even}, gpus)
