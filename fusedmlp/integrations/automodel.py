"""NeMo Automodel 0.7: its experts with weight gradients that are added into `main_grad` or `.grad` by the GEMM.

    from fusedmlp.integrations.automodel import convert

    convert(model)  # as NeMoAutoModelForCausalLM.from_pretrained returns it

Parameters, state dicts, router and dispatcher stay Automodel's own. See docs/automodel.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from nemo_automodel.components.moe.experts import (
    GroupedExperts,
    GroupedExpertsDeepEP,
    GroupedExpertsTE,
    get_expert_activation_for_deepep,
)
from nemo_automodel.components.moe.mok_experts import GroupedExpertsMoK
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fusedmlp
from fusedmlp import validate
from fusedmlp.contract.checks import check_flag
from fusedmlp.recipe import NAMES

_OTHERS = (GroupedExpertsTE, GroupedExpertsMoK)
_KEEP = "Keep Automodel's experts for this model"


class FusedGroupedExperts(GroupedExperts):
    """Automodel's `GroupedExperts`, computed by `fusedmlp.moe_experts`; `convert` makes them."""

    def forward(self, x: Tensor, token_mask: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Tokens `[T, H]` to `[T, H]`; a mask `[T]` of valid tokens, routing weights and expert ids `[T, K]`."""
        weight, tokens, dtype = self.gate_and_up_projs, len(x), x.dtype
        group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if self.n_routed_experts % size:
            got = f"got {self.n_routed_experts}"
            raise ValueError(f"n_routed_experts: expected a multiple of {size}, the ranks that share them; {got}")
        if size > 1 and self.formats["batch_invariant"]:
            raise ValueError(
                "batch_invariant: expected experts on one rank, or a dispatcher; got an all-reduce of what "
                f"{size} ranks compute, the order of whose additions depends on the number of tokens"
            )
        if size > 1:
            x, weights, indices, token_mask, lengths = self._gather_ep_inputs(
                x, token_mask, weights, indices, ep_group=group, ep_size=size
            )
        local = indices - rank * (self.n_routed_experts // size)  # others are below 0, or too large: ignored
        ids = local.masked_fill(~token_mask[:, None], -1)
        fc1, fc2, rest = _arguments(self, x.dtype)
        y: Tensor = fusedmlp.moe_experts(x, ids, weights, fc1, fc2, **rest)
        if size > 1:
            y = differentiable.all_reduce(y.float(), op=dist.ReduceOp.SUM, group=group)
            y = y.narrow(0, sum(lengths[:rank]), tokens).contiguous()
        return y.to(dtype)


class FusedGroupedExpertsDeepEP(GroupedExpertsDeepEP):
    """Automodel's `GroupedExpertsDeepEP` (DeepEP, HybridEP, UCCL-EP), computed by `grouped_mlp` after the dispatch."""

    def forward(self, x: Tensor, token_mask: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """As in `FusedGroupedExperts`."""
        rows, counts, probs = self._dispatch_tokens(x, token_mask, weights, indices)
        fc1, fc2, rest = _arguments(self, rows.dtype)
        y = fusedmlp.grouped_mlp(rows, fc1, fc2, counts.to(rows.device, non_blocking=True), probs=probs, **rest)
        combined: Tensor = self.token_dispatcher.token_unpermutation(y)
        return combined


_FUSED = {GroupedExperts: FusedGroupedExperts, GroupedExpertsDeepEP: FusedGroupedExpertsDeepEP}


def convert(
    model: nn.Module, *, recipe: str | None = None, wgrad: str = "recipe", batch_invariant: bool = False
) -> None:
    """Let fusedmlp compute every `GroupedExperts` and `GroupedExpertsDeepEP` inside a model.

    Only the class of these modules changes. Parameters, hooks and attributes stay, so that the model may be
    parallelized already, and its optimizer made.

    Args:
        model: before its first forward, if it is compiled.
        recipe: as in `fusedmlp.grouped_mlp`. None: compute in the dtype of the activations, as Automodel does.
        wgrad: as in `fusedmlp.grouped_mlp`.
        batch_invariant: likewise. Forward raises ValueError where an all-reduce adds up what several ranks computed, as
            the order of its additions depends on the number of tokens; a dispatcher does not need it.

    Raises:
        NotImplementedError: experts that fusedmlp cannot compute; the message names them. Nothing is converted then.
        TypeError: the model is no module.
        ValueError: no experts; an unknown recipe or wgrad.
    """
    validate.module("model", model)
    validate.recipe(recipe, wgrad)
    check_flag("batch_invariant", batch_invariant)
    known = (*_FUSED, *_OTHERS)
    by_path = {path: module for path, module in model.named_modules() if isinstance(module, known)}
    if not by_path:
        raise ValueError(f"model: expected a module that contains GroupedExperts; got a {type(model).__name__} without")
    made = [(experts, _fused_class(path, experts), _activation(path, experts)) for path, experts in by_path.items()]
    for experts, fused, activation in made:
        experts.__class__ = fused
        experts.formats = {
            "activation": activation,
            "recipe": recipe,
            "wgrad": wgrad,
            "batch_invariant": batch_invariant,
        }


def _fused_class(path: str, experts: Any) -> type:
    """The class that computes by fusedmlp; raises for other experts than Automodel's own."""
    owner = type(experts)
    bases = owner.__bases__ if FSDPModule in owner.__bases__ else (owner,)
    plain = bases[-1]
    if plain in _FUSED.values():
        return owner
    if plain not in _FUSED:
        raise NotImplementedError(
            f"{path}: expected experts of class GroupedExperts or GroupedExpertsDeepEP; got {plain.__name__}, which "
            f'computes by other means. {_KEEP}, or build it with BackendConfig(experts="torch_mm") and without LoRA'
        )
    if experts.use_mxfp8:
        raise NotImplementedError(
            f'{path}: expected BackendConfig(experts="torch_mm"); got "torch_mm_mxfp8", whose GEMMs fusedmlp does not '
            'call: convert(model, recipe="mxfp8") has its own'
        )
    if "forward" in vars(experts):
        raise NotImplementedError(f"{path}: expected the forward of its class; got one set on the module. {_KEEP}")
    if len(bases) == 1:
        return _FUSED[plain]
    kept = {name: value for name, value in vars(owner).items() if name not in ("__dict__", "__weakref__")}
    return type(f"FSDP{_FUSED[plain].__name__}", (FSDPModule, _FUSED[plain]), kept)


def _activation(path: str, experts: Any) -> fusedmlp.Activation:
    config = experts.config
    activation = vars(experts).get("expert_activation_grouped") or experts.expert_activation
    if not _are_one(activation, get_expert_activation_for_deepep(config)):
        raise NotImplementedError(
            f"{path}: expected the activation of its config, {config.expert_activation!r}; got {activation}, which the "
            f"model has set. {_KEEP}"
        )
    alpha, limit = config.activation_alpha, config.activation_limit
    if config.expert_activation == "swiglu":
        return fusedmlp.Activation("swiglu", limit=config.swiglu_limit if config.swiglu_limit > 0 else None)
    if config.expert_activation == "swigluoai":
        return fusedmlp.Activation("swiglu", alpha=alpha, limit=limit if limit > 0 else None, linear_offset=1.0)
    if config.expert_activation == "quick_geglu":
        return fusedmlp.Activation("quick_geglu", interleaved=True, alpha=alpha, limit=limit, linear_offset=1.0)
    return fusedmlp.Activation({"geglu": "geglu_tanh"}.get(config.expert_activation, config.expert_activation))


def _are_one(one: Any, other: Any) -> bool:
    """Compare two activation functions, and the options that are bound to them."""
    if isinstance(one, partial) and isinstance(other, partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return one is other


def _arguments(experts: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Both weights on this rank, and the rest of a layer's arguments.

    Automodel casts weights to the dtype of the activations. Here float32 weights are cast inside of the layer, where
    their gradients are added unrounded.
    """
    weight_dtype, formats = experts.gate_and_up_projs.dtype, experts.formats
    recipe = formats["recipe"]
    if recipe is None and weight_dtype == torch.float32:
        recipe = NAMES.get(dtype)
    cast = recipe is None and weight_dtype != dtype

    def local(name: str) -> Any:
        tensor = getattr(experts, name)
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return tensor.to(dtype) if cast and tensor is not None else tensor

    biases = {"fc1_bias": local("gate_up_proj_bias"), "fc2_bias": local("down_proj_bias")}
    rest = formats | biases | {"recipe": recipe, "weight_layout": "in_out"}
    return local("gate_and_up_projs"), local("down_projs"), rest
