"""Find the activation between the two GEMMs of Transformers' experts. See docs/transformers.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmlp.activation import KINDS, Activation
from fusedmlp.operators import torch_activation

# Activations are compared at these numbers, of both signs: near zero, around every bend, beyond any clamp in use.
_MAGNITUDES = (0.01, 0.04, 0.2, 0.6, 1.1, 1.9, 2.8, 4.3, 6.7, 7.3, 9.1, 13.0, 40.0, 150.0, 1000.0)
# Loose enough for classes that always compute in float32; tight enough to tell gelu from its tanh form, which differ
# by up to 5e-4.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6

# Classes of act_fn without parameters, buffers or submodules, which compute the same in training and in evaluation.
_CLASSES = (
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.ReLU",
    "transformers.activations.SiLUActivation",
    "transformers.activations.GELUActivation",
    "transformers.activations.GELUTanh",
    "transformers.activations.NewGELUActivation",
    "transformers.activations.FastGELUActivation",
    "transformers.activations.AccurateGELUActivation",
    "transformers.activations.QuickGELUActivation",
    "transformers.activations.ReLUSquaredActivation",
)
# Classes of act_fn that take gate and linear part, and the names of their bounds: submodules with a number `softcap`.
_SITU_GLU = {
    "transformers.models.inkling2.modeling_inkling2.Inkling2SoftcappedSwiGLU": ("gate_softcap", "up_softcap"),
}
_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (F.silu, F.gelu, F.relu)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Refused(NotImplementedError):
    pass


class _Found(NamedTuple):
    """An activation, and everything from which it was found."""

    function: object  # behind `_apply_gate`; None without a gate
    read: dict[str, object]  # attributes of the module that the activation depends on, by name
    activation: Activation


_activations: WeakKeyDictionary[nn.Module, _Found] = WeakKeyDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def activation_of(experts: nn.Module) -> Activation:
    """Return the activation of experts that use Transformers' interface; found once, and again after a change.

    `act_fn` must be one of `_FUNCTIONS`, or an instance of one of `_CLASSES`. A gate (`_apply_gate`) may read this
    `act_fn` and numbers, strings and None of the module, and nothing else. The result is the activation that agrees in
    value and in gradient with what the gate, or `act_fn` where there is no gate, computes.

    Raises:
        NotImplementedError: no activation agrees; the gate or `act_fn` may depend on something else; or a norm follows
            each expert. The message names the module's class.
    """
    function, last = _function_of(experts), _activations.get(experts)
    if last is None or last.function is not function or last.read != {name: _read(experts, name) for name in last.read}:
        last = _activations[experts] = _find_activation(experts, function)
    return last.activation


def _function_of(experts: Any) -> Any:
    """Return the function behind the method `_apply_gate`, or None without a gate."""
    if not experts.has_gate:
        return None
    gate = experts._apply_gate
    function = getattr(gate, "__func__", None)
    if getattr(gate, "__self__", None) is not experts or getattr(function, "__closure__", None) is not None:
        raise _Refused(
            f"{type(experts).__name__}: expected _apply_gate to be a method of its class and no closure, so that "
            f"everything that it depends on can be seen; got {gate!r}. "
            "Use another experts_implementation for this model"
        )
    return function


def _read(experts: nn.Module, name: str) -> object:
    """Return an attribute in a form that can be compared later; refuse all but numbers, strings, None and `act_fn`."""
    value = getattr(experts, name, None)
    if name == "act_fn" and value is not None:
        return _read_act_fn(experts, value)
    if name == "training" or not isinstance(value, _PLAIN):
        raise _Refused(
            f"{type(experts).__name__}: expected its _apply_gate to read numbers, strings and act_fn only; got {name}, "
            + ("which differs in evaluation" if name == "training" else f"a {type(value).__name__}")
            + ". Use another experts_implementation for this model"
        )
    return value


def _read_act_fn(experts: nn.Module, act_fn: Any) -> object:
    """Return a known function itself, or the class and settings of a known module; refuse any other `act_fn`."""
    if any(act_fn is function for function in _FUNCTIONS):
        return act_fn
    kind = type(act_fn)
    got = f"{type(experts).__name__}: got act_fn of class {kind.__name__}"
    if bounds := _SITU_GLU.get(f"{kind.__module__}.{kind.__qualname__}"):
        return kind, {name: float(getattr(act_fn, name).softcap) for name in bounds}
    if f"{kind.__module__}.{kind.__qualname__}" not in _CLASSES:
        raise _Refused(
            f"{got}; expected one of {', '.join(name.rpartition('.')[2] for name in _CLASSES)}, which have no "
            "parameters and are the same in training and evaluation. Use another experts_implementation for this model"
        )
    if getattr(act_fn.forward, "__func__", None) is not kind.forward or any(getattr(act_fn, hooks) for hooks in _HOOKS):
        raise _Refused(f"{got} with hooks or a forward of its own, which fusedmlp would not call; remove them")
    settings = {
        name: value for name, value in vars(act_fn).items() if name not in ("training", "forward") and name[0] != "_"
    }
    unknown = [*act_fn._parameters, *act_fn._buffers, *act_fn._modules]
    unknown += [n for n, value in settings.items() if not (isinstance(value, _PLAIN) or _is_known(act_fn, value))]
    if unknown:
        raise _Refused(f"{got} with {', '.join(unknown)} set on it, which may be trained or change; remove them")
    return kind, settings


def _is_known(act_fn: nn.Module, value: object) -> bool:
    """Whether a value is a function that Transformers' gelu classes store: torch's, or a method of the class itself."""
    if isinstance(value, MethodType):
        return value.__self__ is act_fn and value.__func__ in vars(type(act_fn)).values()
    function = value.func if isinstance(value, partial) else value
    return any(function is known for known in _FUNCTIONS)


class _StandIn:
    """Replaces the experts as `self` of `_apply_gate`: records each attribute that it reads, refuses unknown ones."""

    __slots__ = ("_experts", "_noted")  # so that a gate that assigns an attribute raises

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self._noted: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        self._noted[name] = _read(self._experts, name)
        return getattr(self._experts, name)


def guard_in_graph(experts: nn.Module) -> None:
    """Compare in a graph what `activation_of` depends on: Dynamo guards on it, and compiles again after a change."""
    for name, value in _numbers_read(experts):
        if getattr(experts, name) != value:
            raise AssertionError(f"{name} changed while it was traced")
    gate: Any = experts._apply_gate if experts.has_gate else None
    if gate is not None and id(gate.__func__) != _id_of_gate(experts):
        raise AssertionError("_apply_gate changed while it was traced")
    act_fn = getattr(experts, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        for name, value in _settings_of(act_fn):
            if getattr(act_fn, name) != value:
                raise AssertionError(f"{name} changed while it was traced")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _id_of_gate(experts: nn.Module) -> int:
    return id(_activations[experts].function)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _numbers_read(experts: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in _activations[experts].read.items() if name != "act_fn")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _settings_of(act_fn: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple(
        (name, value)
        for name, value in vars(act_fn).items()
        if isinstance(value, (bool, int, float, str)) and name != "training"
    )


def _find_activation(experts: nn.Module, function: Any) -> _Found:
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{name}: fusedmlp has no norm between an expert and its routing weight. "
            "Use another experts_implementation for this model"
        )
    stand_in = _StandIn(experts)
    try:
        # A new thread is outside of this forward's contexts: no_grad, inference mode, a default device, a checkpoint,
        # which counts the tensors that are saved for backward.
        with ThreadPoolExecutor(1) as thread:
            probe = thread.submit(_probe, experts, stand_in, function).result()
    except _Refused:
        raise
    except Exception as error:
        raise NotImplementedError(
            f"{name}: its activation cannot be probed in float64 on the CPU. "
            "Use another experts_implementation for this model"
        ) from error
    for candidate in _candidates(experts, stand_in._noted):
        act, dh = torch.empty_like(probe.act), torch.empty_like(probe.h)
        torch_activation.backward(candidate, probe.h, probe.grad, act, dh)
        # A tanh in float32 loses the small difference of its square to 1, which is the derivative far from zero.
        bounded = candidate.curve == "situ"
        if _agree(act, probe.act, bounded) and _agree(dh, probe.dh, bounded):
            return _Found(function, stand_in._noted, candidate)
    raise NotImplementedError(
        f"{name}: its activation is none of fusedmlp's (act_fn is "
        f"{type(getattr(experts, 'act_fn', None)).__name__}, {'not gated' if function is None else 'gated'}). "
        "Use another experts_implementation for this model"
    )


class _Probe(NamedTuple):
    """A module's activation `act` at inputs `h`, and `dh` for the output gradient `grad`; float64."""

    h: Tensor
    grad: Tensor
    act: Tensor
    dh: Tensor


