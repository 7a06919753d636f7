"""Operators whose launches are remembered: of a kind of call that came before, nothing is decided again.

What an operator launches depends on the kinds of its arguments, and not on what they hold. The third call of a kind
runs and is recorded: what it allocates, and of every launch where each address comes from. Later ones allocate the
same, fill in their own addresses and launch. What else an operator did would be left out, so that nothing is remembered
of one that calls another PyTorch operator, takes an address from elsewhere, or makes a launch that
`launching/launcher.py` cannot repeat. (Not the first or second call: loads whose number of rows changes at every step,
and their recomputation by activation checkpointing, would be recorded in vain.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from . import launcher, launches
from .recipe import Arguments, Recipe
from .record import Recorder

_MOST = 256  # kinds of calls of one operator that are kept
_BEFORE = 2  # calls of a kind that are not recorded
_MISSING: Any = object()
_recipes: list[dict[Any, Recipe | None]] = []  # of every operator, by kind; None: not to be had
_seen: list[dict[Any, int]] = []  # how often kinds came that are not recorded
# Held by the one thread that records: PyTorch keeps in global variables whether a mode like the recorder's is active.
_recording = threading.RLock()


def forget() -> None:
    """After a change of what launchers choose from, which no argument shows: the tiles."""
    with _recording:
        for recipes in _recipes:
            recipes.clear()
        for seen in _seen:
            seen.clear()


def remembered(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, lists of experts' tensors (`ExpertTensors`) and constants, on the current device.

    It returns nothing, a tensor that it allocated or a named tuple of such and of None; the results' values, and those
    of what it writes, come from kernels alone.
    """
    recipes: dict[Any, Recipe | None] = {}
    seen: dict[Any, int] = {}
    _recipes.append(recipes)
    _seen.append(seen)

    @wraps(operator)
    def run(*args: Any) -> Any:
        if launcher.this_thread.recorder is not None or launches.is_recording() or not launcher.may_be_direct():
            return operator(*args)
        arguments = Arguments.of(args)
        if arguments is None:
            return operator(*args)
        recipe = recipes.get(arguments.kind, _MISSING)
        if recipe is _MISSING:
            times = seen.pop(arguments.kind, 0)
            if times == _BEFORE:
                seen[arguments.kind] = times
                return _record(operator, args, arguments, recipes)
            _forget_oldest(seen)
            seen[arguments.kind] = times + 1
        elif recipe is not None and (made := recipe.allocate(arguments)) is not None:
            return recipe.launch(arguments, made)
        return operator(*args)

    return run


def _forget_oldest(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST:
        kept.pop(next(iter(kept)), None)


def _record(
    operator: Callable[..., Any], args: tuple[Any, ...], arguments: Arguments, recipes: dict[Any, Recipe | None]
) -> Any:
    # While a graph is captured, tables of addresses are new ones each time: see `expert_tensors.address_table`.
    captured = arguments.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured or not _recording.acquire(blocking=False):
        return operator(*args)
    try:
        with Recorder(arguments) as recorder:
            result = operator(*args)
        if not recorder.passing:
            _forget_oldest(recipes)
            recipes[arguments.kind] = recorder.recipe(result)
        return result
    finally:
        _recording.release()
