"""The operators, registered with `torch.library`: schemas, which mark mutated arguments, and fake implementations.

Weights are logical `[out, in]` matrices of any strides: one packed `[E, out, in]` tensor or a list of E (biases
likewise), or the elements and scales of an 8-bit copy (`types.WeightCopies`). `offsets` comes from `expert_offsets` or
`order_rows`, or is `[E + 1]` int32 first rows; `activation` is `Activation.encoded`, `recipe` is
`recipe.Formats.encoded`, or "" for operands as they come, and `impl` names the module that runs: `torch_impl` or
`triton_impl`. `batch_invariant`: bits of a row's results depend on the row and the weights alone. An empty list or a
tensor without elements stands for "none"; AOTInductor makes None of an empty list, so a forward's biases may be None.
Nothing is validated here (see `validate.py`).

With `row_ids` `[R]` int32, rows are gathered: row `r` is row `row_ids[r]` of an operand `[T, H]`. The ids of padding
rows are valid, and are not used.

PyTorch's dispatcher takes longer for such arguments than the host needs for a launch. So the functions here go through
it only where something (a mode, a tracer, autograd) has to see the operator: see `_is_watched`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from importlib import import_module
from operator import or_
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fusedmlp.kernels.operands.quantized import is_quantized
from fusedmlp.operators import flops, torch_impl, torch_quantize
from fusedmlp.operators.types import (
    MLPArguments,
    MLPBackwardArguments,
    MLPGrads,
    MLPOutput,
    RowCopies,
    RowOrder,
)
from fusedmlp.versions import outside_of_graphs

library = torch.library.Library("fusedmlp", "DEF")


@lru_cache
def _implementation(impl: str) -> Any:
    if impl == "torch":
        return torch_impl
    return import_module("fusedmlp.operators.triton_impl")  # imports triton, which `torch_impl` does without


def register(schema: str, fake: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Register an operator that runs Python code; compilers see the results of `fake` in its place."""
    name = schema.split("(", 1)[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    if "!" in schema:  # neither its writes into given tensors nor its results are differentiated
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fusedmlp::{name}", fake, lib=library)
    return getattr(torch.ops.fusedmlp, name).default


_TYPES_IN_SCHEMAS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor] | None: "Tensor[]?",
    str: "str",
    bool: "bool",
}


def _fields(arguments: type, written: str = "") -> str:
    """The fields of a named tuple as arguments in a schema; `written`: a letter for each of the first ones, which the
    operator writes to.
    """
    fields = [f"{_TYPES_IN_SCHEMAS[hint]} {name}" for name, hint in get_type_hints(arguments).items()]
    for i, letter in enumerate(written):
        fields[i] = fields[i].replace("Tensor", f"Tensor({letter}!)")
    return ", ".join(fields)


def _register(schema: str, fake: Callable[..., Any]) -> Any:
    """A function that calls the operator, or, if unwatched, its implementation, which may return None for "none"."""
    name = schema.split("(", 1)[0]

    @outside_of_graphs
    def run(*args: Any) -> Any:
        *arguments, impl = args
        return getattr(_implementation(impl), name)(*arguments)

    def run_operator(*args: Any) -> Any:
        with torch.no_grad():  # an operator is differentiated as a whole: see `autograd/operators.py`
            results = run(*args)
        if not isinstance(results, MLPGrads | MLPOutput):
            return results
        like = results.y if isinstance(results, MLPOutput) else MLPBackwardArguments(*args).h
        return type(results)(*(like.new_empty(0) if result is None else result for result in results))

    operator = register(schema, fake, run_operator)
    types = [str(argument.type) for argument in operator._schema.arguments]
    single = tuple(i for i, type in enumerate(types) if type in ("Tensor", "Optional[Tensor]"))
    lists = tuple(i for i, type in enumerate(types) if "List[Tensor]" in type)

    def call(*args: Any) -> Any:
        # Dynamo folds `is_compiling`, so it skips `_is_watched`.
        if torch.compiler.is_compiling() or _is_watched(args, single, lists):
            return operator(*args)
        return run(*args)

    call.run = run  # type: ignore[attr-defined]  # for modes that see the operator and run it
    return call


