"""Megatron-core: `FusedGroupedMLP`, a drop-in for its `TEGroupedMLP`.

    from megatron.core.models.gpt import gpt_layer_specs
    from fusedmlp.integrations.megatron import with_fused_experts

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=64, moe_grouped_gemm=True
    )
    layer_spec = with_fused_experts(spec)

State dicts, plain and sharded, are those of `TEGroupedMLP`. See docs/megatron.md for the config fields that are
refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import package_info
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fusedmlp import validate
from fusedmlp.contract.destinations import megatron_fsdp
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.contract.route import Mode
from fusedmlp.functional import grouped_mlp
from fusedmlp.integrations import megatron_config, megatron_offload
from fusedmlp.integrations.megatron_linear import ExpertLinear
from fusedmlp.integrations.megatron_offload import Weights
from fusedmlp.integrations.transformer_engine import plain_rows
from fusedmlp.parts import tensors_of
from fusedmlp.quantized_weights import QuantizedWeights, quantize_weights
from fusedmlp.recipe import BLOCKS, LEAST_ROWS

if package_info.VERSION[:2] < (0, 17):
    raise ImportError(
        f"fusedmlp.integrations.megatron: expected megatron-core>=0.17; got {package_info.__version__}, whose "
        "Megatron-FSDP adds a rank's own gradient to the reduced one"
    )


class FusedGroupedMLP(TEGroupedMLP):
    """Megatron's experts, with kernels that add weight gradients into `main_grad`.

    Replaces `TEGroupedMLP`: has the same state dicts, does not need TransformerEngine, and does not copy
    `tokens_per_expert` to the host.

    Args:
        num_local_experts: experts on this rank.
        config: Megatron's; see docs/megatron.md for what is refused.
        submodules: ignored: the linear layers are `ExpertLinear`.
        pg_collection: process groups; default: those of `parallel_state`.
        name: ignored.
        fuse_microbatches: with `config.delay_wgrad_compute`, the first `backward_dw()` computes the weight gradients of
            every backward before it, in one launch for each weight, and later calls find nothing left to compute.

    Raises:
        TypeError: a config of another class.
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
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config: expected Megatron's TransformerConfig; got {validate.kind(config)}")
        MegatronModule.__init__(self, config)  # not TEGroupedMLP's, which builds TransformerEngine's layers
        self._built, self._read_config = megatron_config.built(config), megatron_config.reader(config)
        self._follow_config()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
        self.num_local_experts, self.ep_group, self.tp_group = num_local_experts, groups.ep, groups.expt_tp
        hidden: int = getattr(config, "moe_latent_size", None) or config.hidden_size
        ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size
        fc1_size = 2 * ffn if config.gated_linear_unit else ffn
        fc1, fc2 = config.init_method, config.output_layer_init_method
        self.linear_fc1 = ExpertLinear(num_local_experts, hidden, fc1_size, "column", config, fc1, groups)
        self.linear_fc2 = ExpertLinear(num_local_experts, ffn, hidden, "row", config, fc2, groups)
        self._queue = WgradQueue(fuse_microbatches=fuse_microbatches) if config.delay_wgrad_compute else None
        # True from Megatron's `set_is_first_microbatch` until a forward; None until Megatron calls that.
        self.is_first_microbatch: bool | None = None

    def _follow_config(self) -> None:
        """Take what experts follow from the config, as Megatron's do, which read it in forward."""
        megatron_config.refuse_rebuilt(self.config, self._built)
        megatron_config.refuse_unsupported(self.config)
        self.activation = megatron_config.activation(self.config)
        self.recipe, self.wgrad = megatron_config.recipe(self.config)
        self.batch_invariant = getattr(self.config, "batch_invariant_mode", False)  # not in 0.17
        self._quantized: QuantizedWeights | None = None  # copies of another recipe go
        self._values = self._read_config(self.config)  # last: a field that was refused is refused again

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows `[R, H]` sorted by expert, counts `[E]` and probabilities `[R]` to `([R, H], None)`.

        Rows may be a `Float8BlockwiseQTensor`: see `transformer_engine.py`.
        """
        if self._read_config(self.config) != self._values:
            self._follow_config()
        recipe, wgrad = self.recipe, self.wgrad
        if recipe and megatron_config.in_16_bits(self.config):
            recipe, wgrad = None, "recipe"
        x = plain_rows(permuted_local_hidden_states)
        # float64 with moe_router_dtype="fp64"; autograd casts the gradient back to float64.
        probs: Tensor | None = permuted_probs.float() if permuted_probs.dtype == torch.float64 else permuted_probs
        fc1, fc2 = tensors_of(self, "linear_fc1"), tensors_of(self, "linear_fc2")
        under_fsdp = torch.is_grad_enabled() and hasattr(next(self.parameters(), None), "__fsdp_param__")
        trained = [param for param in self.parameters() if param.requires_grad] if under_fsdp else []
        megatron_fsdp.refuse_wrong_gradients(*trained)
        if self.config.moe_apply_probs_on_input:
            x, probs = (permuted_probs.unsqueeze(-1) * x).to(x.dtype), None
        mode: Mode = "main_grad" if self.config.gradient_accumulation_fusion else "off"
        compute = partial(
            grouped_mlp,
            fc1_weight=fc1.weight,
            fc2_weight=fc2.weight,
            tokens_per_expert=tokens_per_expert,
            probs=probs,
            fc1_bias=fc1.bias,
            fc2_bias=fc2.bias,
            activation=self.activation,
            accumulate_wgrad=mode,
            wgrad_queue=self._queue,
            recipe=recipe,
            wgrad=wgrad,
            batch_invariant=self.batch_invariant,
            quantized_weights=None if under_fsdp else self._copies(fc1.weight, fc2.weight, x.shape[0], recipe),
        )
        try:
            y = megatron_offload.offload(self.config, compute, x, fc1.weight)
        except (RuntimeError, TypeError, ValueError) as error:
            error.args = tuple(megatron_config.in_megatrons_words(str(arg)) for arg in error.args)
            raise
        if mode == "off" and trained and y.requires_grad:  # else the destination looks again
            y.register_hook(lambda _: megatron_fsdp.refuse_wrong_gradients(*trained))
        return y, None

    def _copies(self, fc1: Weights, fc2: Weights, num_rows: int, recipe: str | None) -> QuantizedWeights | None:
        """8-bit copies of the weights, made by the first micro-batch of a step for all, as TransformerEngine's layers
        make theirs. None if every call makes its own.
        """
        least = 1 if self.batch_invariant else LEAST_ROWS * self.num_local_experts
        if self.is_first_microbatch is None or recipe not in BLOCKS or num_rows < least:
            return None
        if getattr(self.config, "disable_parameter_transpose_cache", False):
            return None
        weights = [weight for group in (fc1, fc2) for weight in ([group] if isinstance(group, Tensor) else group)]
        if self.is_first_microbatch or self._quantized is None or not self._quantized.are_of(weights):
            self._quantized = None  # frees the old copies first
            self._quantized = quantize_weights(fc1, fc2, recipe)
        self.is_first_microbatch = False
        return self._quantized

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the oldest backward, then fire DDP's hooks; fc2 before fc1.

        With `fuse_microbatches`, those of every backward. Does nothing without `config.delay_wgrad_compute`.
        """
        if self._queue is None:
            return
        if self._queue.fuse_microbatches:
            self._queue.run()
        else:
            self._queue.run_oldest()
        for linear in (self.linear_fc2, self.linear_fc1):
            for module in linear.modules():  # a wrapper holds the ExpertLinear
                if isinstance(module, ExpertLinear):
                    module.fire_hooks()


