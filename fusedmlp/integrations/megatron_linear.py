"""One linear layer of every expert as Megatron-core keeps it: parameters, hooks, sharded state dicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from fusedmlp import validate
from fusedmlp.contract.dummy import set_dummy_wgrad
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.parts import ExpertTensors


class ExpertLinear(MegatronModule):
    """The parameters of one linear layer of all local experts: `weight{i}` `[out, in]` and `bias{i}` `[out]`.

    With `config.moe_single_grouped_weight` one parameter `weight` `[experts, out, in]`, and with
    `config.moe_single_grouped_bias` one `bias` `[experts, out]`, as TransformerEngine's layers have them.

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
        self.register_load_state_dict_pre_hook(_accept_other_keys)
        full = [out_features, in_features]
        shape = list(full)
        tp_size = groups.expt_tp.size()
        if shape[self.partition_dim] % tp_size:
            raise ValueError(
                f"{parallel} parallel experts: expected a multiple of expert_tensor_parallel_size={tp_size} features; "
                f"got {shape[self.partition_dim]}"
            )
        shape[self.partition_dim] //= tp_size
        self._grouped = {name: getattr(config, f"moe_single_grouped_{name}", False) for name in ("weight", "bias")}
        self._full, self._init_method = full, init_method
        on_meta = getattr(config, "init_model_with_meta_device", False) and not config.use_cpu_initialization
        device = "cpu" if config.use_cpu_initialization else "meta" if on_meta else torch.cuda.current_device()
        for i in range(num_local_experts):
            for name, size in (("weight", shape), ("bias", shape[:1]))[: 1 + self.use_bias]:
                grouped = self._grouped[name]
                if not grouped or i == 0:
                    size = [num_local_experts, *size] if grouped else size
                    param = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
                    self.register_parameter(name if grouped else f"{name}{i}", param)
        if on_meta:
            self._mark_all()
        else:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill weights and biases, expert by expert; Megatron-FSDP calls this for what was on the meta device."""
        self._mark_all()  # new parameters take the place of those on the meta device
        for i in range(self.num_local_experts):
            if self.config.perform_initialization:
                self._initialize(self._of_expert("weight", i).detach())
            if self.use_bias:
                self._of_expert("bias", i).detach().zero_()

    def _initialize(self, weight: Tensor) -> None:
        """Fill the weight of one expert with the numbers that TransformerEngine's layer draws."""
        tp, tracker = self.groups.expt_tp, get_cuda_rng_tracker()
        if self.config.use_cpu_initialization and tp.size() > 1:  # the CPU draws the same numbers on every rank
            whole = torch.empty(self._full, dtype=torch.float32, device="cpu")
            self._init_method(whole)
            weight.copy_(whole.chunk(tp.size(), self.partition_dim)[tp.rank()])
            return
        of_experts = tracker.is_initialized() and not self.config.use_cpu_initialization
        with tracker.fork(get_expert_parallel_rng_tracker_name()) if of_experts else nullcontext():
            self._init_method(weight)

    def _mark_all(self) -> None:
        """Set Megatron's attributes of every parameter."""
        for name in ("weight", "bias")[: 1 + self.use_bias]:
            for param in self.group(name):
                self._mark(name, param)

    def _mark(self, name: str, param: Any) -> None:
        """Set the attributes that Megatron's DDP, optimizer and gradient norm read of a parameter."""
        config = self.config
        # True: reduced over the data-parallel group of the dense layers, which is then also that of the experts.
        param.allreduce = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        param.tensor_model_parallel = name == "weight" or self.partition_dim == 0
        if param.tensor_model_parallel:
            param.partition_dim, param.partition_stride = self.partition_dim, 1
        if self.delay_wgrad_compute and name == "weight":  # bias gradients are never delayed
            param.skip_backward_post_hook = True

    def group(self, name: str) -> list[Tensor]:
        """Return the `"weight"` or the `"bias"` of every expert, in order; or the one parameter of all."""
        if self._grouped[name]:
            return [getattr(self, name)]
        return [getattr(self, f"{name}{i}") for i in range(self.num_local_experts)]

    def _tensors(self, name: str) -> Any:
        """Return the `"weight"` or the `"bias"` as `grouped_mlp` takes it."""
        return self.group(name)[0] if self._grouped[name] else _ForNoTree(self.group(name))

    def _of_expert(self, name: str, i: int) -> Tensor:
        """Return the parameter of expert i, or its part of the one parameter of all."""
        return self.group(name)[0].detach()[i] if self._grouped[name] else self.group(name)[i]

    # Part of TransformerEngine's state dicts; empty unless there is fp8 state.
    def get_extra_state(self) -> Tensor:
        """Return the state of a layer without fp8: a tensor without elements."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept the empty state of a layer without fp8; raise ValueError for any other."""
        if isinstance(state, Tensor) and state.numel():
            raise ValueError(f"_extra_state: expected no fp8 state; got {state.numel()} bytes")

    def forward(self, rows: None = None, counts: None = None) -> ExpertTensors:
        """Return the layer's tensors; calling it runs the hooks by which DDP or Megatron-FSDP gathers its weights.

        Raises:
            TypeError: rows or counts, which `FusedGroupedMLP` alone computes with.
            RuntimeError: see `_refuse_owners`.
        """
        if rows is not None or counts is not None:
            raise TypeError(
                "ExpertLinear: expected no rows and no counts, as it only returns its tensors; got "
                f"{validate.kind(rows)} and {validate.kind(counts)} (call the FusedGroupedMLP, or grouped_linear with "
                "these tensors)"
            )
        if torch.is_grad_enabled():
            self._refuse_owners()
        return ExpertTensors(self._tensors("weight"), self._tensors("bias") if self.use_bias else None)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Keep a hook for `fire_hooks`; Megatron's DDP calls this for every weight with a delayed gradient."""
        self._hooks.append(hook)

    def _refuse_owners(self) -> None:
        """Raise RuntimeError for DDP or Megatron-FSDP that would reduce gradients before `backward_dw()` computes them,
        and for Megatron-FSDP with one parameter of all experts.
        """
        weight: Any = self.group("weight")[0]
        if hasattr(weight, "__fsdp_param__") and any(self._grouped.values()):
            raise RuntimeError(
                "config.moe_single_grouped_weight and config.moe_single_grouped_bias: expected False under "
                "Megatron-FSDP, which does not support them; got True"
            )
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
                    set_dummy_wgrad(weight, state_of(weight))
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
            state = {f"{i}.{name}": self._of_expert(name, i) for name in names}
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


class _ForNoTree(list[Tensor]):
    """A list whose tensors PyTorch's tree functions do not find: forward hooks of Megatron-FSDP replace those by views,
    which are no parameters and have no `main_grad`.
    """


def _accept_other_keys(module: ExpertLinear, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Accept a tensor for each expert in place of one for all, and the reverse.

    Drop `_extra_state1` and so on: a sharded checkpoint holds one for each expert, a module has one.
    """
    experts = range(module.num_local_experts)
    for i in experts[1:]:
        module.set_extra_state(state_dict.pop(f"{prefix}_extra_state{i}", None))
    for name, grouped in module._grouped.items():
        one, each = prefix + name, [f"{prefix}{name}{i}" for i in experts]
        if grouped and all(key in state_dict for key in each):
            state_dict[one] = torch.stack([state_dict.pop(key) for key in each])
        elif not grouped and one in state_dict:
            state_dict.update(zip(each, state_dict.pop(one).unbind(), strict=True))
