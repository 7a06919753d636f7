"""The public functions. Letters used everywhere:

`R` routed rows (sorted by expert), `T` tokens, `K` experts per token, `E` experts, `H` hidden size, `F` expert ffn
size, `G` (`F1` in docs): `2F` for gated activations, else `F`. Shape suffixes: `x_RH` is `[R, H]`. In files about one
GEMM: `K` in, `N` out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Never

import torch
from torch import Tensor

from fusedmlp import calls, debug, routing_arguments, validate
from fusedmlp.activation import Activation
from fusedmlp.autograd import layers
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.contract.route import Mode
from fusedmlp.lora import LoRA, check
from fusedmlp.operators import ops
from fusedmlp.operators.types import RowOrder
from fusedmlp.quantized_weights import QuantizedWeights
from fusedmlp.validate import ExpertWeight, Input, Options
from fusedmlp.versions import outside_of_wrong_graphs


@outside_of_wrong_graphs
def grouped_mlp(
    x: Tensor,
    fc1_weight: Tensor | Sequence[Tensor],
    fc2_weight: Tensor | Sequence[Tensor],
    tokens_per_expert: Tensor | Sequence[int],
    *,
    probs: Tensor | None = None,
    fc1_bias: Tensor | Sequence[Tensor] | None = None,
    fc2_bias: Tensor | Sequence[Tensor] | None = None,
    activation: str | Activation = "swiglu",
    weight_layout: str = "out_in",
    accumulate_wgrad: Mode = "auto",
    wgrad_queue: WgradQueue | None = None,
    impl: str = "auto",
    recipe: str | None = None,
    wgrad: str = "recipe",
    quantized_weights: QuantizedWeights | None = None,
    save: str = "x",
    batch_invariant: bool = False,
    fc1_lora: LoRA | None = None,
    fc2_lora: LoRA | None = None,
    **removed: Never,
) -> Tensor:
    """Every expert's MLP on its own rows, with weight gradients that go where `accumulate_wgrad` says.

    `y[r] = probs[r] * (fc2_weight[e] @ act(fc1_weight[e] @ x[r] + fc1_bias[e]) + fc2_bias[e])` for row `r` of
    expert `e`; without `probs` the factor is 1. Rows at and after `sum(tokens_per_expert)` are padding: never read
    into a result, zero in `y` and in the gradients of `x` and `probs`.

    Args:
        x: `[R, H]`, float32, bfloat16 or float16; rows of expert 0 first, then expert 1, ...
        fc1_weight: `[E, F1, H]`, or a sequence of E tensors `[F1, H]`, dtype of x; see also `recipe`.
        fc2_weight: `[E, H, F]`, or a sequence of E tensors `[H, F]`, dtype of x; see also `recipe`.
        tokens_per_expert: `[E]` integers: a tensor on any device, a list, or a NumPy array. Never read on the host if
            it is on a GPU.
        probs: `[R]` or `[R, 1]`, routing probability of each row, any of the dtypes of x.
        fc1_bias: `[E, F1]`, or a sequence of E tensors `[F1]`, of a dtype that weights may have.
        fc2_bias: `[E, H]`, or a sequence of E tensors `[H]`, likewise.
        activation: a name, or an `Activation` with options.
        weight_layout: "in_out": weights are `[E, H, F1]` and `[E, F, H]`.
        accumulate_wgrad: "main_grad": add into `param.main_grad`; "grad": add into `param.grad` where there is
            one and a GEMM may, else return the gradient to autograd; "off": return it always; "auto": "main_grad" where
            the parameter has it, else "grad". See `fusedmlp.contract` for what backward returns in each case.
        wgrad_queue: delay the weight gradients until `wgrad_queue.run()`. A gradient that must be returned
            (`torch.autograd.grad`, a weight that is not a leaf) is not delayed.
        impl: "triton", "torch", or "auto": triton for tensors on a GPU, torch on the CPU. "torch" rounds a bfloat16
            or float16 weight gradient to that dtype before it adds it to a float32 `main_grad`, if there is no recipe.
        recipe: "bf16" or "fp16": compute in these 16 bits, to which float32 x and weights are cast (weights for each
            forward and backward, if there are no `quantized_weights`). Weight gradients are added unrounded.
            "fp8_block" or "mxfp8": likewise bf16, and GEMMs multiply 8-bit operands if experts have at least 64 rows on
            average; see docs/eight_bit.md. None: compute in the dtype of x, which weights share; under `torch.autocast`
            to 16 bits, float32 and its dtype are as with its recipe.
        wgrad: "recipe", or "bf16": with an 8-bit recipe, compute weight gradients from bf16 operands.
        quantized_weights: copies of the weights from `quantize_weights` with the same recipe, to multiply in place of
            new ones. The weights still get the gradients.
        save: what forward saves for the gradient of fc1: "x" or, with an 8-bit recipe, "tokens": the 8-bit copy of x
            that this gradient multiplies, 1.03 bytes an element, made as x is read in forward. Gradients are the same.
        batch_invariant: bits of a row of y, and of the gradients of x and probs, depend on the row and the weights
            alone: not on other rows, their number or counts, the row's place, nor on where x, probs and the gradient of
            y lie. 8-bit recipes then quantize at any number of rows. See docs/reproducible.md.
        fc1_lora, fc2_lora: adapters: `W x + scaling * B (A x)` takes the place of `W x`. See docs/lora.md.

    Returns:
        `[R, H]`, dtype of x.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, rank, size or device.
        RuntimeError: gradient fusion requested where it is impossible; no triton, or no GPU for it; weights that were
            written after `quantized_weights` were made.
        NotImplementedError: an 8-bit recipe on a GPU without kernels for it.
    """
    validate.refuse_removed(removed)
    options = Options(
        weight_layout, accumulate_wgrad, wgrad_queue, impl, recipe, wgrad, quantized_weights, save, batch_invariant
    ).check()
    source = validate.rows("x", x, recipe)
    given = fc1_weight, fc2_weight, fc1_bias, fc2_bias
    kind, weights, biases = _mlp_arguments(source, *given, activation, weight_layout)
    probs = routing_arguments.probabilities(probs, source)
    counts = routing_arguments.counts(tokens_per_expert, weights["fc1_weight"].num_experts, source)
    adapters = {"fc1_lora": fc1_lora, "fc2_lora": fc2_lora}
    of_adapters = _adapters(adapters, weights, source)
    call = calls.prepare(source, weights, biases, adapters, options, x.shape[0], kind.encoded)
    tensors = [*weights["fc1_weight"].tensors, *weights["fc2_weight"].tensors, *biases[0], *biases[1], *of_adapters]
    rest = [source.computed(), calls.offsets(counts, x, call.impl), probs, None, None, None]
    return calls.run(layers.GroupedMLP, call, weights, [*tensors, *rest], options).to(x.dtype)


@outside_of_wrong_graphs
def moe_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    fc1_weight: Tensor | Sequence[Tensor],
    fc2_weight: Tensor | Sequence[Tensor],
    *,
    fc1_bias: Tensor | Sequence[Tensor] | None = None,
    fc2_bias: Tensor | Sequence[Tensor] | None = None,
    activation: str | Activation = "swiglu",
    weight_layout: str = "out_in",
    accumulate_wgrad: Mode = "auto",
    wgrad_queue: WgradQueue | None = None,
    impl: str = "auto",
    recipe: str | None = None,
    wgrad: str = "recipe",
    quantized_weights: QuantizedWeights | None = None,
    batch_invariant: bool = False,
    fc1_lora: LoRA | None = None,
    fc2_lora: LoRA | None = None,
    **removed: Never,
) -> Tensor:
    """`grouped_mlp` over tokens that are not sorted by expert: every token through the experts that it chose.

    `y[t] = sum over k of top_k_weights[t, k] * mlp(e, hidden_states[t])` with `e = top_k_index[t, k]` and `mlp` as
    in `grouped_mlp`. Ids outside `[0, E)` mark rows of experts on other ranks: they cost no GEMM work and add zero,
    and their `top_k_weights` get a zero gradient. A token may choose one expert several times.

    GEMMs gather their rows from the tokens, and backward keeps `hidden_states` once per token. Shapes do not depend
    on values, and nothing waits for the device. Sums over `k` are in fp32 and in the order of `k`, so that `y` and all
    gradients repeat bit for bit.

    Args:
        hidden_states: `[T, H]`, float32, bfloat16 or float16.
        top_k_index: `[T, K]`, of any integer dtype, on the device of hidden_states. `T * K` is below `2**31`.
        top_k_weights: `[T, K]`, any of the dtypes of hidden_states. Gets a gradient.
        fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, weight_layout: as in `grouped_mlp`.
        accumulate_wgrad, wgrad_queue, impl, recipe, wgrad, quantized_weights: as in `grouped_mlp`.
        batch_invariant: likewise, for tokens with their choices in order.
        fc1_lora, fc2_lora: as in `grouped_mlp`.

    Returns:
        `[T, H]`, dtype of hidden_states.

    Raises:
        TypeError, ValueError, RuntimeError: as `grouped_mlp`.
    """
    validate.refuse_removed(removed)
    options = Options(
        weight_layout,
        accumulate_wgrad,
        wgrad_queue,
        impl,
        recipe,
        wgrad,
        quantized_weights,
        batch_invariant=batch_invariant,
    ).check()
    source = validate.rows("hidden_states", hidden_states, recipe)
    given = fc1_weight, fc2_weight, fc1_bias, fc2_bias
    kind, weights, biases = _mlp_arguments(source, *given, activation, weight_layout)
    ids, probs = routing_arguments.choices(top_k_index, top_k_weights, source)
    if debug.enabled:
        debug.count_ids(ids, weights["fc1_weight"].num_experts)
    adapters = {"fc1_lora": fc1_lora, "fc2_lora": fc2_lora}
    of_adapters = _adapters(adapters, weights, source)
    call = calls.prepare(source, weights, biases, adapters, options, ids.numel(), kind.encoded)
    tensors = [*weights["fc1_weight"].tensors, *weights["fc2_weight"].tensors, *biases[0], *biases[1], *of_adapters]
    # Detached, as the layer's backward differentiates routing, too; an exported program has only the operators.
    routed = probs if torch.compiler.is_exporting() else probs.detach()
    order = RowOrder(*ops.order_rows(ids, routed, weights["fc1_weight"].num_experts, call.impl))
    rest = [source.computed(), order.plan, probs, order.row_ids, order.places, order.probs]
    return calls.run(layers.GroupedMLP, call, weights, [*tensors, *rest], options).to(hidden_states.dtype)


@outside_of_wrong_graphs
def grouped_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    tokens_per_expert: Tensor | Sequence[int],
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    weight_layout: str = "out_in",
    accumulate_wgrad: Mode = "auto",
    wgrad_queue: WgradQueue | None = None,
    impl: str = "auto",
    recipe: str | None = None,
    wgrad: str = "recipe",
    batch_invariant: bool = False,
    lora: LoRA | None = None,
    **removed: Never,
) -> Tensor:
    """`y[r] = weight[e] @ x[r] + bias[e]` for row `r` of expert `e`: one GEMM with the contract of `grouped_mlp`.

    Args:
        x: `[R, in]`, float32, bfloat16 or float16; rows of expert 0 first, then expert 1, ...
        weight: `[E, out, in]`, or a sequence of E tensors `[out, in]`, dtype of x.
        bias: `[E, out]`, or a sequence of E tensors `[out]`.
        weight_layout: "in_out": the weight is `[E, in, out]`.
        tokens_per_expert, accumulate_wgrad, wgrad_queue, impl, recipe, wgrad, batch_invariant: as in `grouped_mlp`.
        lora: an adapter, as `fc1_lora` of `grouped_mlp`.

    Returns:
        `[R, out]`, dtype of x; zero at padding rows.

    Raises:
        TypeError, ValueError, RuntimeError: as `grouped_mlp`.
    """
    validate.refuse_removed(removed)
    options = Options(
        weight_layout, accumulate_wgrad, wgrad_queue, impl, recipe, wgrad, batch_invariant=batch_invariant
    ).check()
    source = validate.rows("x", x, recipe)
    experts = validate.experts("weight", weight, weight_layout, source)
    validate.width(source, "weight", experts.in_features, weight_layout)
    biases = [validate.biases("bias", bias, experts, source)]
    counts = routing_arguments.counts(tokens_per_expert, experts.num_experts, source)
    weights, adapters = {"weight": experts}, {"lora": lora}
    of_adapter = _adapters(adapters, weights, source)
    call = calls.prepare(source, weights, biases, adapters, options, x.shape[0], "")
    rest = [source.computed(), calls.offsets(counts, x, call.impl)]
    tensors = [*experts.tensors, *biases[0], *of_adapter, *rest]
    return calls.run(layers.GroupedLinear, call, weights, tensors, options).to(x.dtype)


def _mlp_arguments(
    x: Input,
    fc1_weight: Tensor | Sequence[Tensor],
    fc2_weight: Tensor | Sequence[Tensor],
    fc1_bias: Tensor | Sequence[Tensor] | None,
    fc2_bias: Tensor | Sequence[Tensor] | None,
    activation: str | Activation,
    weight_layout: str,
) -> tuple[Activation, dict[str, ExpertWeight], list[list[Tensor]]]:
    """The activation, the weights by name, and the biases of an MLP, checked against each other."""
    if isinstance(activation, str):
        activation = (Activation if torch.compiler.is_compiling() else _activation)(activation)
    elif not isinstance(activation, Activation):
        raise TypeError(f"activation: expected a name or a fusedmlp.Activation; got {activation!r}")
    hidden_size = x.tensor.shape[1]
    fc1 = validate.experts("fc1_weight", fc1_weight, weight_layout, x)
    fc2 = validate.experts("fc2_weight", fc2_weight, weight_layout, x)
    factor = 2 if activation.gated else 1
    expected = hidden_size, fc1.num_experts, hidden_size, factor * fc2.in_features
    got = fc1.in_features, fc2.num_experts, fc2.out_features, fc1.out_features
    if expected != got:
        validate.width(x, "fc1_weight", fc1.in_features, weight_layout)
        validate.size("fc2_weight", "experts, those of fc1_weight,", fc1.num_experts, fc2.num_experts)
        validate.size("fc2_weight", f"out_features (H, the width of {x.name})", hidden_size, fc2.out_features)
        what = f"out_features (F1) for {activation.name}, {factor} * F of fc2_weight,"
        validate.size("fc1_weight", what, expected[-1], fc1.out_features)
    biases = [validate.biases("fc1_bias", fc1_bias, fc1, x), validate.biases("fc2_bias", fc2_bias, fc2, x)]
    return activation, {"fc1_weight": fc1, "fc2_weight": fc2}, biases


def _adapters(adapters: dict[str, LoRA | None], weights: dict[str, ExpertWeight], x: Input) -> list[Tensor]:
    """A and B of each adapter, which belongs to the weight at its place, checked."""
    pairs = zip(adapters.items(), weights.values(), strict=True)
    return [tensor for (name, adapter), weight in pairs for tensor in check(name, adapter, weight, x)]


_activation = lru_cache(Activation)
