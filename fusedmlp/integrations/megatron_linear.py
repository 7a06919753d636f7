"""One linear layer of every expert as Megatron-core keeps it: parameters, hooks, sharded state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from fusedmlp import environment
from fusedmlp.contract.dummy import set_dummy_wgrad
from fusedmlp.contract.parameter_state import state_of


class ExpertLinear(MegatronModule):
    """The parameters of one linear layer of all local experts: `weight{i}` `[out, in]` and `bias{i}` `[out]`.

    Args:
        num_local_experts: experts on this rank.
        in_features: of the whole layer, before tensor parallelism.
        out_features: likewise.
        parallel: "column" if expert tensor parallelism divides `out`, "row" if it divides `in`.
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
        self.tensor_model_parallel = True  # with partition_dim, tells Megatron-FSDP how weights are divided
        self.use_bias: bool = config.add_bias_linear
        self.delay_wgrad_compute: bool = config.delay_wgrad_compute
        self._hooks: list[Callable[[], object]] = []
        self.register_load_state_dict_pre_hook(_drop_other_extra_states)
        full = [out_features, in_features]
        shape = list(full)
        tp_size = groups.expt_tp.size()
        if shape[self.partition_dim] % tp_size:
            raise ValueError(
                f"{parallel} parallel experts: expected a multiple of expert_tensor_parallel_size={tp_size} features; "
                f"got {shape[self.partition_dim]}"
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
        """Set the attributes that Megatron's DDP, optimizer and gradient norm read of a parameter; return it."""
        config = self.config
        # True: reduced over the data-parallel group of the dense layers, which is then also that of the experts.
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
        """Return the `"weight"` or the `"bias"` of every expert, in order."""
        return [getattr(self, f"{name}{i}") for i in range(self.num_local_experts)]

    # Part of TransformerEngine's state dicts; empty unless there is fp8 state.
    def get_extra_state(self) -> Tensor:
        """Return the state of a layer without fp8: a tensor without elements."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept the empty state of a layer without fp8; raise ValueError for any other."""
        if isinstance(state, Tensor) and state.numel():
            raise ValueError(f"_extra_state: expected no fp8 state; got {state.numel()} bytes")

    def forward(self) -> None:
        """Compute nothing; calling the layer runs the hooks by which DDP or Megatron-FSDP gathers its weights."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Keep a hook for `fire_hooks`; Megatron's DDP calls this for every weight with a delayed gradient."""
        self._hooks.append(hook)

    def refuse_owners_that_do_not_wait(self) -> None:
        """Raise RuntimeError if DDP or Megatron-FSDP would reduce gradients before `backward_dw()` computes them."""
        weight: Any = self.get_parameter("weight0")
        if not self.delay_wgrad_compute:
            return
        if hasattr(weight, "__fsdp_param__"):
            raise RuntimeError(
                "config.delay_wgrad_compute: expected False under Megatron-FSDP, which reduces gradients when backward "
                "ends, before backward_dw() computes them; got True"
            )
        if hasattr(weight, "grad_added_to_main_grad") and not self._hooks:
            raise RuntimeError(
                "config.delay_wgrad_compute: expected DistributedDataParallelConfig(delay_wgrad_compute=True) too; "
                "without it DDP reduces gradients when backward ends, before backward_dw() computes them"
            )

    def fire_hooks(self) -> None:
        """Tell Megatron's DDP that the gradients of one micro-batch are in `main_grad`, or in `.grad`."""
        if self._hooks:
            # DDP asserts that .grad is not None, and its hook of an earlier micro-batch has removed the dummy.
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
        """Return a sharded tensor for each parameter of each expert.

        Keys in the checkpoint are those of `SequentialMLP`, as `TEGroupedMLP` has them, too.
        """
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
        for shard in result.values():  # (pipeline, tensor, data) ranks; experts are replicated over expt_dp
            shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
        return result


def _drop_other_extra_states(module: ExpertLinear, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Drop `_extra_state1` and so on: a sharded checkpoint holds one for each expert, a module has one."""
    for i in range(1, module.num_local_experts):
        module.set_extra_state(state_dict.pop(f"{prefix}_extra_state{i}", None))
