"""Launches as values: what an operator allocates and launches, planned from kinds of tensors.

A plan is a function of a `Builder`, of arrays (`operands/arrays.py`) and of constants. It touches no tensor, no device
and no global that changes, so equal kinds on equal targets give equal programs. Therefore programs can be remembered
and compiled for a GPU that is not there, and say how each launch moves its tiles and what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch

from ..operands.arrays import Array, contiguous_strides
from ..operands.descriptors import Descriptor
from ..tiles.select import Chosen, Target
from ..tiles.table import Path, Recipe
from .cost import Cost


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Array | Descriptor | int | Any]  # by the kernel's names, constants among them
    options: Mapping[str, int]  # num_warps, num_stages
    chosen: Chosen | None = None  # None: no table has its tile
    cost: Cost | Callable[[Sequence[int]], Cost] | None = None

    def cost_of(self, rows: Sequence[int]) -> Cost | None:
        """Cost for a load, rows of each expert over all segments; only the device knows the load of a launch."""
        return self.cost(rows) if callable(self.cost) else self.cost

    @property
    def name(self) -> str:
        """The kernel's name, without the leading `_` and the suffix `_kernel`; one for 8 bits has its recipe's name."""
        name: str = self.kernel.fn.__name__.removeprefix("_").removesuffix("_kernel")
        recipe = self.chosen.key.format if self.chosen and self.chosen.key.format in get_args(Recipe) else ""
        return name.replace("warp_specialized", recipe) if recipe else name

    @property
    def path(self) -> Path:
        """How tiles are moved."""
        return self.chosen.path if self.chosen else "pointer"

    @property
    def sizes(self) -> str:
        """Tile sizes and options, as text."""
        tile: Any = self.arguments.get("TILE")
        blocks = [*tile[:3]] if tile else [n for name, n in self.arguments.items() if name.startswith("BLOCK")]
        values = {**({"SUBTILES": tile.SUBTILES} if tile else {}), **self.options}
        letters = {"s": "SUBTILES", "w": "num_warps", "p": "num_stages"}
        options = [f"{letter}{values[k]}" for letter, k in letters.items() if k in values]
        return " ".join(filter(None, ("x".join(map(str, blocks)), *options)))


class Allocation(NamedTuple):
    """A contiguous tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    late: bool = False  # made right before its first use, not before all launches
    copied: Array | None = None  # an argument whose values it gets; None: uninitialised


class Addresses(NamedTuple):
    """An int64 tensor on the device whose elements the host knows: addresses of arrays, and other numbers."""

    elements: tuple[Array | int, ...]


class Program(NamedTuple):
    """Allocations, launches and results of an operator. Its sources are the arguments, then the allocations."""

    num_arguments: int
    allocations: tuple[Allocation | Addresses, ...]
    launches: tuple[Launch, ...]
    results: Any  # numbers of allocations: None, one number, or a named tuple of numbers and None

    def lifetimes(self) -> list[Lifetimes]:
        """The tensors to free and then to allocate before each launch, and after the last.

        All but the `late` ones are allocated before the first launch: if memory runs out there, nothing has been
        written. Those that no launch uses and that are no results are not allocated. Memory that is freed may be
        allocated again at once, as kernels run in the order of launches.
        """
        last = len(self.launches)
        results = {self.results} if type(self.results) is int else {*(self.results or ())} - {None}
        used: dict[int, list[int]] = {self.num_arguments + number: [last] for number in sorted(results)}

        def use(value: Any, launch: int) -> None:
            array = value.array if isinstance(value, Descriptor) else value
            if not isinstance(array, Array) or array.source < self.num_arguments:
                return
            allocation = self.allocations[array.source - self.num_arguments]
            for element in allocation.elements if isinstance(allocation, Addresses) else ():
                use(element, launch)
            used.setdefault(array.source, []).append(launch)

        for i, launch in enumerate(self.launches):
            for value in launch.arguments.values():
                use(value, i)
        steps = [Lifetimes([], []) for _ in range(last + 1)]
        for source, at in used.items():
            allocation = self.allocations[source - self.num_arguments]
            late = isinstance(allocation, Allocation) and allocation.late
            steps[min(at) if late else 0].made.append((source, allocation))
            if max(at) < last:
                steps[max(at) + 1].freed.append(source)
        return steps


class Lifetimes(NamedTuple):
    """Sources of a program that are freed, and others that are then allocated."""

    freed: list[int]
    made: list[tuple[int, Allocation | Addresses]]


class Builder:
    """A program while it is planned. Its sources are `num_arguments` arguments, then its allocations."""

    def __init__(self, target: Target, num_arguments: int) -> None:
        self.target = target
        self._num_arguments = num_arguments
        self._allocations: list[Allocation | Addresses] = []
        self._launches: list[Launch] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, late: bool = False) -> Array:
        """A new contiguous tensor; `late`: it may lie where tensors did that no later launch uses."""
        return self._new(Allocation(tuple(shape), contiguous_strides(shape), dtype, late), shape, dtype)

    def as_new(self, array: Array) -> Array:
        """Return an argument if it lies as a new tensor would; otherwise plan a contiguous, aligned copy of it."""
        strides = contiguous_strides(array.shape)
        if array.aligned and array.strides == strides:
            return array
        return self._new(Allocation(array.shape, strides, array.dtype, copied=array), array.shape, array.dtype)

    def addresses(self, elements: Sequence[Array | int]) -> Array:
        """A table of addresses and numbers."""
        return self._new(Addresses(tuple(elements)), (len(elements),), torch.int64)

    def _new(self, allocation: Allocation | Addresses, shape: Sequence[int], dtype: torch.dtype) -> Array:
        source = self._num_arguments + len(self._allocations)
        self._allocations.append(allocation)
        return Array(tuple(shape), contiguous_strides(shape), dtype, 0, source)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        chosen: Chosen | None = None,
        cost: Cost | Callable[[Sequence[int]], Cost] | None = None,
        **options: int,
    ) -> None:
        """As `kernel[grid](**arguments, **options)`. A chosen tile gives the options and the constant `TILE`, and a
        warp-specialized kernel also gets the number of consumers that share a tile.
        """
        if chosen:
            tile, arguments = chosen.tile, {**arguments, "TILE": chosen.tile}
            options = {"num_warps": tile.num_warps}
            if chosen.path == "warp_specialized":
                arguments["CONSUMERS"] = self.target.consumers
            else:
                options["num_stages"] = tile.num_stages
        self._launches.append(Launch(kernel, grid, arguments, options, chosen, cost))

    def program(self, results: Any) -> Program:
        """The planned program. `results`: None, an array from `empty`, or a named tuple of such arrays and None."""

        def number(array: Array | None) -> int | None:
            if array is None:
                return None
            index = array.source - self._num_arguments
            allocation = self._allocations[index] if index >= 0 else None
            if array.offset or not isinstance(allocation, Allocation) or allocation.shape != array.shape:
                raise ValueError(f"result: expected a whole tensor of `empty`; got {array}")
            return index

        named = hasattr(results, "_make")
        numbers = results._make(map(number, results)) if named else number(results)
        return Program(self._num_arguments, tuple(self._allocations), tuple(self._launches), numbers)
