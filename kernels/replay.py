"""Operators whose launches are remembered: of a kind of call that came before, nothing is decided again.

What an operator launches depends on the kinds of its arguments, and not on what they hold. The first call of a kind
runs and is recorded: what it allocates, and of every launch where each address comes from. Later ones allocate the
same, fill in their own addresses and launch. What else an operator did would be left out, so that nothing is remembered
of one that calls another PyTorch operator, takes an address from elsewhere, or makes a launch that `launcher.py` cannot
repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from . import launcher, launches
from .recipe import MOST, UNKNOWN, Call, Recipe
from .record import Recorder

_recipes: list[dict[Any, Recipe | None]] = []  # of every operator


def forget() -> None:
    """After a change of what launchers choose from, which no argument shows: the tiles."""
    for recipes in _recipes:
        recipes.clear()


def remembered(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, lists of experts' tensors (`ExpertTensors`) and constants.

    It returns nothing, a tensor that it allocated or a named tuple of such and of None; the results' values, and those
    of what it writes, come from kernels alone.
    """
    recipes: dict[Any, Recipe | None] = {}
    _recipes.append(recipes)

    @wraps(operator)
    def run(*args: Any) -> Any:
        if launcher.recording.by is not None or launches.is_recording() or not launcher.nobody_watches():
            return operator(*args)
        call = Call.of(args)
        if call is None:
            return operator(*args)
        recipe = recipes.get(call.kind, UNKNOWN)
        if recipe is UNKNOWN:
            if len({*map(id, call.tensors)}) < len(call.tensors):  # which is whose would not show
                return operator(*args)
            with Recorder(call) as recorder:
                result = operator(*args)
            if len(recipes) >= MOST:
                recipes.clear()
            recipes[call.kind] = recorder.recipe(result)
            return result
        result = UNKNOWN if recipe is None else recipe.run(call)
        return operator(*args) if result is UNKNOWN else result

    return run