def _key_set(*names: str) -> int:
    keys: Any = (torch._C._parse_dispatch_key(name) for name in names)
    return reduce(or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keys))


# Keys that need no dispatch. Any other key of a thread belongs to a mode, a transform or a tracer. Any other key of a
# tensor belongs to a subclass, to another device, or to a view that is not what its memory holds (conjugate, negative).
_OF_THREADS = _key_set("BackendSelect", "ADInplaceOrView")
_OF_TENSORS = _key_set("ADInplaceOrView", *(of + on for of in ("", "Autograd", "Autocast") for on in ("CPU", "CUDA")))
_TYPES = frozenset({Tensor, torch.nn.Parameter})


def _is_watched(args: Sequence[Any], single: Sequence[int], lists: Sequence[int]) -> bool:
    """Whether the dispatcher has to see a call: for a mode (FakeTensorMode, FlopCounterMode, a tracer's), a transform,
    the profiler, autograd, or a tensor that is more than its memory. `single` and `lists` are the positions in `args`
    of tensors and of lists of tensors.
    """
    if (
        torch._C._dispatch_tls_local_include_set().raw_repr() | _OF_THREADS != _OF_THREADS
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()  # by this thread
        or torch.autograd.profiler._is_profiler_enabled  # by any
    ):
        return True
    graph = torch.is_grad_enabled()
    for i in single:
        tensor = args[i]
        if tensor is not None and (
            type(tensor) not in _TYPES
            or torch._C._dispatch_keys(tensor).raw_repr() | _OF_TENSORS != _OF_TENSORS
            or (graph and tensor.requires_grad)
        ):
            return True
    for i in lists:
        group = args[i]
        if group and (not _TYPES.issuperset(map(type, group)) or (graph and any(t.requires_grad for t in group))):
            return True
    return False


def _fake_plan(like: Tensor, num_rows: int, num_experts: int, impl: str) -> Tensor:
    size = num_experts + 1
    if impl == "triton":
        size = import_module("fusedmlp.kernels.routing.plan").size_on(like.device, num_rows, num_experts)
    return like.new_empty(size, dtype=torch.int32)


def _fake_order_rows(top_k_index: Tensor, probs: Tensor, num_experts: int, impl: str) -> RowOrder:
    size = top_k_index.numel()
    row_ids, places = (top_k_index.new_empty(size, dtype=torch.int32) for _ in range(2))
    return RowOrder(_fake_plan(top_k_index, size, num_experts, impl), row_ids, places, probs.new_empty(size))


def _fake_quantize_rows(x: Tensor, offsets: Tensor, num_experts: int, recipe: str, impl: str) -> RowCopies:
    made: RowCopies = _implementation(impl).empty_row_copies(x, num_experts, recipe)
    return made


def _fake_grouped_mlp(*args: Any) -> MLPOutput:
    given = MLPArguments(*args)
    x, num_rows = given.x, (given.x if given.row_ids is None else given.row_ids).shape[0]
    dtype = x.dtype if given.x_scales is None else torch.bfloat16
    ranks = (lora[0].shape[1] if lora else 0 for lora in (given.lora1, given.lora2))
    h = x.new_empty(num_rows, given.fc1[0].shape[-2], dtype=dtype)
    y = x.new_empty(num_rows if given.places is None else x.shape[0], x.shape[1], dtype=dtype)
    return MLPOutput(y, h, *(x.new_empty((num_rows, r) if r else 0, dtype=dtype) for r in ranks))


