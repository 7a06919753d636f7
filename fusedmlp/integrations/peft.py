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
from importlib import import_module
from importlib.util import find_spec
from threading import local
from typing import Any

from torch import nn

from fusedmlp import validate
from fusedmlp.lora import MOST, LoRA

_NONE = "no adapter on these experts"


class _Handed(local):
    """Adapters that a `ParamWrapper` handed over in this thread, until its forward ends; and those that were taken."""

    def __init__(self) -> None:
        self.adapters: dict[tuple[nn.Module, str], LoRA] = {}
        self.taken: dict[tuple[nn.Module, str], bool] = {}


_handed = _Handed()


def uses_interface(module: nn.Module) -> bool:
    """Whether Transformers' decorator made the module's class."""
    return hasattr(module, "has_gate") and hasattr(module, "is_concatenated")


def take(experts: nn.Module) -> dict[str, LoRA]:
    """Return the adapters that were handed to these experts, by the name of the weight.

    They stay until the wrapper's forward ends, as some compute the experts in several calls, of parts of the tokens.
    """
    keys = [key for key in _handed.adapters if key[0] is experts]
    for key in keys:
        _handed.taken[key] = True
    return {key[1]: _handed.adapters[key] for key in keys}


@cache
def install() -> None:
    """Replace `_activate_lora` of PEFT's `ParamWrapper`, if PEFT is installed and has it."""
    layer = import_module("peft.tuners.lora.layer") if find_spec("peft") else None
    wrapper_class: Any = getattr(layer, "ParamWrapper", None)
    if not hasattr(wrapper_class, "_activate_lora"):
        return
    original = wrapper_class._activate_lora

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [name for name in active_adapters if name in self.lora_A]
        if not adapters or _why_dense(self, adapters):
            with original(self, active_adapters):
                yield
            return
        experts, weight = key = self.get_base_layer(), self.parameter_name
        _handed.adapters[key] = _factors(self, adapters[0])
        try:
            yield
            if key not in _handed.taken:
                name = type(experts).__name__
                raise RuntimeError(f"{name}: its forward did not take the adapter of {weight}, which had no effect")
        finally:
            _handed.adapters.pop(key, None)
            _handed.taken.pop(key, None)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if owner := _foreign(self):
            raise NotImplementedError(
                f"{self.parameter_name}: expected PEFT's own ParamWrapper.forward; got one of {owner}, which may keep "
                "adapters from fusedmlp; use another experts_implementation for this model"
            )
        return nn.Module.__call__(self, *args, **kwargs)

    wrapper_class._activate_lora = activate
    wrapper_class.__call__ = call


def report(model: nn.Module) -> dict[str, str]:
    """Say how LoRA of each layer of experts is computed, by the name of the layer.

    "fused", or "dense" and why PEFT adds `B A` to the weights; "no adapter on these experts". See docs/lora.md.
    """
    wrapper_class = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
    words: dict[nn.Module, list[str]] = {}
    for wrapper in reversed([*model.modules()]):  # an outer wrapper is of a later weight
        if isinstance(wrapper, wrapper_class):
            words.setdefault(wrapper.get_base_layer(), []).append(f"{wrapper.parameter_name}: {_word(wrapper)}")
    return {
        re.sub(r"(\.base_layer)+$", "", name): ", ".join(words.get(module, [_NONE]))
        for name, module in model.named_modules()
        if uses_interface(module)
    }


def warn_of_none(model: nn.Module) -> None:
    """Warn if a model has LoRA, but frozen experts without."""
    found = report(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    without = [name for name in found if found[name] == _NONE and not any(t.startswith(f"{name}.") for t in trained)]
    if without and any("lora_" in name for name in trained):
        text = f"{len(without)} of {len(found)} layers of experts have no adapter, and are not trained: {without[0]}, "
        text += "for example; name their weights in LoraConfig(target_parameters=[...]) to train them"
        warnings.warn(text, stacklevel=3)


class _InDtypeOfA:
    """Replaces a `ParamWrapper` as `self` of its `get_delta_factors`, which casts to the dtype of the parameter."""

    def __init__(self, wrapper: Any, adapter: str) -> None:
        self._wrapper, self._adapter = wrapper, adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def get_param(self) -> Any:
        return self._wrapper.lora_A[self._adapter].weight


def _factors(wrapper: Any, adapter: str) -> LoRA:
    """Return PEFT's factors as A and B; their product has the shape of the stored weights."""
    left, right, scaling = type(wrapper).get_delta_factors(_InDtypeOfA(wrapper, adapter), adapter)
    stored_in_out = wrapper.get_base_layer().is_transposed
    return LoRA(left.mT, right.mT, scaling) if stored_in_out else LoRA(right, left, scaling)


def _is_fused(wrapper: Any) -> bool:
    experts = wrapper.get_base_layer()
    return uses_interface(experts) and experts.config._experts_implementation == "fusedmlp"


def _foreign(wrapper: Any) -> str:
    """Name the module of a forward that is not PEFT's and may hand adapters to experts of its own; "" without."""
    owner: str = type(wrapper).forward.__module__
    return owner if _is_fused(wrapper) and owner.partition(".")[0] != "peft" else ""


def _why_dense(wrapper: Any, adapters: list[str]) -> str:
    """Tell why PEFT adds `B A` to these weights; "" where fusedmlp takes the adapter."""
    if not _is_fused(wrapper):
        return "fusedmlp does not compute these experts"
    if not hasattr(wrapper, "get_delta_factors"):
        warnings.warn("LoRA on experts: a PEFT older than 0.21 adds B A to all weights in a forward", stacklevel=5)
        return "PEFT is older than 0.21"
    if len(adapters) != 1:
        return f"{len(adapters)} adapters are active"
    weight = wrapper.get_param()
    if weight.dim() != 3 or weight.dtype not in validate.FLOAT_DTYPES:
        return f"no weights in 16 or 32 bits, but {weight.dim()}-dimensional, {weight.dtype}"
    of_factors = {factors[adapters[0]].weight.dtype for factors in (wrapper.lora_A, wrapper.lora_B)}
    if len(of_factors) > 1 or not of_factors <= {*validate.FLOAT_DTYPES}:
        return f"A and B in {' and '.join(sorted(map(str, of_factors)))}"
    rank = wrapper.r[adapters[0]]
    return f"rank {rank}, more than {MOST}" if rank > MOST else ""


def _word(wrapper: Any) -> str:
    adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.merged or wrapper.disable_adapters or not adapters:
        return "merged" if wrapper.merged else "not active"
    if owner := _foreign(wrapper):
        return f"refused (ParamWrapper.forward is one of {owner})"
    return f"dense ({reason})" if (reason := _why_dense(wrapper, adapters)) else "fused"
