"""PEFT's LoRA on the weights of Transformers' experts (`target_parameters`), computed as `fusedmlp.LoRA`.

PEFT adds `B A` to the weights of all experts in every forward. Where fusedmlp computes the experts and one adapter is
active, they take A and B instead. `register` of `fusedmlp.integrations.transformers` installs this. See docs/lora.md.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import local
from typing import Any

from torch import nn

from fusedmlp import validate
from fusedmlp.lora import MOST, LoRA

NAME = "fusedmlp"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class _Handed(local):
    """Adapters that a `ParamWrapper` handed over in this thread, until the experts take them."""

    def __init__(self) -> None:
        self.adapters: dict[tuple[nn.Module, str], LoRA] = {}


_handed = _Handed()


class _InDtypeOfA:
    """Replaces a `ParamWrapper` as `self` of its `get_delta_factors`, which casts to the dtype of the parameter."""

    def __init__(self, wrapper: Any, adapter: str) -> None:
        self._wrapper, self._adapter = wrapper, adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def get_param(self) -> Any:
        return self._wrapper.lora_A[self._adapter].weight


def uses_interface(module: nn.Module) -> bool:
    """Whether Transformers' decorator made the module's class."""
    return hasattr(module, "has_gate") and hasattr(module, "is_concatenated")


def take(experts: nn.Module) -> dict[str, LoRA]:
    """Return the adapters that were handed to these experts for this forward, by the name of the weight."""
    mine = [key for key in _handed.adapters if key[0] is experts]
    return {key[1]: _handed.adapters.pop(key) for key in mine}


@cache
def install() -> None:
    """Replace PEFT's `ParamWrapper._activate_lora`, if PEFT is installed and has it."""
    if find_spec("peft") is None:
        return
    from peft.tuners.lora import layer

    wrapper_class: Any = getattr(layer, "ParamWrapper", None)
    original = getattr(wrapper_class, "_activate_lora", None)
    if original is None:
        return

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [name for name in active_adapters if name in self.lora_A]
        if not adapters or _why_dense(self, adapters) is not None:
            with original(self, active_adapters):
                yield
            return
        key = self.get_base_layer(), self.parameter_name
        _handed.adapters[key] = _adapter(self, adapters[0])
        try:
            yield
            if key in _handed.adapters:
                raise RuntimeError(
                    f"{type(key[0]).__name__}: its forward did not take the adapter of {key[1]}, which would have no "
                    "effect; use another experts_implementation for this model"
                )
        finally:
            _handed.adapters.pop(key, None)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (replaced := _replaced(self)) is not None:
            raise NotImplementedError(replaced)
        return nn.Module.__call__(self, *args, **kwargs)

    wrapper_class._activate_lora = activate
    wrapper_class.__call__ = call


def report(model: nn.Module) -> dict[str, str]:
    """Say how LoRA of each layer of experts is computed, by the name of the layer.

    For each adapted weight: "fused", or "dense", where PEFT adds `B A` to the weights, and the reason. A layer without
    adapters: "no adapter on these experts".
    """
    layer = sys.modules.get("peft.tuners.lora.layer")
    wrapper_class = getattr(layer, "ParamWrapper", ())
    words: dict[nn.Module, list[str]] = {}
    for wrapper in reversed([*model.modules()]):  # an outer wrapper is of a later weight
        if isinstance(wrapper, wrapper_class):
            words.setdefault(wrapper.get_base_layer(), []).append(f"{wrapper.parameter_name}: {_word(wrapper)}")
    return {
        re.sub(r"(\.base_layer)+$", "", name): ", ".join(words.get(module, ["no adapter on these experts"]))
        for name, module in model.named_modules()
        if uses_interface(module)
    }


def warn_of_none(model: nn.Module) -> None:
    """Warn if a model has LoRA, but frozen experts without."""
    layer: Any = sys.modules.get("peft.tuners.lora.layer")
    if layer is None or not any(isinstance(module, layer.LoraLayer) for module in model.modules()):
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = report(model)
    without = [
        n for n, word in found.items() if word.startswith("no ") and not any(t.startswith(f"{n}.") for t in trained)
    ]
    if without:
        warnings.warn(
            f"{len(without)} of {len(found)} layers of experts have no adapter, and are not trained, for example "
            f"{without[0]}; if they should be, name their weights in LoraConfig(target_parameters=[...])",
            stacklevel=3,
        )


def _adapter(wrapper: Any, name: str) -> LoRA:
    """Return PEFT's `lhs @ rhs`, of the shape of the stored weights, as A and B."""
    lhs, rhs, scaling = type(wrapper).get_delta_factors(_InDtypeOfA(wrapper, name), name)
    return LoRA(lhs.mT, rhs.mT, scaling) if wrapper.get_base_layer().is_transposed else LoRA(rhs, lhs, scaling)


def _is_fused(wrapper: Any) -> bool:
    experts = wrapper.get_base_layer()
    return uses_interface(experts) and experts.config._experts_implementation == NAME


def _why_dense(wrapper: Any, adapters: list[str]) -> str | None:
    """Tell why PEFT adds `B A` to these weights; None where fusedmlp takes the adapter."""
    if not _is_fused(wrapper):
        return "fusedmlp does not compute these experts"
    if not hasattr(wrapper, "get_delta_factors"):
        _warn_of_old()
        return "PEFT is older than 0.21"
    if len(adapters) != 1:
        return f"{len(adapters)} adapters are active"
    if wrapper.parameter_name not in _WEIGHTS:
        return "no weight of a product"
    if wrapper.r[adapters[0]] > MOST:
        return f"rank {wrapper.r[adapters[0]]} is more than {MOST}"
    weight = wrapper.get_param()
    if weight.dtype not in validate.FLOAT_DTYPES:
        return f"weights in {weight.dtype}"
    if weight.device.type not in ("cpu", "meta"):
        return "kernels of an MLP take no adapters yet"
    return None


def _word(wrapper: Any) -> str:
    adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if (replaced := _replaced(wrapper)) is not None:
        return f"refused ({replaced})"
    if wrapper.merged or wrapper.disable_adapters or not adapters:
        return "merged" if wrapper.merged else "not active"
    reason = _why_dense(wrapper, adapters)
    return "fused" if reason is None else f"dense ({reason})"


def _replaced(wrapper: Any) -> str | None:
    """Refuse a forward that is not PEFT's, which may hand adapters to experts of its own only."""
    owner: str = type(wrapper).forward.__module__
    if owner.partition(".")[0] == "peft" or not _is_fused(wrapper):
        return None
    return (
        f"{wrapper.parameter_name}: expected PEFT's own ParamWrapper.forward; got one of {owner}, whose adapters "
        "experts of fusedmlp may not see; use another experts_implementation for this model"
    )


@cache
def _warn_of_old() -> None:
    warnings.warn("LoRA on experts: a PEFT older than 0.21 adds B A to all weights, in every forward", stacklevel=5)
