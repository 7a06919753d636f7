"""The gradient contract: where a weight gradient goes, and what backward returns for it.

| case                                               | returned | flag | GEMM                                |
|----------------------------------------------------|----------|------|-------------------------------------|
| plain                                              | wgrad    | -    | overwrite                           |
| delayed                                            | None     | -    | later; adds to or sets `.grad`      |
| `main_grad`, no `grad_added_to_main_grad`          | None     | -    | accumulate                          |
| `main_grad`, has `grad_added_to_main_grad`         | dummy    | True | accumulate                          |
| delayed + `main_grad`, no attribute                | None     | -    | accumulate, later                   |
| delayed + `main_grad`, has the attribute           | dummy    | True | accumulate, later (flag right away) |
| `overwrite_main_grad` or `is_first_microbatch=True`| as above | same | overwrite `main_grad`               |

`accumulate_wgrad="grad"` adds to an existing `.grad` and returns None; without one it is the plain case. The
presence of `grad_added_to_main_grad` decides, not its value (Megatron-core's convention).

The dummy is a zero gradient in `.grad`, for owners whose hooks want one: an expanded scalar, put there during
backward (which then returns None). It costs neither memory nor a kernel, but refuses in-place writes;
`FUSEDMLP_DENSE_DUMMY=1` makes it dense. Where plain PyTorch uses the same parameter in the same backward, its
gradient goes to `main_grad` too, as an owner may drop `.grad`; with Megatron's `zero_out_wgrad`, whose owner adds
`.grad` itself, it stays there.

A gradient is fused (written to `main_grad` or `.grad`) only if the autograd engine will run the parameter's
AccumulateGrad node. Otherwise (`autograd.grad`, `backward(inputs=...)`) somebody asked for the gradient
itself, and gets it.

Whatever else backward changes (flags, dummies, the queue, which gradient overwrites) it changes before the GEMM, and
takes back if the layer's backward fails. What the GEMM wrote by then stays: docs/errors_in_backward.md.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from fusedmlp import environment
from fusedmlp.plain_tensor import is_plain
from fusedmlp.sharded_params import gathered_by_fsdp2

Mode = Literal["auto", "main_grad", "grad", "off"]
_AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
MODES = ("auto", "main_grad", "grad", "off")


# Held while a layer's gradients are computed and added: two threads that run backward on the CPU could otherwise add
# to one main_grad at once, and one of the sums would be lost.
one_thread = threading.RLock()


class EngineUse(Enum):
    """What the engine does, in the running backward, with a gradient for one weight."""

    ACCUMULATE = "runs the leaf's AccumulateGrad"
    CAPTURE = "hands it to somebody: autograd.grad, a non-leaf weight, distributed autograd"
    DROP = "nothing: no gradient is wanted"


def engine_use(node: Any, running: Any) -> EngineUse:
    """Read the engine's plan for the graph node that a weight's gradient flows to (None: needs no grad).

    Distributed autograd captures every leaf's gradient and knows no plan; another engine runs the `running` node for
    the sake of at least one that follows it.
    """
    if node is None:
        return EngineUse.DROP
    executed = _will_execute(node)
    if executed is False and any(n is not None and _will_execute(n) is not False for n, _ in running.next_functions):
        return EngineUse.DROP
    return EngineUse.ACCUMULATE if executed and isinstance(node, _AccumulateGrad) else EngineUse.CAPTURE


def _will_execute(node: Any) -> bool | None:
    """Whether the engine plans to run a node; None for a leaf whose gradient is captured instead of accumulated.

    `torch._C._will_engine_execute_node` is private; `torch.autograd.graph` relies on it too.
    """
    try:
        planned: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return planned


@dataclass(eq=False)
class Route:
    """Where the wgrad GEMM of one weight (packed: one tensor; else one per expert) writes in one backward.

    Run the GEMM into `outs`, adding to them if `accumulate`, and return `finish()` from backward. If `delayed`, queue
    the route; the queue then calls `open()`, runs the GEMM and calls `finish_delayed()`.
    """

    name: str
    params: list[Tensor]
    uses: list[EngineUse]
    mode: Mode  # resolved: never "auto"
    delayed: bool
    overwrites: list[bool]  # per parameter: replace what main_grad holds
    outs: list[Tensor] = field(default_factory=list)
    accumulate: bool = False
    _fused: list[bool] = field(default_factory=list)
    _owners: list[int] = field(default_factory=list)  # per parameter: the first expert that has the same one
    _order: int = field(default_factory=itertools.count().__next__)

    @property
    def wanted(self) -> bool:
        """Whether any gradient of this weight is wanted at all."""
        return any(use is not EngineUse.DROP for use in self.uses)

    def target(self, i: int) -> Tensor | None:
        """The existing tensor that parameter `i`'s gradient is added into, checked; None: a fresh one."""
        if self.mode == "off" or self.uses[i] is not EngineUse.ACCUMULATE:
            return None
        return _existing_target(self.params[i], self.mode, self.label(i))

    def label(self, i: int) -> str:
        """Parameter `i` as error messages name it."""
        return self.name if len(self.params) == 1 else f"{self.name}[{i}]"

    def open(self, latest: Route | None = None) -> None:
        """Choose the outputs: `main_grad`, an existing `.grad`, or fresh tensors, for every parameter.

        `latest` is the last of those whose gradients the GEMM adds together with this one's.
        """
        order = (latest or self)._order
        targets = [self.target(i) for i in range(len(self.params))]
        self._fused = [target is not None for target in targets]
        self._owners = self._find_owners()
        accumulated = (p for p, use in zip(self.params, self.uses, strict=True) if use is EngineUse.ACCUMULATE)
        dtypes = {t.dtype for t in targets if t is not None} or {grad_dtype(next(accumulated, self.params[0]))}
        dtype = _one_dtype(self.name, dtypes)
        self.accumulate = any(
            fused and not overwrite for fused, overwrite in zip(self._fused, self.overwrites, strict=True)
        )
        outs: list[Tensor] = []
        existing = next((target for target in targets if target is not None), None)
        for i, (param, target) in enumerate(zip(self.params, targets, strict=True)):
            if self._fused[i] and self.mode == "main_grad":
                _refuse_pending_overwrite(param, order, self.label(i), own=self._order)
            if target is None or self._owners[i] != i:
                if existing is None:
                    target = _fresh(param, dtype)
                else:  # all outputs need the same strides, gaps included
                    target = torch.empty_strided(param.shape, existing.stride(), dtype=dtype, device=param.device)
                if self.accumulate:
                    target.zero_()
            elif self.overwrites[i] and self.accumulate:
                target.zero_()
            outs.append(target)
        if any(self._fused) and outs[0].is_cuda and inside_backward():
            _outermost_backward().streams.add(torch.cuda.current_stream(outs[0].device))
        _check_strides(self.name, outs)
        self.outs = outs

    def _find_owners(self) -> list[int]:
        """Experts may share a parameter: later ones get their own output, which is added to the first one's."""
        first: dict[int, int] = {}
        # What is returned for one parameter several times, autograd adds up.
        added_here = [fused or self.delayed for fused in self._fused]
        return [
            first.setdefault(id(param), i) if here else i
            for i, (param, here) in enumerate(zip(self.params, added_here, strict=True))
        ]

    def _close(self) -> list[Tensor]:
        """Forget the outputs, after adding up those of experts that share a parameter."""
        outs, self.outs = self.outs, []
        for i, owner in enumerate(self._owners):
            if owner != i:
                outs[owner].add_(outs[i])
        return outs

    def finish(self) -> list[Tensor | None]:
        """After the GEMM: the gradients that backward returns."""
        return [
            None if fused or use is EngineUse.DROP else out
            for use, fused, out in zip(self.uses, self._fused, self._close(), strict=True)
        ]

    def finish_delayed(self) -> None:
        """Of a delayed wgrad, after the GEMM: `.grad` is set where there was none to add to."""
        for i, out in enumerate(self._close()):
            if not self._fused[i] and self._owners[i] == i and self.uses[i] is EngineUse.ACCUMULATE:
                self.params[i].grad = out
        self.overwrite_no_more()

    def overwrite_no_more(self) -> None:
        """Of a delayed wgrad that has been computed, or never will be: it is no danger to what comes before it."""
        for param, overwrite in zip(self.params, self.overwrites, strict=True):
            if overwrite:
                _pending_overwrites.get(param, {}).pop(self._order, None)


