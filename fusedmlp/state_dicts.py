"""State dicts of `GroupedLinear`: those of the packed form and of the unpacked form load into each other."""

from __future__ import annotations

from typing import Any

import torch


def expert_names(group: str, num_experts: int) -> list[str]:
    """Names of one parameter for each expert: `weight0`, `weight1`, ..."""
    return [f"{group}{e}" for e in range(num_experts)]


def convert(module: Any, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object) -> None:
    """Before loading: turn the packed form of a state dict into the module's unpacked form, or the reverse."""
    if metadata.get("assign_to_params_buffers"):
        for name, parameter in module.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                raise RuntimeError(
                    f"load_state_dict(assign=True): expected parameters without main_grad, as they are replaced; got "
                    f"{prefix}{name} with one (use assign=False, or load first and then make the MainGradBuffer)"
                )
    for group in module._groups:
        packed = prefix + group
        split = [prefix + name for name in expert_names(group, module.num_experts)]
        if module.packed and packed not in state_dict and all(name in state_dict for name in split):
            state_dict[packed] = torch.stack([state_dict.pop(name) for name in split])
        elif not module.packed and packed in state_dict and split[0] not in state_dict:
            tensor = state_dict.pop(packed)
            if tensor.shape[0] == module.num_experts:
                state_dict.update(zip(split, tensor.unbind(0), strict=True))
            else:
                state_dict[packed] = tensor  # torch reports it as unexpected
