"""The operators, registered with `torch.library`: schema, what they mutate, their fakes.

Weights are logical `[out, in]` matrices of any strides: one packed `[E, out, in]` tensor or a list of E (biases
likewise). `offsets` `[E + 1]` comes from `expert_offsets`, `activation` is `Activation.encoded`, and `impl`
names the module that runs: `torch_impl` or `triton_impl`. An empty list or a tensor without elements stands
for "none". Nothing is validated here (see `validate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fusedmlp import torch_impl
from fusedmlp.mlp_types import MLPGrads, MLPOutput

_library = torch.library.Library("fusedmlp", "DEF")


def _implementation(impl: str) -> Any:
    if impl == "torch":
        return torch_impl
    return import_module("fusedmlp.triton_impl")  # imports triton, which the torch implementation does without


def _register(schema: str, fake: Callable[..., Any]) -> Any:
    name = schema.split("(", 1)[0]

    def run(*args: Any) -> Any:
        *arguments, impl = args
        return getattr(_implementation(impl), name)(*arguments)

    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedmlp::{name}", fake, lib=_library)
    return getattr(torch.ops.fusedmlp, name).default


def _fake_grouped_mlp(x: Tensor, fc1: list[Tensor], *_: Any) -> MLPOutput:
    return MLPOutput(torch.empty_like(x), x.new_empty(x.shape[0], fc1[0].shape[-2]))


def _fake_grouped_mlp_backward_(*args: Any) -> MLPGrads:
    _, _, _, _, _, x, h, _, fc2, _, _, probs, _, _, _, need_dx, keep, _ = args
    return MLPGrads.empty(x, h, fc2[0].shape[-1], probs, need_dx, keep)


# counts [E] integers -> [E + 1] int32: the first row of every expert, then the end of the last. On a CPU wrong
# counts raise ValueError; on a GPU, where reading them would synchronise, an assertion runs on the device and
# the offsets are clamped to [0, num_rows], so that nothing reads or writes out of bounds.
expert_offsets = _register(
    "expert_offsets(Tensor counts, SymInt num_rows, str impl) -> Tensor",
    lambda counts, *_: counts.new_empty(counts.shape[0] + 1, dtype=torch.int32),
)
# y[r] = w[e] @ x[r] + bias[e]; zero at padding rows.
grouped_gemm = _register(
    "grouped_gemm(Tensor x, Tensor[] w, Tensor[] bias, Tensor offsets, str impl) -> Tensor",
    lambda x, w, *_: x.new_empty(x.shape[0], w[0].shape[-2]),
)
# dw[e] (+)= dy^T x over the rows of e, summed over segments (micro-batches); db[e] = column sums of dy, for one
# segment only.
grouped_wgrad_ = _register(
    "grouped_wgrad_(Tensor(a!)[] dw, Tensor(b!)[] db, Tensor[] dy, Tensor[] x, Tensor[] offsets, "
    "bool accumulate, str impl) -> ()",
    lambda *_: None,
)
# -> (y, h): MLPOutput
grouped_mlp = _register(
    "grouped_mlp(Tensor x, Tensor[] fc1, Tensor[] fc2, Tensor[] bias1, Tensor[] bias2, Tensor offsets, "
    "Tensor? probs, str activation, str impl) -> (Tensor, Tensor)",
    _fake_grouped_mlp,
)
# -> (dx, dprobs, dh, act_probs): MLPGrads. The last two only if `keep`, for delayed weight gradients.
grouped_mlp_backward_ = _register(
    "grouped_mlp_backward_(Tensor(a!)[] dw1, Tensor(b!)[] dw2, Tensor(c!)[] db1, Tensor(d!)[] db2, Tensor dy, "
    "Tensor x, Tensor h, Tensor[] fc1, Tensor[] fc2, Tensor[] bias2, Tensor offsets, Tensor? probs, "
    "str activation, bool accumulate1, bool accumulate2, bool need_dx, bool keep, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_grouped_mlp_backward_,
)