def route(
    name: str,
    weights: Sequence[Tensor],
    nodes: Sequence[Any],
    running: Any,
    mode: Mode,
    *,
    first_recomputed: bool,
    delayed: bool,
    undo: ExitStack,
) -> Route:
    """Decide, inside backward, where the gradient of one weight goes; set flags and dummies.

    `nodes` are the graph nodes that the gradients of `weights` flow to, `running` the one that makes them. The
    parameter is taken from its node: checkpointing and saved-tensor hooks hand back weights that have lost their
    attributes. A gradient that somebody asked for (CAPTURE) is never delayed, nor are those of the same list. `undo` is
    to be closed if the layer's backward fails, and gets what then takes back all that was done here.
    `first_recomputed`: see `autograd.Call`.
    """
    uses = [engine_use(node, running) for node in nodes]
    params = [
        node.variable if use is EngineUse.ACCUMULATE else weight
        for node, use, weight in zip(nodes, uses, weights, strict=True)
    ]
    leaves = {i: params[i] for i, use in enumerate(uses) if use is EngineUse.ACCUMULATE}
    if mode == "auto":
        mode = _resolve_auto(name, leaves)
    delayed = delayed and bool(leaves) and EngineUse.CAPTURE not in uses
    if delayed and mode == "off":
        mode = "grad"  # when the queue runs, it adds to .grad itself or sets it
    overwrites = [
        mode == "main_grad" and use is EngineUse.ACCUMULATE and _overwrites(param, first_recomputed, name, undo)
        for param, use in zip(params, uses, strict=True)
    ]
    result = Route(name, params, uses, mode, delayed, overwrites)
    if delayed:
        for i, param in enumerate(params):
            if uses[i] is EngineUse.ACCUMULATE:
                _refuse_tensor_hooks(param, result.label(i))
                result.target(i)  # raises now rather than when the queue runs
    elif result.wanted:
        result.open()
    undo.callback(result.overwrite_no_more)
    for param, node, use, overwrite in zip(params, nodes, uses, overwrites, strict=True):
        if mode == "main_grad" and use is EngineUse.ACCUMULATE:
            _mark_fused(param, node, undo)
        if delayed and overwrite:
            _pending_overwrites.setdefault(param, {})[result._order] = weakref.ref(result)
    return result


