"""Hugging Face Transformers: `experts_implementation="fusedmlp"`.

    from fusedmlp.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusedmlp")

or, for a model that is there, `register(model)`. Parameters, state dicts and routers stay Transformers' own: only the
function that computes the experts changes. See docs/transformers.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import fusedmlp
from fusedmlp import torch_activation
from fusedmlp.activation import Activation
from fusedmlp.main_grad import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "fusedmlp"

# Scalars on which activations are compared: near zero, around every bend, and beyond any clamp in use.
_MAGNITUDES = (0.01, 0.04, 0.2, 0.6, 1.1, 1.9, 2.8, 4.3, 6.7, 7.3, 9.1, 13.0, 40.0, 150.0, 1000.0)
# Classes that compute in float32 whatever the input must pass, gelu and its tanh form must differ (by up to 5e-4).
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6

_activations: WeakKeyDictionary[nn.Module, Activation] = WeakKeyDictionary()


def register(model: PreTrainedModel | None = None, *, accumulate_wgrad: Mode = "auto") -> None:
    """Add `"fusedmlp"` to the implementations of experts that Transformers knows.

    Args:
        model: switch this model to it, after a check that all of its experts can be computed. Without the check an
            activation that fusedmlp lacks raises in the first forward, and a model whose experts do not use
            Transformers' interface goes on computing them by itself.
        accumulate_wgrad: see `fusedmlp.grouped_mlp`; of every model that uses `"fusedmlp"`, from now on. "grad" suits
            gradient accumulation without `main_grad`: from the second micro-batch on, GEMMs add into `.grad`.

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
            f"model: expected experts that use Transformers' experts interface; got {type(model).__name__}, which has none"
        )
    for module in experts:
        activation_of(module)
    model.set_experts_implementation(_NAME)


def _experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, accumulate_wgrad: Mode
) -> Tensor:
    """The function that Transformers calls: `[T, H]`, `[T, K]`, `[T, K]` to `[T, H]`.

    The dtype is that of the weights, as in Transformers' own implementations: under autocast, norms give float32.
    """
    experts: Any = module
    activation = activation_of(module)
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


def activation_of(experts: nn.Module) -> Activation:
    """The activation of experts that use Transformers' interface; found once per module.

    Nothing is taken on trust: of the activations that fusedmlp has, the one is chosen that agrees in value and in
    gradient with what the module itself computes (`_apply_gate`, or `act_fn` without a gate).

    Raises:
        NotImplementedError: no activation agrees, or experts do more than one MLP; names the module's class.
    """
    found = _activations.get(experts)
    if found is None:
        found = _activations[experts] = _find_activation(experts)
    return found


def _find_activation(module: nn.Module) -> Activation:
    experts: Any = module
    name = type(module).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(f"{name}: fusedmlp has no norm between an expert and its routing weight")
    with torch.inference_mode(False), torch.enable_grad():
        h = (_gated_probe(experts.is_concatenated) if experts.has_gate else _grid()).requires_grad_()
        try:
            act = (experts._apply_gate if experts.has_gate else experts.act_fn)(h)
            grad = torch.linspace(0.5, 1.5, act.numel(), dtype=act.dtype).view(act.shape)
            (dh,) = torch.autograd.grad(act, h, grad)
        except Exception as error:
            raise NotImplementedError(f"{name}: its activation cannot be probed in float64 on the CPU") from error
    h = h.detach()
    for candidate in _candidates(experts):
        ours, ours_dh = torch.empty_like(act, dtype=h.dtype), torch.empty_like(h)
        torch_activation.backward(candidate, h, grad.to(h.dtype), ours, ours_dh)
        if _agree(ours, act) and _agree(ours_dh, dh):
            return candidate
    act_fn = getattr(experts, "act_fn", None)
    raise NotImplementedError(
        f"{name}: its activation is none of those that fusedmlp has (act_fn is {type(act_fn).__name__}, "
        f"{'gated' if experts.has_gate else 'not gated'})"
    )


def _grid() -> Tensor:
    positive = torch.tensor(_MAGNITUDES, dtype=torch.float64)
    return torch.cat([-positive, positive])


def _gated_probe(concatenated: bool) -> Tensor:
    """`[n, 2n]`: every gate value with every linear one."""
    grid = _grid()
    gate, linear = grid.unsqueeze(1).expand(-1, len(grid)), grid.expand(len(grid), -1)
    return torch.cat([gate, linear], 1) if concatenated else torch.stack([gate, linear], 2).flatten(1)


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs.detach().to(ours.dtype), rtol=_RELATIVE, atol=_ABSOLUTE)


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
