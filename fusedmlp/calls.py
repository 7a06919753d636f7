"""Runs a call of a public function, once its arguments have been checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedmlp import validate
from fusedmlp.autograd import compiled, operators
from fusedmlp.autograd.call import Call
from fusedmlp.contract.forward_checks import enter_forward
from fusedmlp.lora import LoRA
from fusedmlp.operators import ops
from fusedmlp.quantized_weights import copies_of
from fusedmlp.recipe import BLOCKS, NAMES, check_blocks, formats
from fusedmlp.validate import ExpertWeight, Input, Options

operators.register()


def run(
    function: type[torch.autograd.Function],
    call: Call,
    weights: dict[str, ExpertWeight],
    tensors: Sequence[Tensor | None],
    options: Options,
) -> Tensor:
    """Run forward."""
    if torch.compiler.is_compiling():
        copies = copies_of(call, weights, options)
        return compiled.run(call, weights, [*tensors, *copies])
    # Not earlier: where the compiler leaves the layer to eager code, the code above may have run in a graph.
    for name, experts in weights.items():
        enter_forward(name, experts.tensors, call.mode, delayed=call.queue is not None)
    try:
        # PyTorch's own `apply`, past what torch.autograd.Function adds for torch.func, which `enter_forward` refuses.
        base: Any = super(torch.autograd.Function, function)
        y: Tensor = base.apply(call, *tensors, *copies_of(call, weights, options))
        return y
    except RuntimeError:
        for name, experts in weights.items():
            validate.refuse_sparse(name, experts.tensors)
        raise


def prepare(
    x: Input,
    weights: dict[str, ExpertWeight],
    biases: list[list[Tensor]],
    adapters: dict[str, LoRA | None],
    options: Options,
    num_rows: int,
    activation: str,
) -> Call:
    """The call's constants, with `impl` and `recipe` resolved."""
    layout, mode, queue, impl, recipe, wgrad, _, save, batch_invariant = options
    impl = validate.implementation(impl, x.tensor.device)
    encoded, dtype, saves_tokens = "", x.dtypes[0], False
    if recipe is not None:
        for name, experts in weights.items():
            check_blocks(recipe, name, experts.out_features, experts.in_features)
        rows = num_rows / experts.num_experts
        if batch_invariant and recipe in BLOCKS and num_rows:
            rows = math.inf
        chosen = formats(recipe, wgrad, rows)
        encoded = chosen.encoded
        if save == "tokens" and chosen.gemms and torch.is_grad_enabled():
            saves_tokens = any(w.requires_grad for w in weights["fc1_weight"].tensors)
    elif any(experts.tensors[0].dtype != dtype for experts in weights.values()):  # under autocast
        encoded = formats(NAMES[dtype], wgrad).encoded
    lengths = [len(experts.tensors) for experts in weights.values()] + [len(bias) for bias in biases]
    lengths += [0 if adapter is None else 2 for adapter in adapters.values()]
    scalings = tuple(1.0 if adapter is None else float(adapter.scaling) for adapter in adapters.values())
    if saves_tokens and adapters["fc1_lora"] is not None:
        raise ValueError('fc1_lora: expected save="x", as its gradients need x; got save="tokens"')
    make = Call if torch.compiler.is_compiling() or queue is not None else _call
    constants = tuple(lengths), layout == "in_out", mode, queue, impl, activation
    return make(*constants, encoded, saves_tokens, bool(batch_invariant), scalings)


_call = lru_cache(maxsize=1024)(Call)  # its arguments are only numbers and names


def offsets(counts: Tensor, x: Tensor, impl: str) -> Tensor:
    """First rows of the experts, `[E + 1]`, on the device of x."""
    # Computed where the counts are: on the host their values are checked, on a GPU nothing waits.
    counts_impl = "torch" if counts.device.type == "cpu" else impl
    first_rows: Tensor = ops.expert_offsets(counts, x.shape[0], counts_impl)
    return first_rows.to(x.device, non_blocking=True)