def _release_interrupted() -> None:
    """Let go of `one_thread`, outside of all that holds it: an interrupt can come right where `with` ends."""
    with suppress(RuntimeError):  # which says that it is not held, as it should be
        while True:
            one_thread.release()


def inside_backward() -> bool:
    """Whether this thread is running a backward; a forward is a checkpoint's second one then."""
    return torch._C._current_graph_task_id() != -1


def enter_forward(name: str, weights: Sequence[Tensor], mode: Mode, *, delayed: bool) -> None:
    """In forward: raise for what backward could not do."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fusedmlp inside a torch.func transform (grad, vmap, jvp, ...): expected plain autograd; the transform "
            "would bypass .grad and main_grad"
        )
    if inside_backward():
        _outermost_backward()
    else:  # what is left was interrupted while it ended
        while _running.backwards:
            _running.backwards.popitem()[1].end()
        _release_interrupted()
    ddp = DistributedDataParallel._get_active_ddp_module()
    if not torch.is_grad_enabled():
        if ddp is not None:
            _without_grad_in_ddp.update((weight, weakref.ref(ddp)) for weight in weights)
        return
    if ddp is None and inside_backward():
        ddp = next((alive() for alive in map(_without_grad_in_ddp.get, weights) if alive is not None), None)
    managed = set() if ddp is None else {id(p) for p in (*ddp._module_parameters, *ddp._delay_all_reduce_params)}
    for i, weight in enumerate(weights):
        if not weight.requires_grad:
            continue
        label = name if len(weights) == 1 else f"{name}[{i}]"
        has_main_grad = _has_main_grad(weight)
        fused = mode in ("main_grad", "grad") or (mode == "auto" and has_main_grad)
        if fused and not weight.is_leaf:
            raise RuntimeError(
                f"{label}: accumulate_wgrad={mode!r} needs a leaf parameter; got the result of {weight.grad_fn}, "
                "through which only a returned gradient flows back: use accumulate_wgrad='off'"
            )
        if (delayed or (fused and mode != "grad")) and gathered_by_fsdp2(weight):
            raise RuntimeError(
                f"{label}: FSDP2 (fully_shard) reduces this parameter's .grad when backward ends, and would miss "
                f"{'a delayed gradient' if delayed else 'one in main_grad'}; use accumulate_wgrad='grad' without "
                "delay, and fusedmlp.integrations.fsdp2.accumulate_in to keep it in fp32"
            )
        if mode == "main_grad" and not hasattr(weight, "__fsdp_param__"):  # asking Megatron-FSDP would allocate
            _existing_target(weight, mode, label)
        if id(weight) in managed and (delayed or (fused and mode != "grad")):
            raise RuntimeError(
                f"{label}: DistributedDataParallel reduces this parameter's .grad when backward ends, and would miss "
                f"{'a delayed gradient' if delayed else 'one in main_grad'}; use accumulate_wgrad='grad' without "
                "delay, or leave the parameter out of DDP and reduce main_grad yourself"
            )


def expect_overwrite(weights: Sequence[Tensor], mode: Mode) -> None:
    """After a forward of the first micro-batch that succeeded: the next gradient of its weights overwrites."""
    for weight in weights:
        if weight.requires_grad and (mode == "main_grad" or (mode == "auto" and _has_main_grad(weight))):
            _to_overwrite[weight] = torch.is_grad_enabled() or _to_overwrite.get(weight, False)


def expect_no_overwrite(weight: Tensor) -> None:
    """Its `main_grad` has been zeroed."""
    _to_overwrite.pop(weight, None)


# Parameter -> the DDP, weakly, in whose forward a layer used it under no_grad: in evaluation, or in a reentrant
# checkpoint, whose second forward, in backward, DDP knows nothing of.
_without_grad_in_ddp = WeakTensorKeyDictionary()


class TracedKey(NamedTuple):
    """What a graph made by `torch.compile` carries from forward to backward, as numbers, for one fused parameter."""

    param: int  # its id; 0 if it is frozen
    address: int  # of its main_grad, as the graph knows it
    first_recomputed: int  # see autograd.Call


def traced_targets(name: str, weights: Sequence[Tensor], mode: Mode) -> list[Tensor]:
    """What the graph of a compiled layer adds the gradients of `weights` to; empty: it returns them.

    The "grad" mode returns them too: PyTorch adds them to `.grad`.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if not trained or mode in ("off", "grad"):
        return []
    outs: list[Tensor | None] = [getattr(w, "main_grad", None) if w.requires_grad else None for w in weights]
    present = [out for out in outs if out is not None]
    if torch.is_grad_enabled():
        if any(hasattr(weight, "__fsdp_param__") for weight in trained):
            raise RuntimeError(
                f"{name}: a parameter of Megatron-FSDP inside torch.compile: expected a plain main_grad, as the graph "
                "would keep the buffer of one step; call the layer outside of torch.compile"
            )
        if mode == "auto":
            mode = _resolve_auto(name, {i: weight for i, weight in enumerate(weights) if weight.requires_grad})
        if mode == "main_grad" and len(present) < len(trained):
            raise _no_main_grad(name)
    if len(present) < len(trained):
        return []
    if not all(weight.is_leaf for weight in trained):  # a graph detaches it, as it gets no gradient back
        raise RuntimeError(
            f"{name}: accumulate_wgrad={mode!r} needs a leaf parameter; got a result of operations, through which "
            "only a returned gradient flows back: use accumulate_wgrad='off'"
        )
    return [torch.zeros_like(present[0]) if out is None else out for out in outs]


