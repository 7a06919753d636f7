"""Checks the arguments of the modules' constructors: what forward would refuse fails where it is written."""

from __future__ import annotations

from operator import index

import torch

from fusedmlp import validate
from fusedmlp.activation import Activation
from fusedmlp.contract.checks import check_flag
from fusedmlp.contract.route import MODES, Mode
from fusedmlp.recipe import DTYPES, check_blocks


def sizes(**given: int) -> tuple[int, ...]:
    """Check sizes by name; return them as int. NumPy integers are integers, booleans are not."""
    return tuple(_size(name, value) for name, value in given.items())


def _size(name: str, value: object) -> int:
    error: type[Exception] = TypeError
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        size, error = index(value), ValueError
        if size > 0:
            return size
    raise error(f"{name}: expected an integer of at least 1; got {validate.kind(value)}")


def options(
    accumulate_wgrad: Mode, impl: str, recipe: str | None, wgrad: str, dtype: torch.dtype | None, **flags: bool
) -> None:
    """Check the options that both modules have; `flags` are booleans by name."""
    validate.one_of("accumulate_wgrad", accumulate_wgrad, MODES)
    validate.one_of("impl", impl, validate.IMPLS)
    validate.recipe(recipe, wgrad)
    for name, flag in flags.items():
        check_flag(name, flag)
    allowed = validate.FLOAT_DTYPES if recipe is None else (DTYPES[recipe], torch.float32)
    if (dtype or torch.get_default_dtype()) not in allowed:
        reason = "" if recipe is None else f" for recipe={recipe!r}"
        got = f"PyTorch's default, {torch.get_default_dtype()}" if dtype is None else f"{dtype!r}"
        raise TypeError(f"dtype: expected {validate.names(allowed)}{reason}; got {got}")


def activation(given: str | Activation) -> Activation:
    """An activation from its name or itself."""
    if isinstance(given, str):
        return Activation(given)
    if not isinstance(given, Activation):
        raise TypeError(f"activation: expected a name or a fusedmlp.Activation; got {given!r}")
    return given


def blocks(recipe: str | None, **shapes: tuple[int, int]) -> None:
    """Check that blocks of an 8-bit recipe fit weights, `(out, in)` by name."""
    for name, (out_features, in_features) in shapes.items():
        if recipe is not None:
            check_blocks(recipe, name, out_features, in_features)


def shown(module: torch.nn.Module, *names: str) -> str:
    """Options of a module, for `print(module)`."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)
