"""`nn.Module`s: parameters, their initialisation and their state dicts around the public functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor, nn

from fusedmlp import module_arguments, routing_arguments, validate
from fusedmlp.activation import Activation
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.contract.route import Mode
from fusedmlp.functional import grouped_linear, grouped_mlp, moe_experts
from fusedmlp.parts import ExpertTensors, tensors_of
from fusedmlp.quantized_weights import QuantizedWeights, quantize_weights
from fusedmlp.state_dicts import convert, expert_names


class GroupedLinear(nn.Module):
    """One linear layer per expert: `y[r] = weight[e] @ x[r] + bias[e]`.

    Args:
        num_experts: `E`.
        in_features: size of the rows of x.
        out_features: size of the rows of y.
        bias: add a bias.
        packed: one parameter `weight` `[E, out, in]` (and `bias` `[E, out]`); otherwise one per expert, `weight0` ...
            `weight{E-1}` `[out, in]` (and `bias0` ...). State dicts of both forms load into each other.
        accumulate_wgrad: see `fusedmlp.grouped_mlp`.
        delay_wgrad: delay weight gradients until `backward_dw()`.
        strict: rows that belong to no expert here are an error, not padding or rows of other ranks; see `forward`.
        impl, recipe, wgrad, batch_invariant: see `fusedmlp.grouped_mlp`.
        device: of the parameters.
        dtype: of the parameters: float32, bfloat16 or float16.

    Raises:
        TypeError, ValueError: an argument with which every forward would raise.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        packed: bool = True,
        accumulate_wgrad: Mode = "auto",
        delay_wgrad: bool = False,
        strict: bool = False,
        impl: str = "auto",
        recipe: str | None = None,
        wgrad: str = "recipe",
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_experts, in_features, out_features = module_arguments.sizes(
            num_experts=num_experts, in_features=in_features, out_features=out_features
        )
        flags = {"bias": bias, "packed": packed, "delay_wgrad": delay_wgrad, "strict": strict}
        module_arguments.options(accumulate_wgrad, impl, recipe, wgrad, dtype, batch_invariant=batch_invariant, **flags)
        module_arguments.blocks(recipe, weight=(out_features, in_features))
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.packed, self.accumulate_wgrad, self.impl = packed, accumulate_wgrad, impl
        self.recipe, self.wgrad, self.strict, self.batch_invariant = recipe, wgrad, strict, batch_invariant
        self.wgrad_queue = WgradQueue() if delay_wgrad else None
        self._groups = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        self._every_name = {group: [group] if packed else expert_names(group, num_experts) for group in self._groups}
        for group, shape in self._groups.items():
            for name in self._every_name[group]:
                full = (num_experts, *shape) if packed else shape
                self.register_parameter(name, nn.Parameter(torch.empty(full, device=device, dtype=dtype)))
        self.register_load_state_dict_pre_hook(convert)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in `+-1 / sqrt(in_features)`, as `nn.Linear`."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _tensors(self, group: str) -> Any:
        """The `"weight"` or `"bias"` as the public functions take it; None if there is none."""
        if group not in self._groups:
            return None
        if self.packed:
            return getattr(self, group)
        registered = self._parameters
        try:
            return [registered[name] for name in self._every_name[group]]
        except KeyError:  # FSDP1 and parametrizations replace parameters
            return [getattr(self, name) for name in self._every_name[group]]

    def forward(
        self,
        x: Tensor | None,
        tokens_per_expert: Tensor | Sequence[int] | None,
        **removed: Never,
    ) -> Tensor | ExpertTensors:
        """`[R, in_features] -> [R, out_features]`; see `fusedmlp.grouped_linear`.

        None and None: return the tensors themselves, as a layer that fuses this one with others calls it.
        """
        validate.refuse_removed(removed)
        tensors = ExpertTensors(self._tensors("weight"), self._tensors("bias"))
        if x is None or tokens_per_expert is None:
            return tensors
        if self.strict:
            routing_arguments.refuse_padding(tokens_per_expert, x.shape[0])
        return grouped_linear(
            x,
            tensors.weight,
            tokens_per_expert,
            bias=tensors.bias,
            accumulate_wgrad=self.accumulate_wgrad,
            wgrad_queue=self.wgrad_queue,
            impl=self.impl,
            recipe=self.recipe,
            wgrad=self.wgrad,
            batch_invariant=self.batch_invariant,
        )

    def backward_dw(self) -> None:
        """Compute the weight gradients that `delay_wgrad=True` has delayed."""
        if self.wgrad_queue is not None:
            self.wgrad_queue.run()

    def extra_repr(self) -> str:
        """Sizes and options, for `print(module)`."""
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        shown = module_arguments.shown(self, "packed", "accumulate_wgrad", "recipe", "batch_invariant")
        return f"{sizes}, bias={'bias' in self._groups}, {shown}"