def enter_traced_forward(
    groups: Sequence[tuple[str, Sequence[Tensor]]], main_grads: Sequence[Tensor], first_microbatch: bool
) -> list[TracedKey]:
    """When the forward of a compiled layer runs: what a forward does outside; the keys of its fused weights."""
    first = 0
    for name, weights in groups:
        enter_forward(name, weights, "main_grad", delayed=False)
        outs = main_grads[first : first + len(weights)]
        _one_dtype(name, {out.dtype for out in outs})
        _check_strides(name, outs)
        first += len(weights)
    if len({out.data_ptr() for out in main_grads}) < len(main_grads):
        names = ", ".join(name for name, _ in groups)
        raise RuntimeError(
            f"{names}: expected a main_grad of its own for every parameter of a compiled layer; got one for several "
            "(a parameter that experts share?); call the layer outside of torch.compile"
        )
    recomputed = first_microbatch and inside_backward()
    if first_microbatch and not recomputed:
        for _, weights in groups:
            expect_overwrite(weights, "main_grad")
    params = [id(weight) if weight.requires_grad else 0 for _, weights in groups for weight in weights]
    return [TracedKey(param, out.data_ptr(), recomputed) for param, out in zip(params, main_grads, strict=True)]


def enter_traced_backward(groups: Sequence[tuple[str, Sequence[TracedKey]]], device: torch.device) -> list[bool]:
    """In the backward of a compiled graph, before it adds a layer's gradients: check, set flags, put dummies.

    The graph is one node of the engine, and adds whoever asked for what: whatever it would be wrong for, raises.

    Returns:
        Per parameter: whether main_grad is to be zeroed first.
    """
    running: Any = torch._C._current_autograd_node()
    edges: Any = () if running is None else running.next_functions
    accumulating: list[Any] = [node for node, _ in edges if isinstance(node, _AccumulateGrad)]
    nodes = {id(node.variable): node for node in accumulating}
    overwrites = []
    with one_thread, ExitStack() as undo:
        for name, keys in groups:
            for i, key in enumerate(keys):
                if not key.param:
                    overwrites.append(False)
                    continue
                label = name if len(keys) == 1 else f"{name}[{i}]"
                node = nodes.get(key.param)
                if node is None or engine_use(node, running) is not EngineUse.ACCUMULATE:
                    raise RuntimeError(
                        f"{label}: a compiled backward adds to main_grad, and this one must not: expected .backward() "
                        "that accumulates into the parameter; got torch.autograd.grad, backward(inputs=...) or "
                        "a torch.func transform (compile with accumulate_wgrad='off' for those)"
                    )
                param = node.variable
                target = _existing_target(param, "main_grad", label)
                if target is None or target.data_ptr() != key.address:
                    raise RuntimeError(
                        f"{label}: expected the main_grad that the compiled forward saw; got another one since"
                    )
                _refuse_pending_overwrite(param, sys.maxsize, label)
                overwrites.append(_overwrites(param, bool(key.first_recomputed), label, undo))
                _mark_fused(param, node, undo)
        undo.pop_all()
    if device.type == "cuda" and any(key.param for _, keys in groups for key in keys):
        _outermost_backward().streams.add(torch.cuda.current_stream(device))
    return overwrites