def with_fused_experts(layer_spec: Any) -> Any:
    """Copy the spec of a Megatron layer (or of a block, or a list of specs) with `FusedGroupedMLP` as experts.

    Layers without experts stay as they are.

    Raises:
        TypeError: the argument is no such spec, no layer in it has experts, or some are of a class that is not
            Megatron's own.
    """
    replaced, count = _replace_experts(layer_spec)
    if count == 0:
        raise TypeError(
            "layer_spec: expected a Megatron spec that holds a MoELayer, as one made with num_experts does; got "
            f"{layer_spec!r}"[:300]
        )
    return replaced


def _replace_experts(spec: Any) -> tuple[Any, int]:
    """Replace experts in a copy of `spec`; return it and the number of replacements."""
    if isinstance(spec, MoESubmodules):
        _refuse_other_experts(spec.experts)
        return dataclasses.replace(spec, experts=FusedGroupedMLP), 1
    if isinstance(spec, list | tuple):
        parts = [_replace_experts(part) for part in spec]
        return type(spec)(part for part, _ in parts), sum(count for _, count in parts)
    if isinstance(spec, partial):
        keywords = {key: _replace_experts(value) for key, value in spec.keywords.items()}
        copied = partial(spec.func, *spec.args, **{key: value for key, (value, _) in keywords.items()})
        return copied, sum(count for _, count in keywords.values())
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type | MLPSubmodules):
        fields = {f.name: _replace_experts(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        replaced: Any = copy.copy(spec)
        for name, (value, count) in fields.items():
            if count:
                setattr(replaced, name, value)
        return replaced, sum(count for _, count in fields.values())
    return spec, 0


def _refuse_other_experts(experts: Any) -> None:
    """Raise TypeError for experts of a class, or made by a function, that is not Megatron's own."""
    made_by = experts
    while isinstance(made_by, partial | ModuleSpec):
        made_by = made_by.func if isinstance(made_by, partial) else made_by.module
    module, name = made_by if isinstance(made_by, tuple) else (getattr(made_by, "__module__", ""), made_by)
    if not (made_by is None or made_by is FusedGroupedMLP or module.startswith("megatron.core.")):
        raise TypeError(
            "layer_spec: expected experts of a class of Megatron's own, such as SequentialMLP or TEGroupedMLP, as "
            f"FusedGroupedMLP takes their place and what another class changes would be lost; got {name}"
        )
