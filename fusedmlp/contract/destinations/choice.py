"""The list of destinations, and the choice of one for a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

from torch import Tensor

from fusedmlp.contract.destinations.destination import Destination
from fusedmlp.contract.destinations.grad import Grad
from fusedmlp.contract.destinations.main_grad import MainGrad
from fusedmlp.contract.destinations.megatron_fsdp import MegatronFSDPMainGrad
from fusedmlp.contract.destinations.returned import Returned
from fusedmlp.contract.destinations.sharded_grad import ShardedGrad
from fusedmlp.contract.engine import ACCUMULATE, EngineUse
from fusedmlp.contract.memory import lent

Mode = Literal[
    "auto",
    "main_grad",
    "grad",
    "off",
]
# The first that a weight has, and that its mode allows, takes its gradient.
DESTINATIONS: tuple[Destination, ...] = (
    MegatronFSDPMainGrad(),
    MainGrad(),
    ShardedGrad(),
    Grad(),
    Returned(),
)
MODES = ("auto", *dict.fromkeys(destination.name for destination in DESTINATIONS))


def beside_grad(mode: Mode, params: Sequence[Tensor]) -> Destination | None:
    """The destination in which gradients of a weight go past `.grad`, if any of its parameters has one, or must."""
    found = None
    if mode != "off" and params and all(memory is not None for memory in lent(params)):
        return None
    for each in DESTINATIONS:
        if each.beside_grad and (mode == each.name or (mode == "auto" and each.automatic)):
            if any(each.find(params)):
                return each
            found = each if mode == each.name else None
    return found


@cache
def _named(mode: str) -> list[Destination]:
    return [each for each in DESTINATIONS if each.name == mode or (mode == "auto" and each.automatic)]


def choose(
    mode: str, name: str, params: Sequence[Tensor], uses: Sequence[EngineUse], delayed: bool, recorded: bool
) -> Destination:
    """The destination of a weight in the running backward. `recorded`: under `create_graph=True`, or compiled autograd.

    Raises:
        ValueError: "auto" finds the destination for some of its parameters only.
    """
    if mode != "off" and any(memory is not None for memory in lent(params)):
        mode = "grad"
    trains_all = uses.count(ACCUMULATE) == len(uses)
    for each in _named(mode):
        found: Sequence[bool | None] = each.find(params)
        if mode == "auto" and each.beside_grad and True in found and (False in found or not trains_all):
            found = refuse_mixed(name, each, params, [use is ACCUMULATE for use in uses])
        if True in found:
            break
    instead = each.if_delayed if delayed else each.if_recorded if recorded else ""
    return choose(instead, name, params, uses, delayed, recorded) if instead else each


def refuse_mixed(name: str, of: Destination, params: Sequence[Tensor], trained: Sequence[bool]) -> list[bool | None]:
    """Raise if only some of the trained parameters have a destination. Returns which do; None: not trained."""
    having = [found if wanted else None for found, wanted in zip(of.find(params), trained, strict=True)]
    if True in having and False in having:
        lacks, has = having.index(False), having.index(True)
        raise ValueError(
            f"{name}: expected {of.name} on all experts or on none; experts {lacks} and {has} differ (after "
            "experts have been unfrozen, make the buffer of main_grad again)"
        )
    return having