def _one_dtype(name: str, dtypes: set[torch.dtype]) -> torch.dtype:
    if len(dtypes) > 1:
        raise ValueError(f"{name}: expected all experts to accumulate in one dtype; got {dtypes}")
    return next(iter(dtypes))


def _check_strides(name: str, outs: Sequence[Tensor]) -> None:
    for i, out in enumerate(outs):
        if not same_strides(out, outs[0]):
            raise ValueError(
                f"{name}[{i}]: expected a gradient with the strides of expert 0's, {outs[0].stride()}; got "
                f"{out.stride()}"
            )


def fresh_like(param: Tensor) -> Tensor:
    """An uninitialised gradient that PyTorch can steal: its own storage, the parameter's strides."""
    return _fresh(param, grad_dtype(param))


def _fresh(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, where those matter."""
    return (
        a.stride() == b.stride()
        or a.numel() == 0
        or all(size == 1 or i == j for size, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))
    )


def _has_main_grad(param: Tensor) -> bool:
    return hasattr(param, "__fsdp_param__") or getattr(param, "main_grad", None) is not None


def _main_grad_of(param: Tensor) -> Tensor | None:
    if hasattr(param, "__fsdp_param__"):  # Megatron-FSDP allocates it on demand
        return param.get_main_grad()  # type: ignore[attr-defined, no-any-return]
    return getattr(param, "main_grad", None)


def grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype that `.grad` of a parameter must have."""
    if torch.compiler.is_compiling():  # which cannot read grad_dtype; the engine casts
        return param.dtype
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None) if param.is_leaf else None
    return chosen or param.dtype


