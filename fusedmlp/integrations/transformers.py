"""Hugging Face Transformers: `experts_implementation="fusedmlp"`.

    from fusedmlp.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(
        name, experts_implementation="fusedmlp"
    )

or, for a model that is there, `register(model)`. Parameters, state dicts and routers stay Transformers' own: only the
function that computes the experts changes. See docs/transformers.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import fusedmlp
from fusedmlp.activation import Activation
from fusedmlp.contract.destination import Mode
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation
from fusedmlp.operators import torch_activation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

_NAME = "fusedmlp"

# Scalars on which activations are compared: near zero, around every bend, and beyond any clamp in use.
_MAGNITUDES = (0.01, 0.04, 0.2, 0.6, 1.1, 1.9, 2.8, 4.3, 6.7, 7.3, 9.1, 13.0, 40.0, 150.0, 1000.0)
# Classes that compute in float32 whatever the input must pass, gelu and its tanh form must differ (by up to 5e-4).
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6

# What an activation was found from, and which it is.
_activations: WeakKeyDictionary[nn.Module, tuple[object, Activation]] = WeakKeyDictionary()


def register(model: PreTrainedModel | None = None, *, accumulate_wgrad: Mode = "auto") -> None:
    """Add `"fusedmlp"` to the implementations of experts that Transformers knows.

    Args:
        model: switch this model to it, after a check that all of its experts can be computed. Without the check an
            activation that fusedmlp lacks raises in the first forward, and a model whose experts do not use
            Transformers' interface goes on computing them by itself.
        accumulate_wgrad: see `fusedmlp.grouped_mlp`; of every model that uses `"fusedmlp"`, from now on.

    Raises:
        NotImplementedError: experts that fusedmlp cannot compute; names their class.
        ValueError: a model without experts that use Transformers' interface.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, partial(_experts_forward, accumulate_wgrad=accumulate_wgrad))
    if model is None:
        return
    experts = [module for module in model.modules() if _uses_interface(module)]
    if not experts:
        raise ValueError(
            f"model: expected experts that use Transformers' experts interface; got a {type(model).__name__} without"
        )
    for module in experts:
        activation_of(module)
    model.set_experts_implementation(_NAME)


def fp32_accumulation() -> TrainerCallback:
    """A callback with which `Trainer` accumulates the gradients of 16-bit weights in float32, and clips them so.

        Trainer(model, arguments, callbacks=[fp32_accumulation()], ...)

    With Accelerate, or in a loop of one's own, `FP32Accumulation(model, optimizer)` of
    `fusedmlp.integrations.fp32_accumulation` does the same; its errors are raised when the training begins.
    """
    from transformers import TrainerCallback
    from transformers.training_args import ParallelMode

    class Callback(TrainerCallback):
        accumulation: FP32Accumulation | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_train_end(args, state, control)  # of a training that was interrupted
            if args.parallel_mode == ParallelMode.DISTRIBUTED and not args.fsdp:
                raise ValueError(
                    "fp32_accumulation(): expected one process, or FSDP; got several with DistributedDataParallel, "
                    "which reduces gradients in the dtype of the parameters"
                )
            self.accumulation = FP32Accumulation(kwargs["model"], kwargs["optimizer"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.accumulation is not None:
                self.accumulation.remove()
                self.accumulation = None

    return Callback()


def _experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, accumulate_wgrad: Mode
) -> Tensor:
    """The function that Transformers calls: `[T, H]`, `[T, K]`, `[T, K]` to `[T, H]`.

    The dtype is that of the weights, as in Transformers' own implementations: under autocast, norms give float32.
    """
    experts: Any = module
    activation = activation_of(module)
    if torch.compiler.is_compiling():
        _guard(module)
    fc1_name = "gate_up_proj" if experts.has_gate else "up_proj"
    fc1_weight = getattr(experts, fc1_name)
    y = fusedmlp.moe_experts(
        hidden_states.to(fc1_weight.dtype),
        top_k_index,
        top_k_weights,
        fc1_weight,
        experts.down_proj,
        fc1_bias=getattr(experts, f"{fc1_name}_bias") if experts.has_bias else None,
        fc2_bias=experts.down_proj_bias if experts.has_bias else None,
        activation=activation,
        weight_layout="in_out" if experts.is_transposed else "out_in",
        accumulate_wgrad=accumulate_wgrad,
    )
    return y.to(hidden_states.dtype)


def _uses_interface(module: nn.Module) -> bool:
    """Whether Transformers' decorator made the module's class."""
    return hasattr(module, "has_gate") and hasattr(module, "is_concatenated")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def activation_of(experts: nn.Module) -> Activation:
    """The activation of experts that use Transformers' interface; found once, and again when it was changed.

    Nothing is taken on trust: of the activations that fusedmlp has, the one is chosen that agrees in value and in
    gradient with what the module itself computes (`_apply_gate`, or `act_fn` without a gate).

    Raises:
        NotImplementedError: no activation agrees, or experts do more than one MLP; names the module's class.
    """
    source = _source(experts)
    found = _activations.get(experts)
    if found is None or found[0] != source:
        found = _activations[experts] = source, _find_activation(experts)
    return found[1]


def _source(experts: nn.Module) -> object:
    """What a change of the activation changes: functions, and numbers or names that the module and its `act_fn` hold.

    Functions are referred to weakly: they may hold the module.
    """
    act_fn = getattr(experts, "act_fn", None)
    functions = [getattr(type(experts), "_apply_gate", None), type(act_fn), act_fn]
    for owner in (experts, act_fn):
        functions += filter(callable, getattr(owner, "__dict__", {}).values())
    return [*map(_reference, functions)], _settings_of(experts), _settings_of(act_fn)


def _reference(function: object) -> object:
    try:
        return weakref.ref(function)
    except TypeError:  # None, or of a class with slots
        return function


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _settings_of(owner: object) -> tuple[tuple[str, object], ...]:
    return tuple(
        (name, value)
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, (bool, int, float, str)) and name != "training"
    )


