"""Recording what an operator allocates and launches: see `launching/replay.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..operands.descriptors import Descriptor
from ..operands.expert_tensors import ExpertTensors
from . import launcher
from .launcher import Direct
from .recipe import Arguments, Recipe, Step, TensorMaps

_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
}


class Recorder(TorchDispatchMode):
    """Watches an operator, and what it gives to `launcher.launch`; one at a time."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        # Whether another call of the kind may be recorded: one tensor is two arguments here, of which it does not show
        # which a launch takes, or somebody watches.
        self.passing = False
        self._failed = False
        self._arguments = arguments
        self._known: dict[int, tuple[int, int]] = {}  # tensors by id: which address, bytes past it
        self._keep: list[Tensor] = []  # so that no other tensor gets one of those ids
        self._allocated: list[Tensor] = []
        self._steps: list[Step] = []
        for source, tensor in enumerate(arguments.tensors):
            if isinstance(tensor, ExpertTensors):
                for own in (tensor.base, tensor.lowest):
                    self._know(own, source, own.data_ptr() - tensor.base.data_ptr())
            else:
                self._know(tensor, source, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch imports its compiler when first recording, about a second; nothing here is compiled."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs that another thread compiles meanwhile are none of its business."""
        return True

    def __enter__(self) -> Any:
        super().__enter__()
        launcher.this_thread.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        launcher.this_thread.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            self._know(result, len(self._arguments.tensors) + len(self._allocated), 0)
            self._allocated.append(result)
            self._failed |= not result.is_contiguous() or result.device != self._arguments.device
        elif func.is_view and isinstance(result, Tensor):
            source = args[0]
            if id(source) in self._known and bool(result.data_ptr()) == bool(source.data_ptr()):
                known, offset = self._known[id(source)]
                self._know(result, known, offset + result.data_ptr() - source.data_ptr())
        else:
            self._failed = True
        return result

    def _know(self, tensor: Tensor, source: int, offset: int) -> None:
        if self._known.setdefault(id(tensor), (source, offset)) != (source, offset):
            self.passing = True
        self._keep.append(tensor)

    def add(
        self, kernel: Any, direct: Direct | None, grid: Sequence[int], pointers: Sequence[Any], numbers: Any
    ) -> None:
        """A launch, as `launcher.launch` takes it; without `direct` it cannot be repeated."""
        if direct is None or self._failed or self.passing:
            self._failed = True
            return
        values: list[Any] = []
        addresses, maps = [], []
        encodings = iter(direct.tensor_maps)
        for value in pointers:
            described = type(value) is Descriptor
            tensor = value.tensor if described else value
            origin = None if tensor is None else self._known.get(id(tensor))
            if tensor is not None and origin is None:
                self._failed = True
                return
            if described:
                source, offset = origin  # type: ignore[misc]
                offset += value.address - tensor.data_ptr()
                tensor_maps = TensorMaps(value._replace(tensor=None), next(encodings), {})
                maps.append((len(values), source, offset, tensor_maps))
                values += (None, *value.shape, *value.strides)
            else:
                if origin is not None:
                    addresses.append((len(values), *origin))
                values.append(None)
        values += numbers
        self._steps.append(Step(kernel, direct, grid, values, addresses, maps))

    def recipe(self, result: Any) -> Recipe | None:
        """None if there was something that it would leave out."""
        results = result if isinstance(result, tuple) else (result,)
        places = [None if r is None else self._place(r) for r in results]
        if self._failed or -1 in places:
            return None
        kind: Any = type(result)
        made = kind._make(places) if isinstance(result, tuple) else places[0]
        return Recipe([(t.shape, t.dtype) for t in self._allocated], self._steps, made)

    def _place(self, result: Tensor) -> int:
        """Which of the allocated tensors it is; -1: none, or a view of a part."""
        source, offset = self._known.get(id(result), (-1, 0))
        place = source - len(self._arguments.tensors)
        if place < 0:
            return -1
        own = self._allocated[place]
        same = (result.shape, result.stride(), result.dtype) == (own.shape, own.stride(), own.dtype)
        return place if offset == 0 and same else -1