def _resolve_auto(name: str, leaves: dict[int, Tensor]) -> Mode:
    """`leaves` by expert."""
    having = [i for i, param in leaves.items() if _has_main_grad(param)]
    lacking = [i for i in leaves if i not in having]
    if having and lacking:
        raise ValueError(
            f"{name}: expected main_grad on all experts or on none; experts {lacking[0]} and {having[0]} differ"
        )
    return "main_grad" if having else "off"


def _existing_target(param: Tensor, mode: Mode, label: str) -> Tensor | None:
    if mode == "grad":
        target, what = param.grad, ".grad"
        if target is None:
            return None
    else:
        target, what = _main_grad_of(param), "main_grad"
        if target is None:
            raise _no_main_grad(label)
    _refuse_tensor_hooks(param, label)
    if target.shape != param.shape:
        raise ValueError(f"{label}: expected {what} of shape {tuple(param.shape)}; got {tuple(target.shape)}")
    if target.device != param.device:
        raise ValueError(f"{label}: expected {what} on {param.device}; got {target.device}")
    if target.dtype not in (torch.float32, param.dtype):
        raise ValueError(f"{label}: expected {what} in torch.float32 or {param.dtype}; got {target.dtype}")
    if not is_plain(target):
        raise TypeError(f"{label}: expected {what} to be a plain tensor; got a {type(target).__name__}")
    if target.requires_grad:
        raise ValueError(f"{label}: expected {what} with requires_grad=False; got True")
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise ValueError(
            f"{label}: expected a writable {what}; got an expanded one with strides {target.stride()} (the dummy of "
            "an earlier main_grad step? clear it with zero_grad(set_to_none=True))"
        )
    return target


def _no_main_grad(label: str) -> RuntimeError:
    return RuntimeError(
        f'{label}: accumulate_wgrad="main_grad" expects a main_grad attribute on the parameter; got none '
        "(attach one with fusedmlp.MainGradBuffer)"
    )


def _refuse_tensor_hooks(param: Tensor, label: str) -> None:
    if param._backward_hooks:
        raise RuntimeError(
            f"{label}: the parameter has a tensor hook (register_hook), which would see None instead of the gradient; "
            "use register_post_accumulate_grad_hook, or accumulate_wgrad='off'"
        )