def _probe(experts: Any, stand_in: _StandIn, function: Any) -> _Probe:
    positive = torch.tensor(_MAGNITUDES, dtype=torch.float64)
    h = grid = torch.cat([-positive, positive])
    if function is not None:  # every gate value with every linear one
        gate, linear = grid.unsqueeze(1).expand(-1, len(grid)), grid.expand(len(grid), -1)
        h = torch.cat([gate, linear], 1) if experts.is_concatenated else torch.stack([gate, linear], 2).flatten(1)
    h.requires_grad_()
    act = (stand_in.act_fn(h) if function is None else function(stand_in, h)).double()
    grad = torch.linspace(0.5, 1.5, act.numel(), dtype=torch.float64).view(act.shape)
    (dh,) = torch.autograd.grad(act, h, grad)
    return _Probe(h.detach(), grad, act.detach(), dh)


def _agree(ours: Tensor, theirs: Tensor, bounded: bool = False) -> bool:
    absolute = _ABSOLUTE * max(1.0, float(theirs.abs().max())) if bounded else _ABSOLUTE
    return torch.allclose(ours, theirs, rtol=_RELATIVE, atol=absolute)


def _candidates(experts: Any, read: dict[str, object]) -> Iterator[Activation]:
    """Yield activations to compare with; each number that the gate reads is tried as `limit` and as `alpha`."""
    if not experts.has_gate:
        yield from (Activation(name) for name, kind in KINDS.items() if not kind.gated)
        return
    interleaved = not experts.is_concatenated
    act_fn = read.get("act_fn")
    if isinstance(act_fn, tuple) and len(act_fn[1]) == 2:
        alpha, scale = act_fn[1].values()
        yield Activation("situ_glu", interleaved=interleaved, alpha=alpha, linear_scale=scale)
        return
    numbers = {float(value) for value in read.values() if isinstance(value, (int, float)) and 0 < value < math.inf}
    unbounded = (name for name, kind in KINDS.items() if kind.gated and kind.linear_scale is None)
    for name in unbounded:
        for limit in (None, *numbers):
            for offset in (0.0, 1.0):
                for alpha in (None, *numbers) if name == "swiglu" else (None,):
                    yield Activation(name, interleaved=interleaved, limit=limit, alpha=alpha, linear_offset=offset)
