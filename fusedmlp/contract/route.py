"""The list of destinations, and where the gradient of one weight goes in one backward: the table of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.destinations.destination import Destination, Route
from fusedmlp.contract.destinations.grad import Grad
from fusedmlp.contract.destinations.main_grad import MainGrad
from fusedmlp.contract.destinations.megatron_fsdp import MegatronFSDPMainGrad
from fusedmlp.contract.destinations.sharded_grad import ShardedGrad
from fusedmlp.contract.dummy import remove_dummy_wgrad
from fusedmlp.contract.engine import ACCUMULATE, CAPTURE, DROP, EngineUse
from fusedmlp.contract.group import group_of
from fusedmlp.contract.memory import lent
from fusedmlp.contract.owners.refusal import present_owners, refuse_owner

Mode = Literal[
    "auto",
    "main_grad",
    "grad",
    "off",
]


class Returned(Destination):
    """`accumulate_wgrad="off"`: every gradient is returned, but for delayed ones, which a queue adds to `.grad`."""

    name = "off"
    if_delayed = "grad"


# The first that a weight has, and that its mode allows, takes its gradient.
DESTINATIONS: tuple[Destination, ...] = (
    MegatronFSDPMainGrad(),
    MainGrad(),
    ShardedGrad(),
    Grad(),
    Returned(),
)
MODES = ("auto", *dict.fromkeys(destination.name for destination in DESTINATIONS))
_NAMED = {mode: [each for each in DESTINATIONS if mode in (each.name, each.automatic and "auto")] for mode in MODES}


def beside_grad(mode: Mode, params: Sequence[Tensor]) -> Destination | None:
    """The destination in which gradients of a weight go past `.grad`, if any of its parameters has one, or must."""
    if mode != "off" and params and all(memory is not None for memory in lent(params)):
        return None
    named = [destination for destination in _NAMED[mode] if destination.beside_grad]
    having = (destination for destination in named if any(destination.find(params)))
    return next(having, None if mode == "auto" or not named else named[-1])


def choose(
    mode: str, name: str, params: Sequence[Tensor], uses: Sequence[EngineUse], *, in_buffer: bool
) -> Destination:
    """The destination of a weight in the running backward. `in_buffer`: a buffer has all of its parameters.

    Raises:
        ValueError: "auto" finds the destination for some of its parameters only.
    """
    if mode != "off" and (in_buffer or any(memory is not None for memory in lent(params))):
        mode = "grad"
    trains_all = uses.count(ACCUMULATE) == len(uses)
    for destination in _NAMED[mode]:
        having: Sequence[bool | None] = destination.find(params)
        if mode == "auto" and destination.beside_grad and True in having and (False in having or not trains_all):
            having = refuse_mixed(name, destination, params, [use is ACCUMULATE for use in uses])
        if True in having:
            break
    return destination


def refuse_mixed(
    name: str, destination: Destination, params: Sequence[Tensor], trained: Sequence[bool]
) -> list[bool | None]:
    """Raise if only some of the trained parameters have a destination. Returns which do; None: not trained."""
    having = [has if wanted else None for has, wanted in zip(destination.find(params), trained, strict=True)]
    if True in having and False in having:
        lacks, has = having.index(False), having.index(True)
        raise ValueError(
            f"{name}: expected {destination.name} on all experts or on none; experts {lacks} and {has} differ (after "
            "experts have been unfrozen, make the buffer of main_grad again)"
        )
    return having


class Routes(list[Route]):
    """The routes of one backward of a layer; its caller abandons them if anything fails."""

    def __init__(self, *, recorded: bool) -> None:
        self.recorded = recorded  # under create_graph=True


def route(
    name: str,
    weights: Sequence[Tensor],
    nodes: Sequence[Any],
    current_node: Any,
    mode: Mode,
    *,
    delayed: bool,
    local_weights: dict[Any, Tensor],
    routes: Routes,
) -> Route:
    """Decide, inside backward, where the gradient of one weight goes; set flags and dummies.

    `nodes` are the graph nodes to which the gradients of `weights` flow, `current_node` the one that computes them. The
    parameter is taken from its node: checkpointing and saved-tensor hooks hand back weights that have lost their
    attributes. A captured gradient (CAPTURE) is never delayed, nor are the others of the same weight. `local_weights`:
    see `destinations/sharded_grad.py`. The route is added to `routes`. The other arguments are as in
    `autograd.call.Call`.
    """
    known, group = engine.accumulates_into(nodes), None
    if known is not None:  # the usual case
        params, uses, group = known, [ACCUMULATE] * len(known), group_of(known)
    else:
        uses = [engine.engine_use(node, current_node) for node in nodes]
        params = [
            node.variable if use is ACCUMULATE else local_weights.get(node, weight)
            for node, use, weight in zip(nodes, uses, weights, strict=True)
        ]
    captured = CAPTURE in uses
    delayed = delayed and not captured and ACCUMULATE in uses
    recorded = routes.recorded or engine.inside_compiled_autograd()
    destination = choose(mode, name, params, uses, in_buffer=group is not None)
    if instead := destination.if_delayed if delayed else destination.if_recorded if recorded else "":
        destination = choose(instead, name, params, uses, in_buffer=group is not None)
    result = Route(name=name, params=params, uses=uses, destination=destination, delayed=delayed, group=group)
    routes.append(result)
    if (delayed or destination.beside_grad) and (owners := present_owners()):
        for i, param, _ in result.leaves:
            refuse_owner(param, owners, result.place(i), "" if delayed else destination.name)
    if delayed:
        destination.refuse_late(result)
    elif uses.count(DROP) < len(uses):
        result.open()
    destination.written(result)
    if captured:
        for node, use in zip(nodes, uses, strict=True):
            if use is CAPTURE and engine.is_leaf_node(node):
                remove_dummy_wgrad(node.variable)  # the caller may add the captured gradient to .grad
    return result