# Parameters whose next gradient overwrites main_grad, because a forward outside of any backward said so (True; False:
# it ran under no_grad, in an evaluation or before a reentrant checkpoint recomputes it). The first gradient that
# arrives takes the parameter out, whichever micro-batch it is of: a tied weight, a second backward through one graph, a
# checkpoint inside the backward all add.
_to_overwrite = WeakTensorKeyDictionary()
# Parameter with `overwrite_main_grad` -> the backward that last overwrote its main_grad, weakly. Its owner hands it a
# new main_grad for every backward, or more often, and then clears `grad_added_to_main_grad`.
_overwritten_in = WeakTensorKeyDictionary()
# Parameter -> the queued routes that will overwrite its main_grad, by order of creation.
_pending_overwrites = WeakTensorKeyDictionary()


class _Backward:
    """What one run of the engine needs until its end."""

    def __init__(self) -> None:
        self.streams: set[torch.cuda.Stream] = set()  # that wrote gradients of which the engine knows nothing
        self.hooks: list[Any] = []  # to be removed
        self.over = False

    def end(self) -> None:
        """Make sure that nothing of it lasts."""
        self.over = True
        for hook in self.hooks:
            hook.remove()


class _End:
    """Callback for the end of a backward. The engine alone holds it, and lets go of it also if the backward fails.

    So nothing may refer to it, not even a local variable: the traceback of an error would keep that alive.
    """

    def __init__(self, backward: _Backward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        """On the streams from which backward was called, as the engine does for the gradients that it knows."""
        for stream in self._backward.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def __del__(self) -> None:
        if hasattr(self, "_backward"):  # not interrupted in __init__
            self._backward.end()


class _Running(threading.local):
    """The backwards that run in this thread, by graph task, in the order in which they were met."""

    def __init__(self) -> None:
        self.backwards: dict[int, _Backward] = {}


_running = _Running()


def _outermost_backward() -> _Backward:
    """The backward that runs now; of nested ones (reentrant checkpoints), which are one to the user, the outermost.

    Nested backwards have graph tasks of their own. Ours are known to be nested because a checkpoint's second forward,
    inside the outer one, came here before. One through a graph from before would not be.
    """
    task, running = torch._C._current_graph_task_id(), _running.backwards
    for ended in [other for other, backward in running.items() if backward.over]:
        del running[ended]
    if task not in running:
        backward = _Backward()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_End(backward))
        running[task] = backward
    return next(iter(running.values()))


def _overwrites(param: Tensor, first_recomputed: bool, label: str, undo: ExitStack) -> bool:
    """Whether the gradient at hand replaces what main_grad holds."""
    if getattr(param, "overwrite_main_grad", False):
        if param in _to_overwrite:  # a step began too, and this is its first gradient
            undo.callback(_to_overwrite.__setitem__, param, _to_overwrite.pop(param))
        backward = _outermost_backward()
        last: weakref.ref[_Backward] | None = _overwritten_in.get(param)
        undo.callback(_overwritten_in.__setitem__, param, last)
        _overwritten_in[param] = weakref.ref(backward)
        handed_over = not getattr(param, "grad_added_to_main_grad", True)
        if handed_over:
            _set_flag(param, undo)
        return handed_over or last is None or last() is not backward
    recorded = _to_overwrite.get(param)
    if recorded is None:
        return False
    if not recorded and not first_recomputed:
        raise RuntimeError(
            f"{label}: a forward under torch.no_grad() had is_first_microbatch=True, and now a gradient of another "
            "micro-batch comes; expected the first one's, from a reentrant checkpoint around it (leave "
            "is_first_microbatch out of evaluation; use_reentrant=False allows any order)"
        )
    undo.callback(_to_overwrite.__setitem__, param, True)
    del _to_overwrite[param]
    return True


def _refuse_pending_overwrite(param: Tensor, order: int, label: str, own: int | None = None) -> None:
    pending = _pending_overwrites.get(param, {})
    if any(other < order and other != own and alive() is not None for other, alive in pending.items()):
        raise RuntimeError(
            f"{label}: a queued gradient is going to overwrite main_grad, and would erase this one, which came later; "
            "run its queue first"
        )


