"""The layers inside `torch.compile`: the gradient contract in a graph that is traced before it runs.

The compiler must see every write to `main_grad`, so those tensors are inputs of the graph, and the operators of its
backward mutate them. Three operators of Python code check and decide what is known only when the graph runs:

    offsets, keys = enter_forward(offsets, weights, main_grads, ...)    in the graph's forward
    overwrites = enter_backward(dy, main_grads, keys, ...)              in its backward, before the GEMMs
    zero_where_(main_grads, overwrites)

The compiler may move or drop an operator on which nothing depends, so data dependencies fix the order. The forward's
GEMMs take their offsets from `enter_forward`. `enter_backward` takes `dy`, and `main_grads` as earlier calls left them,
because the first gradient to arrive overwrites. The wgrad GEMM adds to what `zero_where_` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmlp.autograd import layers
from fusedmlp.autograd.call import Call
from fusedmlp.contract import checks, engine
from fusedmlp.contract.destinations.destination import Route
from fusedmlp.contract.destinations.main_grad import MainGrad, no_main_grad
from fusedmlp.contract.forward_checks import enter_forward as check_forward
from fusedmlp.contract.memory import bring_home, lent
from fusedmlp.contract.overwrite import refuse_compiled_writer
from fusedmlp.contract.parameter_state import Leaf, accumulation_lock, state_of
from fusedmlp.contract.route import Mode, beside_grad, refuse_mixed
from fusedmlp.operators.ops import register
from fusedmlp.validate import ExpertWeight

_MAIN_GRAD = MainGrad()


def _split(tensors: Sequence[Any], names: str, lengths: Sequence[int]) -> list[tuple[str, list[Any]]]:
    """Groups of tensors by name: the inverse of `_flat`."""
    rest = iter(tensors)
    return [(name, [*islice(rest, length)]) for name, length in zip(names.split(","), lengths, strict=True)]


class TracedKey(NamedTuple):
    """Integers that a graph carries from forward to backward for one fused parameter."""

    param: int  # its id; 0 if it is frozen
    address: int  # of its main_grad, as the graph knows it


def _enter_forward(
    offsets: Tensor,
    weights: list[Tensor],
    main_grads: list[Tensor],
    names: str,
    lengths: list[int],
    grad_enabled: bool,
) -> tuple[Tensor, Tensor]:
    """Checks of a forward, as outside of graphs; returns a copy of `offsets`, and the keys, `[weights, 2]`."""
    with torch.set_grad_enabled(grad_enabled):  # a compiled forward always runs under no_grad
        groups = _split(weights, names, lengths)
        for (name, group), (_, outs) in zip(groups, _split(main_grads, names, lengths), strict=True):
            check_forward(name, group, "main_grad", delayed=False)
            checks.check_group(name, outs)
        if len({out.data_ptr() for out in main_grads}) < len(main_grads):
            raise RuntimeError(
                f"{names}: expected a main_grad of its own for every parameter of a compiled layer; got one for "
                "several (a parameter that experts share?); call the layer outside of torch.compile"
            )
    params = [id(weight) if weight.requires_grad else 0 for weight in weights]
    keys = [TracedKey(param, out.data_ptr()) for param, out in zip(params, main_grads, strict=True)]
    return offsets.clone(), torch.tensor(keys, dtype=torch.int64)


def _enter_backward(dy: Tensor, main_grads: list[Tensor], keys: Tensor, names: str, lengths: list[int]) -> Tensor:
    """Before a graph's backward adds a layer's gradients: check, set flags and dummies.

    Returns which main_grads to zero first, bool `[weights]`. The graph is one node of the engine and always adds to
    main_grad, so a backward that must not add raises.
    """
    node = engine.current_node()
    nodes = engine.accumulating_nodes(node)
    groups = _split(main_grads, names, lengths)  # in the place of parameters, until those are known
    weights = [Route(name=name, params=outs, uses=[], destination=_MAIN_GRAD, delayed=False) for name, outs in groups]
    places = [(weight, i) for weight in weights for i in range(len(weight.params))]
    for weight in weights:
        weight.leaves = []  # those of the parameters follow
    with accumulation_lock:
        for (weight, i), row in zip(places, keys.tolist(), strict=True):
            key = TracedKey(*row)
            if key.param:
                weight.leaves.append(_checked_leaf(key, nodes.get(key.param), node, weight, i))
        for weight in weights:
            lent_leaves = [*zip(weight.leaves, lent([param for _, param, _ in weight.leaves]), strict=True)]
            for (i, param, state), memory in lent_leaves:
                weight.params[i] = param
                state.compiled_in = engine.current_backward()  # until it is over, as the graph may work on a copy
                if memory is not None and not bring_home(param, state):
                    weight.overwrites.add(id(param))
                    param.grad = memory
            weight.leaves = [leaf for leaf, memory in lent_leaves if memory is None]
            _MAIN_GRAD.decide(weight, [])
            _MAIN_GRAD.written(weight)
    if keys[:, 0].any():
        engine.current_backward().join_stream(dy)
    overwrites = [id(weight.params[i]) in weight.overwrites for weight, i in places]
    return torch.tensor(overwrites, dtype=torch.bool)


def _checked_leaf(key: TracedKey, accumulate: Any, node: Any, weight: Route, i: int) -> Leaf:
    """The parameter of an AccumulateGrad node, whose `main_grad` a graph may add to."""
    place = weight.place(i)
    if engine.engine_use(accumulate, node) is not engine.ACCUMULATE:
        raise RuntimeError(
            f"{checks.label(place)}: a compiled backward adds to main_grad, and this one must not: expected "
            ".backward() that accumulates into the parameter; got torch.autograd.grad, backward(inputs=...), a "
            "torch.func transform, or a parameter frozen since forward (compile with accumulate_wgrad='off' for those)"
        )
    param, state = accumulate.variable, state_of(accumulate.variable)
    checks.refuse_tensor_hooks(param, place)
    main_grad = _MAIN_GRAD.checked(param, place)
    if main_grad.data_ptr() != key.address:
        raise RuntimeError(
            f"{checks.label(place)}: expected the main_grad that the compiled forward saw; got another one since"
        )
    refuse_compiled_writer(state, place)
    return i, param, state


def _zero_where_(main_grads: list[Tensor], overwrites: Tensor) -> None:
    for out, overwrite in zip(main_grads, overwrites.tolist(), strict=True):
        if overwrite:
            out.zero_()


# keys [weights, 2] int64 and overwrites [weights] bool are on the CPU.
enter_forward = register(
    "enter_forward(Tensor offsets, Tensor[] weights, Tensor[] main_grads, str names, int[] lengths, "
    "bool grad_enabled) -> (Tensor, Tensor)",
    lambda offsets, weights, *_: (
        torch.empty_like(offsets),
        torch.empty(len(weights), len(TracedKey._fields), dtype=torch.int64, device="cpu"),
    ),
    _enter_forward,
)
enter_backward = register(
    "enter_backward(Tensor dy, Tensor[] main_grads, Tensor keys, str names, int[] lengths) -> Tensor",
    lambda dy, main_grads, keys, *_: torch.empty(keys.shape[0], dtype=torch.bool, device="cpu"),
    _enter_backward,
)
zero_where_ = register("zero_where_(Tensor(a!)[] main_grads, Tensor overwrites) -> ()", lambda *_: None, _zero_where_)


class Traced(NamedTuple):
    """Targets of the gradients of a traced `Call`; used outside of a graph, too, if it broke right before the layer."""

    main_grads: dict[str, list[Tensor]]  # by weight name, of fused weights only
    keys: Tensor | None

    def enter_backward(self, dy: Tensor) -> None:
        """Run the operator `enter_backward`, and zero each main_grad that is to be overwritten."""
        if self.keys is not None:
            outs, names, lengths = _flat(self.main_grads)
            zero_where_(outs, enter_backward(dy, outs, self.keys, names, lengths))

    def route(self, name: str, weights: list[Tensor], nodes: list[Any]) -> Route:
        """As `Call.route`, but never delayed; a fused weight's GEMM always adds to `main_grad`."""
        wanted, fused = True in nodes, name in self.main_grads
        outs = self.main_grads[name] if fused else [checks.fresh_like(w) for w in weights if wanted]
        uses = [engine.CAPTURE if node else engine.DROP for node in nodes]
        return Route(
            name=name,
            params=weights,
            uses=uses,
            destination=_MAIN_GRAD,
            delayed=False,
            targets=[*outs] if fused else [None] * len(weights),
            outs=outs,
            accumulate=fused,
            returns=wanted and not fused,
        )