class GroupedMLP(nn.Module):
    """One MLP per expert: fc1, activation times routing probability, fc2; see `fusedmlp.grouped_mlp`.

    Args:
        num_experts: `E`.
        hidden_size: `H`.
        ffn_hidden_size: `F`; fc1 has `2F` outputs if the activation is gated.
        activation: a name, or an `Activation` with options.
        bias: fc1 and fc2 have biases.
        packed: see `GroupedLinear`.
        accumulate_wgrad: see `fusedmlp.grouped_mlp`.
        delay_wgrad: delay weight gradients until `backward_dw()`.
        strict: rows that belong to no expert here are an error, not padding or rows of other ranks; see `forward`.
        impl, recipe, wgrad, batch_invariant: see `fusedmlp.grouped_mlp`.
        save: see `fusedmlp.grouped_mlp`; for `forward`, as `forward_tokens` keeps x once a token.
        device: of the parameters.
        dtype: of the parameters: float32, bfloat16 or float16.

    Raises:
        TypeError, ValueError: an argument with which every forward would raise.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        packed: bool = True,
        accumulate_wgrad: Mode = "auto",
        delay_wgrad: bool = False,
        strict: bool = False,
        impl: str = "auto",
        recipe: str | None = None,
        wgrad: str = "recipe",
        save: str = "x",
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_experts, hidden_size, ffn_hidden_size = module_arguments.sizes(
            num_experts=num_experts, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size
        )
        flags = {"bias": bias, "packed": packed, "delay_wgrad": delay_wgrad, "strict": strict}
        module_arguments.options(accumulate_wgrad, impl, recipe, wgrad, dtype, batch_invariant=batch_invariant, **flags)
        validate.saved(save, recipe, wgrad, delayed=delay_wgrad)
        self.save, self.strict, self.batch_invariant = save, strict, batch_invariant
        self.activation = module_arguments.activation(activation)
        self.accumulate_wgrad, self.impl, self.recipe, self.wgrad = accumulate_wgrad, impl, recipe, wgrad
        self.wgrad_queue = WgradQueue() if delay_wgrad else None
        fc1_size = 2 * ffn_hidden_size if self.activation.gated else ffn_hidden_size
        shapes = {"fc1_weight": (fc1_size, hidden_size), "fc2_weight": (hidden_size, ffn_hidden_size)}
        module_arguments.blocks(recipe, **shapes)
        options: dict[str, Any] = {"bias": bias, "packed": packed, "accumulate_wgrad": accumulate_wgrad, "impl": impl}
        options |= {"recipe": recipe, "wgrad": wgrad, "batch_invariant": batch_invariant}
        options |= {"device": device, "dtype": dtype}
        self.fc1 = GroupedLinear(num_experts, hidden_size, fc1_size, **options)
        self.fc2 = GroupedLinear(num_experts, ffn_hidden_size, hidden_size, **options)

    def reset_parameters(self) -> None:
        """As `GroupedLinear`, for fc1 and fc2."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(
        self,
        x: Tensor,
        tokens_per_expert: Tensor | Sequence[int],
        probs: Tensor | None = None,
        *,
        quantized_weights: QuantizedWeights | None = None,
        **removed: Never,
    ) -> Tensor:
        """`x [R, H]`, `tokens_per_expert [E]`, `probs [R]` `-> [R, H]`; see `fusedmlp.grouped_mlp`.

        With `strict=True` counts must sum to R: ValueError, for counts on a GPU an assertion on the device.
        """
        validate.refuse_removed(removed)
        if self.strict:
            routing_arguments.refuse_padding(tokens_per_expert, x.shape[0])
        fc1, fc2 = tensors_of(self, "fc1"), tensors_of(self, "fc2")
        return grouped_mlp(
            x,
            fc1.weight,
            fc2.weight,
            tokens_per_expert,
            probs=probs,
            fc1_bias=fc1.bias,
            fc2_bias=fc2.bias,
            activation=self.activation,
            accumulate_wgrad=self.accumulate_wgrad,
            wgrad_queue=self.wgrad_queue,
            impl=self.impl,
            recipe=self.recipe,
            wgrad=self.wgrad,
            batch_invariant=self.batch_invariant,
            quantized_weights=quantized_weights,
            save=self.save,
        )

    def quantize_weights(self) -> QuantizedWeights:
        """Copies of the weights in what the recipe computes in, for calls until the weights change: pass them as
        `quantized_weights`. See `fusedmlp.quantize_weights`; weights that need no copy raise.
        """
        if self.recipe is None:
            raise ValueError(
                "recipe: expected a layer with one; got None, with which weights are multiplied as they are"
            )
        fc1, fc2 = tensors_of(self, "fc1"), tensors_of(self, "fc2")
        return quantize_weights(fc1.weight, fc2.weight, self.recipe, impl=self.impl)

    def forward_tokens(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        quantized_weights: QuantizedWeights | None = None,
        **removed: Never,
    ) -> Tensor:
        """`hidden_states [T, H]`, `top_k_index [T, K]`, `top_k_weights [T, K]` `-> [T, H]`; see `fusedmlp.moe_experts`.

        For tokens as a router leaves them, in any order; `forward` takes rows that are sorted by expert. Hooks of this
        module run for `forward` alone: if FSDP2 shards it by itself, `register_fsdp_forward_method` adds this method.
        With `strict=True` ids must be in [0, E), as in `forward`.
        """
        validate.refuse_removed(removed)
        if self.strict:
            routing_arguments.refuse_foreign_ids(top_k_index, self.fc1.num_experts)
        fc1, fc2 = tensors_of(self, "fc1"), tensors_of(self, "fc2")
        return moe_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            fc1.weight,
            fc2.weight,
            fc1_bias=fc1.bias,
            fc2_bias=fc2.bias,
            activation=self.activation,
            accumulate_wgrad=self.accumulate_wgrad,
            wgrad_queue=self.wgrad_queue,
            impl=self.impl,
            recipe=self.recipe,
            wgrad=self.wgrad,
            batch_invariant=self.batch_invariant,
            quantized_weights=quantized_weights,
        )

    def backward_dw(self) -> None:
        """Compute the weight gradients that `delay_wgrad=True` has delayed: for each backward fc2, then fc1."""
        if self.wgrad_queue is not None:
            self.wgrad_queue.run()

    def extra_repr(self) -> str:
        """Options, for `print(module)`."""
        shown = module_arguments.shown(self, "activation", "recipe", "batch_invariant")
        return f"{shown}, delay_wgrad={self.wgrad_queue is not None}"
