"""Megatron-core: `FusedGroupedMLP`, a drop-in for its `TEGroupedMLP`.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from fusedmlp.integrations.megatron import with_fused_experts

    layer_spec = with_fused_experts(get_gpt_layer_with_transformer_engine_spec(num_experts=64, moe_grouped_gemm=True))

State dicts, plain and sharded, are those of `TEGroupedMLP`. See `megatron_config.py` for the config fields that are
refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from fusedmlp import environment
from fusedmlp.contract.destination import Mode
from fusedmlp.contract.dummy import set_dummy_wgrad
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.functional import grouped_mlp
from fusedmlp.integrations import megatron_config
from fusedmlp.integrations.megatron_fsdp import keep_what_fsdp_adds_up


class ExpertLinear(MegatronModule):
    """The parameters of one linear layer of all local experts: `weight{i}` `[out, in]` and `bias{i}` `[out]`.

    Args:
        num_local_experts: experts on this rank.
        in_features: of the whole layer, before tensor parallelism.
        out_features: likewise.
        parallel: "column" or "row": the dimension, out or in, that expert tensor parallelism divides.
        config: Megatron's.
        init_method: fills one weight.
        groups: `ep`, `expt_tp` and `expt_dp` are used.
    """

    def __init__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        parallel: str,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.num_local_experts, self.partition_dim, self.groups = num_local_experts, int(parallel == "row"), groups
        self.tensor_model_parallel = True  # by this and partition_dim, Megatron-FSDP knows how weights are divided
        self.use_bias: bool = config.add_bias_linear
        self.delay_wgrad_compute: bool = config.delay_wgrad_compute
        self._hooks: list[Callable[[], object]] = []
        self.register_load_state_dict_pre_hook(_drop_other_extra_states)
        full = [out_features, in_features]
        shape = list(full)
        tp_size = groups.expt_tp.size()
        if shape[self.partition_dim] % tp_size:
            raise ValueError(
                f"{parallel} parallel experts: expected {shape[self.partition_dim]} features to divide by the expert "
                f"tensor parallel size {tp_size}"
            )
        shape[self.partition_dim] //= tp_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for i in range(num_local_experts):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            if config.perform_initialization:
                self._initialize(weight, full, init_method)
            self.register_parameter(f"weight{i}", self._mark(weight, is_partitioned=True))
            if self.use_bias:
                bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype, device=device))
                self.register_parameter(f"bias{i}", self._mark(bias, is_partitioned=self.partition_dim == 0))

    def _initialize(self, weight: Tensor, full: list[int], init_method: Callable[[Tensor], object]) -> None:
        if not self.config.use_cpu_initialization:
            _initialize_affine_weight_gpu(weight, init_method, self.partition_dim, is_expert=True)
            return
        _initialize_affine_weight_cpu(
            weight,
            *full,
            weight.shape[self.partition_dim],
            self.partition_dim,
            init_method,
            params_dtype=self.config.params_dtype,
            rank=self.groups.expt_tp.rank(),
            world_size=self.groups.expt_tp.size(),
            skip_set_tensor_parallel_attributes=True,
        )

    def _mark(self, param: Any, *, is_partitioned: bool) -> torch.nn.Parameter:
        """Attributes by which Megatron's DDP, optimizer and gradient norm know what a parameter is."""
        config = self.config
        # True: reduced over the dense layers' data-parallel group, which is then the experts' too.
        param.allreduce = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        param.tensor_model_parallel = is_partitioned
        if is_partitioned:
            param.partition_dim, param.partition_stride = self.partition_dim, 1
        if self.delay_wgrad_compute and param.dim() == 2:  # bias gradients are never delayed
            param.skip_backward_post_hook = True
        marked: torch.nn.Parameter = param
        return marked

    def group(self, name: str) -> list[Tensor]:
        """The `"weight"`s or `"bias"`es of all experts."""
        return [getattr(self, f"{name}{i}") for i in range(self.num_local_experts)]

    # Part of TransformerEngine's state dicts; empty unless there is fp8 state.
    def get_extra_state(self) -> Tensor:
        """No elements."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accepts the empty state of a layer without fp8."""
        if isinstance(state, Tensor) and state.numel():
            raise ValueError(f"_extra_state: expected no fp8 state; got {state.numel()} bytes")

    def forward(self) -> None:
        """Nothing, but calling a layer runs the hooks with which an owner gathers its weights beforehand."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Called by Megatron's DDP for every weight with a delayed gradient."""
        self._hooks.append(hook)

    def refuse_owners_that_do_not_wait(self) -> None:
        """Raise if the weights' owner is going to reduce their gradients before the delayed ones are there."""
        weight: Any = self.get_parameter("weight0")
        if not self.delay_wgrad_compute:
            return
        if hasattr(weight, "__fsdp_param__"):
            raise RuntimeError(
                "config.delay_wgrad_compute: expected False under Megatron-FSDP, which reduces gradients when backward "
                "ends, before backward_dw() computes them"
            )
        if hasattr(weight, "grad_added_to_main_grad") and not self._hooks:
            raise RuntimeError(
                "config.delay_wgrad_compute: expected DistributedDataParallelConfig(delay_wgrad_compute=True) too; "
                "without it DDP reduces gradients when backward ends, before backward_dw() computes them"
            )

    def fire_hooks(self) -> None:
        """Tell Megatron's DDP that the gradients of one micro-batch are in `main_grad`, or in `.grad`."""
        if self._hooks:
            # The hook of an earlier micro-batch took the dummy away, and DDP asserts that there is one.
            for weight in self.group("weight"):
                if weight.requires_grad:
                    set_dummy_wgrad(weight, state_of(weight), environment.dense_dummy())
        for hook in self._hooks:
            hook()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One sharded tensor for each expert, under the keys of `SequentialMLP`, as `TEGroupedMLP` has them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        assert metadata is not None
        singleton = metadata.get("singleton_local_shards", False)
        first, total = self.groups.ep.rank() * self.num_local_experts, self.groups.ep.size() * self.num_local_experts
        names = ["weight", "bias"] if self.use_bias else ["weight"]
        result: dict[str, Any] = {}
        for i in range(self.num_local_experts):
            state = {f"{i}.{name}": getattr(self, f"{name}{i}") for name in names}
            state[f"{i}._extra_state"] = self.get_extra_state()
            axes = {f"{i}.weight": self.partition_dim} | ({f"{i}.bias": 0} if self.partition_dim == 0 else {})
            offsets = sharded_offsets if singleton else (*sharded_offsets, (len(sharded_offsets), first + i, total))
            shards = make_sharded_tensors_for_checkpoint(
                state, "", axes, offsets, tp_group=self.groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
            )
            replace_prefix_for_sharding(shards, f"{i}.", f"{first + i}.{prefix}" if singleton else prefix)
            for name in names:
                result[f"{prefix}{name}{i}"] = shards[f"{i}.{name}"]
            result[f"{prefix}_extra_state{i or ''}"] = shards[f"{i}._extra_state"]
        for shard in result.values():  # (pipeline, tensor, data): experts are replicated over their own data group
            shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
        return result