def _flat(groups: dict[str, list[Tensor]]) -> tuple[list[Tensor], str, list[int]]:
    """The tensors, names and lengths of groups, as operators take them."""
    return [t for tensors in groups.values() for t in tensors], ",".join(groups), [*map(len, groups.values())]


class _Linear(layers.GroupedLinear):
    jvp = torch.autograd.Function.jvp  # Dynamo traces only the default one


class _MLP(layers.GroupedMLP):
    jvp = torch.autograd.Function.jvp


def _targets(name: str, weights: Sequence[Tensor], mode: Mode) -> list[Tensor]:
    """The `main_grad`s to which the graph adds the gradients of `weights`.

    Empty: the graph returns the gradients, also those that go to `.grad`, to which PyTorch adds them.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    destination = beside_grad(mode, trained)
    if not trained or destination is None:
        return []
    if torch.is_grad_enabled():
        if not destination.may_trace:
            what = destination.title or f"accumulate_wgrad={destination.name!r}"
            raise RuntimeError(
                f"{name}: {what} inside torch.compile: expected a plain main_grad, as the graph "
                "would keep the buffer of one step; call the layer outside of torch.compile"
            )
        if mode == "auto":
            refuse_mixed(name, destination, weights, [weight.requires_grad for weight in weights])
        elif not all(destination.find(trained)):
            raise no_main_grad(name)
    outs = [getattr(w, "main_grad", None) if w.requires_grad else None for w in weights]
    present = [out for out in outs if out is not None]
    if len(present) < len(trained):
        return []
    if not all(weight.is_leaf for weight in trained):  # the graph detaches it, as it returns no gradient for it
        raise RuntimeError(
            f"{name}: accumulate_wgrad={mode!r} needs a leaf parameter; got a result of operations, through which "
            "only a returned gradient flows back: use accumulate_wgrad='off'"
        )
    return [torch.zeros_like(present[0]) if out is None else out for out in outs]


class _NothingSaved:
    """Replaces `ctx` in an exported program, in which operators save their own tensors."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save nothing."""