def _mark_fused(param: Tensor, node: Any, undo: ExitStack) -> None:
    if hasattr(param, "grad_added_to_main_grad"):
        _set_flag(param, undo)
        undo.callback(setattr, param, "grad", param.grad)
        put_dummy(param)
        _catch_plain_gradient(param, node, undo)


def _set_flag(param: Any, undo: ExitStack) -> None:
    undo.callback(setattr, param, "grad_added_to_main_grad", param.grad_added_to_main_grad)
    param.grad_added_to_main_grad = True


def put_dummy(param: Tensor) -> None:
    """See that `.grad` is not None: a zero gradient, if there is none."""
    if param.grad is None:
        param.grad = _dummy(param)


def _catch_plain_gradient(param: Tensor, node: Any, undo: ExitStack) -> None:
    """See that what plain PyTorch makes of a fused parameter in this backward is not lost.

    `node` accumulates it after our backward. Left alone, it would add into the dummy (an error, if that is expanded),
    and the owner, seeing the flag, would drop the sum.
    """
    backward = _outermost_backward()
    stream = torch.cuda.current_stream(param.device) if param.is_cuda else None

    def run(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        (grad,) = grads
        if grad is None or backward.over:
            return None
        owner_adds = getattr(param, "zero_out_wgrad", False)
        after_the_queue = owner_adds and getattr(param, "skip_backward_post_hook", False)
        pending = any(alive() is not None for alive in _pending_overwrites.get(param, {}).values())
        if owner_adds and (after_the_queue or not pending):
            if param.grad is not None and is_dummy(param.grad):
                param.grad = None
            return None
        if pending:
            raise RuntimeError(
                "a parameter is used both by a fusedmlp layer, whose queued gradient is going to overwrite main_grad, "
                "and by plain PyTorch, whose gradient it would erase; expected only the former"
            )
        if stream is not None:  # the engine does not know that our GEMM may still write there
            torch.cuda.current_stream(param.device).wait_stream(stream)
        with one_thread, torch.no_grad():
            _main_grad_of(param).add_(grad)  # type: ignore[union-attr]
        return (None,)

    hook = node.register_prehook(run)
    undo.callback(hook.remove)
    backward.hooks.append(hook)


def is_dummy(grad: Tensor) -> bool:
    """Whether a gradient is an expanded zero."""
    return grad.numel() > 1 and not any(grad.stride())


_scalar_zeros = WeakTensorKeyDictionary()  # parameter -> its zero
_dense_zeros: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[Tensor, int]]] = {}


def _dummy(param: Tensor) -> Tensor:
    dtype = grad_dtype(param)
    if environment.dense_dummy():
        return _dense_dummy(param.shape, dtype, param.device)
    if param.numel() <= 1:  # an expanded scalar would be writable
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        # Its memory belongs to the graph, and holds zero only once that is replayed: not to be kept.
        return torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    zero: Tensor | None = _scalar_zeros.get(param)
    if zero is None or zero.dtype != dtype or zero.device != param.device or _was_written(zero):
        zero = _scalar_zeros[param] = torch.zeros((), dtype=dtype, device=param.device)
    return zero.expand(param.shape)


def _was_written(zero: Tensor) -> bool:
    """Whether somebody wrote to an element of a dummy; through `.data`, only a CPU can tell without waiting."""
    if zero.is_inference():  # counts no writes
        return True
    return zero._version != 0 or (zero.device.type == "cpu" and bool(zero))


def _dense_dummy(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense zero tensor: one that nobody else holds, zeroed again, or else a new one."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, dtype=dtype, device=device)
    pool = _dense_zeros.setdefault((shape, dtype, device), [])
    for base, idle_references in pool:
        if _storage_references(base) == idle_references:
            return base.zero_().detach()
    base = torch.zeros(shape, dtype=dtype, device=device)
    pool.append((base, _storage_references(base)))
    return base.detach()


def _storage_references(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