def _fake_grouped_mlp_backward_(*args: Any) -> MLPGrads:
    given = MLPBackwardArguments(*args)
    dy, h, probs = given.dy, given.h, given.probs
    num_rows = h.shape[0]  # not that of dy, where rows are gathered from tokens
    F = given.fc2[0].shape[-2 if is_quantized(given.fc2) else -1]
    return MLPGrads(
        dy.new_empty((num_rows if given.places is None else dy.shape[0], dy.shape[1]) if given.need_dx else 0),
        dy.new_empty(0) if probs is None else probs.new_empty(num_rows),
        torch.empty_like(h) if given.keep else h.new_empty(0),
        h.new_empty(num_rows, F) if given.keep else h.new_empty(0),
    )


# counts [E] integers -> int32: the first row of every expert, then the end of the last, [E + 1]; from the triton
# implementation, a plan that begins with those (kernels/routing/plan.py). On a CPU wrong counts raise ValueError; on a
# GPU, where reading them would synchronise, an assertion runs on the device and the rows are clamped to [0, num_rows],
# so that nothing reads or writes out of bounds.
expert_offsets = _register(
    "expert_offsets(Tensor counts, SymInt num_rows, str impl) -> Tensor",
    lambda counts, num_rows, impl: _fake_plan(counts, num_rows, counts.shape[0], impl),
)
# top_k_index [T, K] of any integer dtype, probs [T, K] -> (plan, row_ids, places, probs): RowOrder. Ids outside
# [0, num_experts) belong to no expert; their rows are padding.
order_rows = _register(
    "order_rows(Tensor top_k_index, Tensor probs, int num_experts, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_order_rows,
)
# w: weights alone, float32 or bfloat16, rounded to bfloat16 first -> WeightCopies; `recipe` is an 8-bit recipe's name.
quantize_weights = _register(
    "quantize_weights(Tensor[] w, str recipe, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda w, recipe, _: torch_quantize.empty_weight_copies(w, recipe),
)
# x [R, C] -> RowCopies; `recipe` is an 8-bit recipe's name. x is read once.
quantize_rows = _register(
    "quantize_rows(Tensor x, Tensor offsets, int num_experts, str recipe, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_quantize_rows,
)
# y[r] = w[e] @ x[r] + bias[e]; zero at padding rows.
grouped_gemm = _register(
    "grouped_gemm(Tensor x, Tensor[] w, Tensor[]? bias, Tensor offsets, str recipe, bool batch_invariant, "
    "str impl) -> Tensor",
    lambda x, w, *_: x.new_empty(x.shape[0], w[0].shape[-2]),
)
# dw[e] (+)= dy^T x over the rows of e, summed over segments (micro-batches); db[e] = column sums of dy, for one
# segment only. dy_row_ids and x_row_ids: the row ids of dy and of x, for each segment; all segments have them, or none.
grouped_wgrad_ = _register(
    "grouped_wgrad_(Tensor(a!)[] dw, Tensor(b!)[] db, Tensor[] dy, Tensor[] x, Tensor[] offsets, "
    "Tensor[] dy_row_ids, Tensor[] x_row_ids, bool accumulate, str recipe, str impl) -> ()",
    lambda *_: None,
)
# -> (y, h, t1, t2): MLPOutput. With `row_ids`, x is [T, H]; with `x_scales`, a copy by `quantize_rows`. With `places`,
# those of `order_rows`, y is [T, H], too: y[t] = sum over k of row places[t * K + k], in that order, in fp32.
grouped_mlp = _register(
    f"grouped_mlp({_fields(MLPArguments)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_grouped_mlp,
)
# -> (dx, dprobs, dh, act_probs): MLPGrads, per row. The last two only if `keep`, for delayed weight gradients. With
# `row_ids`, dy and x are [T, H]; with `places`, dx is, too, a sum as y is, and `dprobs[i]` belongs to flat position i,
# that is to row `places[i]`.
grouped_mlp_backward_ = _register(
    f"grouped_mlp_backward_({_fields(MLPBackwardArguments, 'abcdef')}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_grouped_mlp_backward_,
)
flops.register()