def run(call: Call, weights: dict[str, ExpertWeight], tensors: Sequence[Tensor | None]) -> Tensor:
    """Run the layer inside a graph; `tensors` as its `autograd.Function` takes them.

    An exported program holds the operators alone, which return plain gradients: see `operators.py`.

    Raises:
        RuntimeError: delayed weight gradients or buffers of one step, which a graph cannot have.
        RuntimeError, ValueError: main_grad is missing.
    """
    groups = {name: experts.tensors for name, experts in weights.items()}
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled and call.queue is not None and any(w.requires_grad for group in groups.values() for w in group):
        raise RuntimeError(
            "wgrad_queue (delay_wgrad=True) inside torch.compile: expected none, as a graph cannot put its GEMMs off; "
            "call the layer outside of torch.compile"
        )
    if torch.compiler.is_exporting():
        program: type[torch.autograd.Function] = layers.GroupedMLP if call.activation else layers.GroupedLinear
        call = replace(call, saves_tokens=False)  # operators are differentiated by x itself
        output: Tensor = program.forward(_NothingSaved(), call, *tensors)
        return output
    targets = {name: _targets(name, group, call.mode) for name, group in groups.items()}
    main_grads = {name: outs for name, outs in targets.items() if outs}
    *parameters, (x, offsets, *rest) = call.split(tensors)
    keys = None
    if main_grads:
        fused = [weight for name in main_grads for weight in groups[name]]
        offsets, keys = enter_forward(offsets, fused, *_flat(main_grads), grad_enabled)
    traced = replace(call, queue=None, traced=Traced(main_grads, keys))
    flat = [tensor for group in parameters for tensor in group]
    function: type[torch.autograd.Function] = _MLP if call.activation else _Linear
    y: Tensor = function.apply(traced, *flat, x, offsets, *rest)
    return y
