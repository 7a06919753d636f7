"""Refusals of the conversion in torchtitan.py: experts that would compute or train something else after it."""

from __future__ import annotations

from torch import nn
from torchtitan.models.common.moe import GroupedExperts

GATE, LINEAR = "w1_EFD", "w3_EFD"
# Attributes of GroupedExperts that its replacement takes over; others are refused, as are buffers and modules inside.
_TAKEN_OVER = ("num_experts", "training", "_param_init", "_sharding_config", "_parameters", "_buffers", "_modules")
_ADVICE = "Call zero_grad() and convert() first, then attach hooks and attributes to the new module and its w13_EGD"


def derived_config(path: str, config: GroupedExperts.Config) -> None:
    """Refuse a config that builds more than plain experts, such as frozen ones: `derive` would keep its fields only."""
    made = type(config)
    if made is GroupedExperts.Config:
        return
    derived(made._owner)
    raise NotImplementedError(
        f"{path or 'model_config'}: expected a GroupedExperts.Config; got a {made.__qualname__} of {made.__module__}, "
        "whose build() would be lost. Put FusedExpertsConverter before the converter that made it, such as "
        "LoRAConverter, or leave one of the two out"
    )


def derived(owner: type) -> None:
    """Refuse experts of another class than GroupedExperts itself."""
    if owner is not GroupedExperts:
        raise NotImplementedError(
            f"{owner.__name__}: expected GroupedExperts itself; got a class derived from it, which may compute "
            "something else. Keep torchtitan's experts for this model; or, if a converter of MXFP8 or float8 made "
            "them, leave it out and use FusedExpertsConverter.Config(recipe=...)"
        )


def attached(experts: GroupedExperts, path: str) -> None:
    """Refuse what would be lost with the old module and its parameters: hooks, attributes, gradients, quantization."""
    blank = vars(nn.Module())
    lost = [name for name, value in vars(experts).items() if name not in blank or value != blank[name]]
    lost = [name for name in lost if name not in _TAKEN_OVER] + [*experts._buffers, *experts._modules]
    lost += [name for name in experts._parameters if name not in (GATE, "w2_EDF", LINEAR)]
    if lost:
        raise ValueError(f"{path}: expected nothing attached to it; got {', '.join(lost)}. {_ADVICE}")
    for name, weight in experts._parameters.items():
        if type(weight) is not nn.Parameter:
            raise ValueError(
                f"{path}.{name}: expected a plain parameter; got a {type(weight).__name__}, whose own "
                "products (torchao's 8-bit tensors) would not be computed. Convert experts that are not quantized"
            )
    for name in (GATE, LINEAR):
        weight = getattr(experts, name)
        hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
        kept = [*vars(weight), *([".grad"] if weight.grad is not None else []), *(["a hook"] if hooked else [])]
        if kept:
            raise ValueError(f"{path}.{name}: expected nothing attached to it; got {', '.join(kept)}. {_ADVICE}")
    if experts.w1_EFD.requires_grad != experts.w3_EFD.requires_grad:
        raise ValueError(
            f"{path}: expected {GATE} and {LINEAR} both trained or both frozen, as they become one parameter; got "
            f"requires_grad={experts.w1_EFD.requires_grad} and {experts.w3_EFD.requires_grad}. "
            "Keep torchtitan's experts to train one of them"
        )


def partly_shared(model: nn.Module, found: dict[GroupedExperts, str]) -> None:
    """Refuse `w1_EFD` or `w3_EFD` that is shared without the other, or with a parameter of another name."""
    pairs: dict[int, tuple[int, int]] = {}
    for experts, path in found.items():
        pair = id(experts.w1_EFD), id(experts.w3_EFD)
        if pair[0] == pair[1] or any(pairs.setdefault(half, pair) != pair for half in pair):
            raise ValueError(
                f"{path}: expected {GATE} and {LINEAR} to be shared together, each under its own name; got one that "
                "is also another weight of these or other experts. Untie them first, or keep torchtitan's experts"
            )
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in pairs and not (module in found and name in (GATE, LINEAR)):
                raise ValueError(
                    f"{path}: expected no parameter that is also {GATE} or {LINEAR} of experts; got {name}. "
                    "Untie them first, or keep torchtitan's experts"
                )