def _drop_other_extra_states(module: ExpertLinear, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Sharded checkpoints hold one for each expert; modules have one."""
    for i in range(1, module.num_local_experts):
        module.set_extra_state(state_dict.pop(f"{prefix}_extra_state{i}", None))


class FusedGroupedMLP(TEGroupedMLP):
    """Megatron's experts, whose weight gradients the kernels add into `main_grad`.

    Takes the place of `TEGroupedMLP`, whose state dicts it shares, without TransformerEngine. `tokens_per_expert` is
    not copied to the host.

    Args:
        num_local_experts: experts on this rank.
        config: Megatron's; see `megatron_config.py` for what is refused.
        submodules: ignored: the linear layers are ours.
        pg_collection: process groups; default: those of `parallel_state`.
        name: ignored.
        fuse_microbatches: the first `backward_dw()` computes the weight gradients of every backward before it, in one
            launch for each weight, and later ones find theirs done.

    Raises:
        ValueError: a config field that is not supported.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        *,
        fuse_microbatches: bool = False,
    ) -> None:
        MegatronModule.__init__(self, config)  # not TEGroupedMLP's, which builds TransformerEngine's layers
        megatron_config.refuse_unsupported(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
        self.num_local_experts, self.ep_group, self.tp_group = num_local_experts, groups.ep, groups.expt_tp
        self.activation = megatron_config.activation(config)
        hidden: int = getattr(config, "moe_latent_size", None) or config.hidden_size
        ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
        fc1_size = 2 * ffn if config.gated_linear_unit else ffn
        fc1, fc2 = config.init_method, config.output_layer_init_method
        self.linear_fc1 = ExpertLinear(num_local_experts, hidden, fc1_size, "column", config, fc1, groups)
        self.linear_fc2 = ExpertLinear(num_local_experts, ffn, hidden, "row", config, fc2, groups)
        self._queue = WgradQueue(fuse_microbatches=fuse_microbatches) if config.delay_wgrad_compute else None

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows `[R, H]` sorted by expert, counts `[E]` and probabilities `[R]` to `([R, H], None)`."""
        x: Tensor = permuted_local_hidden_states
        # With moe_router_dtype="fp64" they come in float64, and autograd returns their gradient so.
        probs: Tensor | None = permuted_probs.float() if permuted_probs.dtype == torch.float64 else permuted_probs
        linears = (self.linear_fc1, self.linear_fc2)
        if torch.is_grad_enabled():
            for linear in linears:
                linear.refuse_owners_that_do_not_wait()
        for linear in linears:
            linear()
        under_fsdp = torch.is_grad_enabled() and hasattr(self.linear_fc1.weight0, "__fsdp_param__")
        weights = [weight for linear in linears for weight in linear.group("weight")]
        if under_fsdp:
            keep_what_fsdp_adds_up(weights)
        if self.config.moe_apply_probs_on_input:
            x, probs = (permuted_probs.unsqueeze(-1) * x).to(x.dtype), None
        mode: Mode = "main_grad" if self.config.gradient_accumulation_fusion else "off"
        fc1_bias, fc2_bias = [linear.group("bias") if linear.use_bias else None for linear in linears]
        y = grouped_mlp(
            x,
            weights[: self.num_local_experts],
            weights[self.num_local_experts :],
            tokens_per_expert,
            probs=probs,
            fc1_bias=fc1_bias,
            fc2_bias=fc2_bias,
            activation=self.activation,
            accumulate_wgrad=mode,
            wgrad_queue=self._queue,
        )
        if under_fsdp and y.requires_grad:
            y.register_hook(lambda _: keep_what_fsdp_adds_up(weights))
        return y, None

    def backward_dw(self) -> None:
        """The weight gradients that `delay_wgrad_compute` put off in the oldest backward: fc2's, then fc1's."""
        if self._queue is None:
            return
        if self._queue.fuse_microbatches:
            self._queue.run()
        else:
            self._queue.run_oldest()
        self.linear_fc2.fire_hooks()
        self.linear_fc1.fire_hooks()


def with_fused_experts(layer_spec: Any) -> Any:
    """A copy of a Megatron layer's spec (or a block's, or a list of them) with `FusedGroupedMLP` as experts.

    Layers without experts stay as they are.

    Raises:
        TypeError: something else, or no layer has experts.
    """
    replaced, count = _replace_experts(layer_spec)
    if count == 0:
        raise TypeError(f"layer_spec: expected a Megatron spec that holds a MoELayer; got {layer_spec!r}"[:300])
    return replaced


def _replace_experts(spec: Any) -> tuple[Any, int]:
    if isinstance(spec, MoESubmodules):
        return dataclasses.replace(spec, experts=FusedGroupedMLP), 1
    if isinstance(spec, list | tuple):
        parts = [_replace_experts(part) for part in spec]
        return type(spec)(part for part, _ in parts), sum(count for _, count in parts)
    if isinstance(spec, partial):
        keywords = {key: _replace_experts(value) for key, value in spec.keywords.items()}
        made = partial(spec.func, *spec.args, **{key: value for key, (value, _) in keywords.items()})
        return made, sum(count for _, count in keywords.values())
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type | MLPSubmodules):
        fields = {f.name: _replace_experts(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        replaced: Any = copy.copy(spec)
        for name, (value, count) in fields.items():
            if count:
                setattr(replaced, name, value)
        return replaced, sum(count for _, count in fields.values())
    return spec, 0