def _guard(experts: nn.Module) -> None:
    """In a graph, compare what `activation_of` depends on: Dynamo compiles again when what was compared has changed."""
    for owner in (experts, getattr(experts, "act_fn", None)):
        if isinstance(owner, nn.Module):
            for name, value in _settings_of(owner):
                if getattr(owner, name) != value:
                    raise AssertionError(f"{name} changed while it was traced")


def _find_activation(module: nn.Module) -> Activation:
    experts: Any = module
    name = type(module).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(f"{name}: fusedmlp has no norm between an expert and its routing weight")
    try:
        # A new thread has none of what surrounds this forward: no_grad, inference mode, a default device, a checkpoint,
        # which counts the tensors that backward saves.
        with ThreadPoolExecutor(1) as thread:
            probe = thread.submit(_probe, experts).result()
    except Exception as error:
        raise NotImplementedError(f"{name}: its activation cannot be probed in float64 on the CPU") from error
    for candidate in _candidates(experts):
        act, dh = torch.empty_like(probe.act), torch.empty_like(probe.h)
        torch_activation.backward(candidate, probe.h, probe.grad, act, dh)
        if _agree(act, probe.act) and _agree(dh, probe.dh):
            return candidate
    act_fn = getattr(experts, "act_fn", None)
    raise NotImplementedError(
        f"{name}: its activation is none of those that fusedmlp has (act_fn is {type(act_fn).__name__}, "
        f"{'gated' if experts.has_gate else 'not gated'})"
    )


class _Probe(NamedTuple):
    """What a module's activation is at `h`, and its gradient for that `grad` of the result; float64."""

    h: Tensor
    grad: Tensor
    act: Tensor
    dh: Tensor


def _probe(experts: Any) -> _Probe:
    positive = torch.tensor(_MAGNITUDES, dtype=torch.float64)
    h = grid = torch.cat([-positive, positive])
    if experts.has_gate:  # every gate value with every linear one
        gate, linear = grid.unsqueeze(1).expand(-1, len(grid)), grid.expand(len(grid), -1)
        h = torch.cat([gate, linear], 1) if experts.is_concatenated else torch.stack([gate, linear], 2).flatten(1)
    h.requires_grad_()
    act = (experts._apply_gate if experts.has_gate else experts.act_fn)(h).double()
    grad = torch.linspace(0.5, 1.5, act.numel(), dtype=torch.float64).view(act.shape)
    (dh,) = torch.autograd.grad(act, h, grad)
    return _Probe(h.detach(), grad, act.detach(), dh)


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=_RELATIVE, atol=_ABSOLUTE)


def _candidates(experts: Any) -> Iterator[Activation]:
    """Activations that the module might mean; limits and scales under the names that models give them."""
    if not experts.has_gate:
        yield from map(Activation, ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"))
        return
    interleaved = not experts.is_concatenated
    limits = [None, *_numbers(experts, "limit", "swiglu_limit")]
    alphas = [None, *_numbers(experts, "alpha", "swiglu_alpha")]
    for name in ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu"):
        for limit in limits:
            for offset in (0.0, 1.0):
                for alpha in alphas if name == "swiglu" else (None,):
                    yield Activation(name, interleaved=interleaved, limit=limit, alpha=alpha, linear_offset=offset)


def _numbers(experts: Any, *names: str) -> list[float]:
    values = {getattr(experts, name, None) for name in names}
    return [float(value) for value in values if value is not None and math.isfinite(value) and value > 0]
