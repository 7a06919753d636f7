"""torchtitan 0.3: experts that add weight gradients straight into `main_grad` or `.grad`. See docs/torchtitan.md.

    from fusedmlp.integrations.torchtitan import FusedExpertsConverter, convert

    # before the model is built
    converters = [FusedExpertsConverter.Config()]
    model_spec = model_registry("30B-A3B", converters=converters)
    # or in a model that is built
    convert(model)

Shape suffixes are torchtitan's: `E` experts, `F` expert ffn size, `D` model dimension, `R` routed rows; `G` is `2F`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive
from torchtitan.distributed.utils import is_in_batch_invariant_mode
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

import fusedmlp
from fusedmlp.contract.steps import replaced
from fusedmlp.integrations import torchtitan_refusals as refuse
from fusedmlp.integrations.own_dtype import without_autocast
from fusedmlp.integrations.torchtitan_recipe import resolve

# Rows of w13 alternate, gate first, so that a shard of them (tensor parallelism) has both rows of each channel.
_SWIGLU = fusedmlp.Activation("swiglu", interleaved=True)
_Packed = dict[tuple[int, int], nn.Parameter]  # w13_EGD by ids of w1_EFD and w3_EFD
_PACKED, _GATE, _LINEAR = "w13_EGD", "w1_EFD", "w3_EFD"


class FusedGroupedExperts(GroupedExperts):
    """torchtitan's `GroupedExperts` with `w1` and `w3` in one parameter; same arguments, same state dict.

    `w13_EGD` holds row `f` of `w1` in row `2f` and row `f` of `w3` in row `2f + 1`. Optimizers see `w13_EGD` and
    `w2_EDF`. State dicts hold `w1_EFD`, `w2_EDF` and `w3_EFD`: `w1_EFD` and `w3_EFD` are copies there, and views as
    attributes. Computes in the dtype of its weights, also under autocast, unless it has a recipe; torchtitan's own
    experts always compute in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Config of `GroupedExperts`; initialisers and shardings of `w1_EFD` and `w3_EFD` apply to `w13_EGD`."""

        recipe: str | None = None  # see `fusedmlp.grouped_mlp`
        wgrad: str = "recipe"

        def build(self, **kwargs: Any) -> FusedGroupedExperts:
            """Build the module on the current default device."""
            built = cast(FusedGroupedExperts, GroupedExperts.Config.build(self, **kwargs))
            built._sharding_config = _packed_sharding(self.sharding_config)
            return built

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{cls.__name__}: torchtitan's MXFP8 and float8 converters cannot change fusedmlp's experts; leave them "
            'out, and use FusedExpertsConverter.Config(recipe="mxfp8")'
        )

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.num_experts = config.num_experts
        self.w13_EGD = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.recipe, self.wgrad = config.recipe, config.wgrad
        self.register_state_dict_post_hook(_unpack_state)
        self.register_load_state_dict_pre_hook(_pack_state)

    @property
    def w1_EFD(self) -> Tensor:
        """Weights of the gate: `[E, F, D]`, a view of `w13_EGD`."""
        return _halves(self.w13_EGD)[:, :, 0]

    @property
    def w3_EFD(self) -> Tensor:
        """Weights of the linear part: `[E, F, D]`, a view of `w13_EGD`."""
        return _halves(self.w13_EGD)[:, :, 1]

    def _init_self_parameters(self) -> None:
        """Initialise by torchtitan's names and in its order, so that a seed gives the weights of its own experts."""
        if self._param_init is None:
            super()._init_self_parameters()  # raises
        with torch.no_grad():
            for name in (_GATE, "w2_EDF", _LINEAR):
                weight = getattr(self, name)
                dense = weight.contiguous()  # random numbers differ in a strided view
                self._init_param(name, dense)
                weight.copy_(dense)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """`[R, D]` to `[R, D]`; rows of expert 0 first.

        Rows beyond the sum of the counts are padding, and zeros in the result.
        """
        w13_EGD, w2_EDF = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13_EGD, self.w2_EDF))
        with without_autocast(x_RD.device.type):
            y_RD = fusedmlp.grouped_mlp(
                x_RD if self.recipe else x_RD.to(w13_EGD.dtype),
                w13_EGD,
                w2_EDF,
                num_tokens_per_expert_E,
                activation=_SWIGLU,
                recipe=self.recipe,
                wgrad=self.wgrad,
                batch_invariant=is_in_batch_invariant_mode(),  # set after the build, for reinforcement learning
            )
        return y_RD.to(x_RD.dtype)


