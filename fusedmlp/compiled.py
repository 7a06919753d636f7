"""The layers inside `torch.compile`: the gradient contract in a graph that is traced before it runs.

The compiler must see every write to `main_grad`, so those tensors are inputs of the graph, and the operators of its
backward mutate them. What only a running program knows is the business of three operators of Python code:

    offsets, keys = enter_forward(offsets, weights, main_grads, ...)    in the graph's forward
    overwrites = enter_backward(dy, main_grads, keys, ...)              in its backward, before the GEMMs
    zero_where_(main_grads, overwrites)

The compiler moves or drops what nothing depends on. So the forward's GEMMs take their offsets from `enter_forward`;
`enter_backward` takes `dy`, and `main_grads` as the calls before left them, as the first to come overwrites them; and
the wgrad GEMM adds to what `zero_where_` wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedmlp import autograd, main_grad
from fusedmlp.autograd import Call
from fusedmlp.validate import Experts

_library = torch.library.Library("fusedmlp", "FRAGMENT")


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedmlp::{name}", fake, lib=_library)
    return getattr(torch.ops.fusedmlp, name).default


def _split(tensors: Sequence[Any], names: str, lengths: Sequence[int]) -> list[tuple[str, Sequence[Any]]]:
    groups, start = [], 0
    for name, length in zip(names.split(","), lengths, strict=True):
        groups.append((name, tensors[start : start + length]))
        start += length
    return groups


def _enter_forward(
    offsets: Tensor,
    weights: list[Tensor],
    main_grads: list[Tensor],
    names: str,
    lengths: list[int],
    first_microbatch: bool,
    grad_enabled: bool,
) -> tuple[Tensor, Tensor]:
    with torch.set_grad_enabled(grad_enabled):  # a compiled forward always runs without
        keys = main_grad.enter_traced_forward(_split(weights, names, lengths), main_grads, first_microbatch)
    return offsets.clone(), torch.tensor(keys, dtype=torch.int64)


def _enter_backward(dy: Tensor, main_grads: list[Tensor], keys: Tensor, names: str, lengths: list[int]) -> Tensor:
    rows = [main_grad.TracedKey(*row) for row in keys.tolist()]
    return torch.tensor(main_grad.enter_traced_backward(_split(rows, names, lengths), dy.device))


def _zero_where_(main_grads: list[Tensor], overwrites: Tensor) -> None:
    for out, overwrite in zip(main_grads, overwrites.tolist(), strict=True):
        if overwrite:
            out.zero_()


# keys [weights, 3] int64 and overwrites [weights] bool are on the CPU.
enter_forward = _register(
    "enter_forward(Tensor offsets, Tensor[] weights, Tensor[] main_grads, str names, int[] lengths, "
    "bool first_microbatch, bool grad_enabled) -> (Tensor, Tensor)",
    _enter_forward,
    lambda offsets, weights, *_: (
        torch.empty_like(offsets),
        torch.empty(len(weights), len(main_grad.TracedKey._fields), dtype=torch.int64, device="cpu"),
    ),
)
enter_backward = _register(
    "enter_backward(Tensor dy, Tensor[] main_grads, Tensor keys, str names, int[] lengths) -> Tensor",
    _enter_backward,
    lambda dy, main_grads, keys, *_: torch.empty(keys.shape[0], dtype=torch.bool, device="cpu"),
)
zero_where_ = _register(
    "zero_where_(Tensor(a!)[] main_grads, Tensor overwrites) -> ()",
    _zero_where_,
    lambda *_: None,
)


@dataclass
class TracedRoute:
    """A `main_grad.Route` inside a graph: never delayed, and adding to `main_grad` wherever that is fused."""

    params: list[Tensor]
    outs: list[Tensor]
    accumulate: bool
    wanted: bool
    delayed = False

    def finish(self) -> list[Tensor | None]:
        """The gradients that backward returns."""
        return [None] * len(self.params) if self.accumulate or not self.wanted else [*self.outs]


@dataclass(frozen=True)
class TracedCall(Call):
    """A `Call` inside a graph; also outside, where without `fullgraph` the graph broke right before the layer."""

    main_grads: dict[str, list[Tensor]] = field(default_factory=dict)  # of the weights that are fused
    keys: Tensor | None = None

    def enter_backward(self, dy: Tensor) -> None:
        """As `Call.enter_backward`; here `enter_backward` decides all."""
        if self.keys is not None:
            outs = [out for group in self.main_grads.values() for out in group]
            overwrites = enter_backward(dy, outs, self.keys, *_names_and_lengths(self.main_grads))
            zero_where_(outs, overwrites)

    def edges(self, ctx: Any) -> list[list[Any]]:
        """As `Call.edges`; what is not None is True."""
        return self.split([need or None for need in ctx.needs_input_grad[1:]])

    def route(self, name: str, weights: list[Tensor], nodes: list[Any], running: Any, undo: ExitStack) -> Any:
        """As `Call.route`, but a `TracedRoute`."""
        wanted, fused = any(node is not None for node in nodes), name in self.main_grads
        outs = self.main_grads[name] if fused else [main_grad.fresh_like(w) for w in weights if wanted]
        return TracedRoute(weights, outs, fused, wanted)


def _names_and_lengths(groups: dict[str, list[Tensor]]) -> tuple[str, list[int]]:
    return ",".join(groups), [len(tensors) for tensors in groups.values()]


class _Linear(autograd.GroupedLinear):
    jvp = torch.autograd.Function.jvp  # the tracer takes no other


class _MLP(autograd.GroupedMLP):
    jvp = torch.autograd.Function.jvp


def run(call: Call, weights: dict[str, Experts], tensors: Sequence[Tensor | None], first_microbatch: bool) -> Tensor:
    """The layer inside a graph; `tensors` as its `autograd.Function` takes them.

    Raises:
        RuntimeError: what cannot be had in a graph: delayed weight gradients, Megatron-FSDP's buffers.
        RuntimeError, ValueError: main_grad missing.
    """
    groups = {name: experts.tensors for name, experts in weights.items()}
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled and call.queue is not None and any(w.requires_grad for group in groups.values() for w in group):
        raise RuntimeError(
            "wgrad_queue (delay_wgrad=True) inside torch.compile: expected none, as a graph cannot put its GEMMs off; "
            "call the layer outside of torch.compile"
        )
    main_grads: dict[str, list[Tensor]] = {}
    for name, group in groups.items():
        outs = main_grad.traced_targets(name, group, call.mode)
        if outs:
            main_grads[name] = outs
    *parameters, (x, offsets, *rest) = call.split(tensors)
    keys = None
    if main_grads:
        fused = [weight for name in main_grads for weight in groups[name]]
        outs = [out for group in main_grads.values() for out in group]
        names_and_lengths = _names_and_lengths(main_grads)
        offsets, keys = enter_forward(offsets, fused, outs, *names_and_lengths, first_microbatch, grad_enabled)
    # fmt: off
    traced = TracedCall(
        call.lengths, call.transposed, call.mode, None, False, call.impl, call.activation, main_grads, keys
    )
    # fmt: on
    flat = [tensor for group in parameters for tensor in group]
    function: type[torch.autograd.Function] = _MLP if call.activation else _Linear
    y: Tensor = function.apply(traced, *flat, x, offsets, *rest)
    return y