class FusedExpertsConverter(ModelConfigConverter):
    """Replaces every `GroupedExperts` in a model's config tree with `FusedGroupedExperts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Formats of the experts' GEMMs.

        Attributes:
            recipe: as in `fusedmlp.grouped_mlp`, or a name of torchao's, as torchtitan's own converter takes them:
                "mxfp8_rceil" for "mxfp8", "mxfp8_rceil_wgrad_with_hp" for "mxfp8" with wgrad "bf16".
            wgrad: as in `fusedmlp.grouped_mlp`.
        """

        recipe: str | None = None
        wgrad: str = "recipe"

    def __init__(self, config: Config) -> None:
        self.recipe, self.wgrad = resolve(config.recipe, config.wgrad)

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Convert a config tree in place and return it; a tree that is itself a config of experts is replaced.

        Raises:
            NotImplementedError: experts whose config another converter has derived from `GroupedExperts.Config`, or
                whose class is derived from `GroupedExperts`; the message names it, and nothing is converted.
            ValueError: no experts.
        """
        configs = list(model_config.traverse(GroupedExperts.Config))
        if not configs:
            raise ValueError(f"model_config: expected GroupedExperts in it; got a {type(model_config)._owner} without")
        for path, config, _, _ in configs:
            refuse.derived_config(path, cast(GroupedExperts.Config, config))
        for _, config, parent, key in configs:
            fused = derive(config, FusedGroupedExperts.Config, recipe=self.recipe, wgrad=self.wgrad)
            if parent is None:
                return fused
            if isinstance(parent, list):
                parent[cast(int, key)] = fused
            else:
                setattr(parent, cast(str, key), fused)
        return model_config


def convert(model: nn.Module, *, recipe: str | None = None, wgrad: str = "recipe") -> None:
    """Replace every `GroupedExperts` inside a built model with `FusedGroupedExperts`.

    Weights keep their values; `w1_EFD` and `w3_EFD` are copied once, into one parameter. Experts that are shared stay
    shared. Convert before the model is parallelized, and before anything is attached to the experts. An optimizer that
    was made before raises when it steps. For `recipe` and `wgrad` see `FusedExpertsConverter.Config`.

    Raises:
        NotImplementedError: experts of a class derived from `GroupedExperts`; the message names it.
        RuntimeError, TypeError: a model that is parallelized; no module.
        ValueError: an unknown recipe; no experts, or something that conversion would lose: `w1_EFD` or `w3_EFD` frozen
            or shared without the other; a gradient, hook or attribute of these two; a hook or attribute of the module.
    """
    fusedmlp.validate.module("model", model)
    paths = {module: path for path, module in model.named_modules() if isinstance(module, GroupedExperts)}
    if not paths or model in paths:
        got = "the experts themselves" if paths else f"a {type(model).__name__} without"
        raise ValueError(f"model: expected a module that contains GroupedExperts; got {got}")
    for experts, path in paths.items():
        refuse.derived(type(experts))
        if experts._parallelized or any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
            raise RuntimeError(
                f"model: expected one that is not parallelized yet; got {path} with sharded weights. Call convert() "
                "before the model is parallelized"
            )
        refuse.attached(experts, path)
    refuse.partly_shared(model, paths)
    formats, packed = resolve(recipe, wgrad), _Packed()
    converted = {experts: _converted(experts, packed, *formats) for experts in paths}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in converted:
                parent._modules[name] = converted[child]
    replaced((w for experts in paths for w in (experts.w1_EFD, experts.w3_EFD)), by="torchtitan's convert()")


def _converted(experts: GroupedExperts, packed: _Packed, recipe: str | None, wgrad: str) -> FusedGroupedExperts:
    num_experts, hidden_dim, dim = experts.w1_EFD.shape
    config = FusedGroupedExperts.Config(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        param_init=experts._param_init,
        sharding_config=experts._sharding_config,
        recipe=recipe,
        wgrad=wgrad,
    )
    with torch.device("meta"):
        fused = config.build()
    w1_EFD, w3_EFD = experts.w1_EFD, experts.w3_EFD
    pair = id(w1_EFD), id(w3_EFD)
    if pair not in packed:
        packed[pair] = nn.Parameter(_packed(w1_EFD.detach(), w3_EFD.detach()), requires_grad=w1_EFD.requires_grad)
    fused.w13_EGD, fused.w2_EDF = packed[pair], experts.w2_EDF
    fused.train(experts.training)
    return fused


def _packed(w1_EFD: Tensor, w3_EFD: Tensor) -> Tensor:
    return torch.stack([w1_EFD, w3_EFD], 2).flatten(1, 2)


def _halves(w13_EGD: Tensor) -> Tensor:
    """View as `[E, F, 2, D]`, gate first. Dimension 2 is never sharded, so that either half can be written to."""
    halves: Tensor = w13_EGD.unflatten(1, (-1, 2))
    return halves


def _unpack_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    halves = _halves(state.pop(prefix + _PACKED))
    state[prefix + _GATE], state[prefix + _LINEAR] = (halves[:, :, i].contiguous() for i in range(2))


def _pack_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + _GATE in state and prefix + _LINEAR in state:
        state[prefix + _PACKED] = _packed(state.pop(prefix + _GATE), state.pop(prefix + _LINEAR))


def _packed_sharding(sharding: ShardingConfig | None) -> ShardingConfig | None:
    if sharding is None:
        return None
    states = dict(sharding.state_shardings)
    gate, linear = states.pop(_GATE), states.pop(_LINEAR)
    if gate != linear:
        raise ValueError(f"sharding_config: expected one placement for {_GATE} and {_LINEAR}; got {gate} and {linear}")
    return replace(sharding, state_shardings=states | {_PACKED: gate})
