"""Calls of operators of the `triton` implementation that between them launch every kernel in every variant.

A variant is what makes Triton compile another kernel: which optional inputs there are, constants, dtypes, and whether
sizes and addresses are multiples of 16. Tensors are small and uninitialised: only their descriptions matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_, grouped_dgrad_act_quantize_
from fusedmlp.kernels.launching.program import Builder, Launch
from fusedmlp.kernels.launching.run import Operator
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.routing.combine import combine_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.routing.spread import spread_
from fusedmlp.kernels.tiles.select import Target
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments

Calls = Iterator[tuple[Operator, tuple[Any, ...]]]
Cases = dict[str, Callable[[torch.dtype], Calls]]


def launches(calls: Calls, target: Target) -> Iterator[Launch]:
    """Plan the launches of the calls on a target."""
    for operator, args in calls:
        yield from operator.program(target, *args).launches


_MANY = (6000, 0, 1)  # rows; with wide matrices, MMAs are wgrad's limit
_SWIGLU = Activation("swiglu")
_GPT_OSS = Activation("swiglu", interleaved=True, limit=7.0, alpha=1.702, linear_offset=1.0)


@dataclass(frozen=True)
class Layer:
    """One layer's forward and backward."""

    activation: Activation = _SWIGLU
    biases: bool = False
    probs: bool = True
    experts: str = "packed"  # or "apart" (a table of addresses), or "reversed" (a negative stride)
    in_out: bool = False
    sizes: tuple[int, int] = (256, 128)  # H, F
    grad_dtype: torch.dtype | None = torch.float32  # of main_grad; None: the weight's
    add: bool = True
    only_biases: bool = False  # weights do not require gradients
    gathered: bool = False  # rows of x and of dy are gathered from tokens
    need_dx: bool = True
    recipe: str = ""
    rank: int = 0  # of adapters; 0: there are none
    counts: tuple[int, ...] = (40, 60, 0)

    def __call__(self, dtype: torch.dtype) -> Calls:
        """Calls of forward and of backward."""
        H, F = self.sizes
        G = 2 * F if self.activation.gated else F
        offsets, rows = _offsets(self.counts), sum(self.counts)
        row_ids = torch.empty(rows, dtype=torch.int32) if self.gathered else None
        x, dy = torch.empty(2, 50 if self.gathered else rows, H, dtype=dtype)
        h = torch.empty(rows, G, dtype=dtype)
        probs = torch.empty(rows) if self.probs else None
        weights = [self._experts((G, H), dtype), self._experts((H, F), dtype)]
        grads = [self._experts(shape, self.grad_dtype or dtype) for shape in ((G, H), (H, F))]
        biases = [self._experts((width,), dtype) if self.biases else [] for width in (G, H)]
        bias_grads = [self._experts((width,), dtype) if self.biases else [] for width in (G, H)]
        if self.only_biases:
            grads = [[], []]
        adapters = [self._adapter(*sizes, dtype) if self.rank else [] for sizes in ((H, G), (F, H))]
        adapter_grads = [[torch.empty(factor.shape) for factor in factors] for factors in adapters]
        t = [torch.empty(rows, self.rank, dtype=dtype) if self.rank else None for _ in adapters]
        forward = MLPArguments(
            x=x,
            x_scales=None,
            fc1=weights[0],
            fc2=weights[1],
            bias1=biases[0],
            bias2=biases[1],
            offsets=offsets,
            row_ids=row_ids,
            places=row_ids,
            probs=probs,
            activation=self.activation.encoded,
            recipe=self.recipe,
            lora1=adapters[0],
            lora2=adapters[1],
            impl="triton",
        )
        yield triton_impl.grouped_mlp, forward.without_impl
        backward = MLPBackwardArguments.of(
            forward,
            dw1=grads[0],
            dw2=grads[1],
            db1=bias_grads[0],
            db2=bias_grads[1],
            dlora1=adapter_grads[0],
            dlora2=adapter_grads[1],
            dy=dy,
            h=h,
            accumulate1=self.add,
            accumulate2=self.add,
            need_dx=self.need_dx,
            keep=False,
            t1=t[0],
            t2=t[1],
        )
        yield triton_impl.grouped_mlp_backward_, backward.without_impl

    def _adapter(self, size_in: int, size_out: int, dtype: torch.dtype) -> list[Tensor]:
        """A and B, lying as weights do."""
        adapter = torch.empty(3, self.rank, size_in, dtype=dtype), torch.empty(3, size_out, self.rank, dtype=dtype)
        return [factor.mT.contiguous().mT if self.in_out else factor for factor in adapter]

    def _experts(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        if self.in_out and len(shape) == 2:
            shape = shape[::-1]
        if self.experts == "packed":
            group = [torch.empty(3, *shape, dtype=dtype)]
        else:
            slots = (2, 1, 0) if self.experts == "reversed" else (0, 3, 1)
            pool = torch.empty(4, *shape, dtype=dtype)
            group = [pool[slot] for slot in slots]
        return [t.mT for t in group] if self.in_out and len(shape) == 2 else group


def _offsets(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _linear(biases: bool, dtype: torch.dtype, recipe: str = "") -> Calls:
    x, w = torch.empty(100, 256, dtype=dtype), torch.empty(3, 128, 256, dtype=dtype)
    bias = [torch.empty(3, 128, dtype=dtype)] if biases else []
    yield triton_impl.grouped_gemm, (x, [w], bias, _offsets((40, 60, 0)), recipe, False)
    grads, dy = ([torch.empty_like(w)], [torch.empty_like(b) for b in bias]), torch.empty(100, 128, dtype=dtype)
    yield triton_impl.wgrad_of_segments_, (*grads, (dy,), (x,), (_offsets((40, 60, 0)),), (), (), False, "")


def _microbatches(add: bool, gathered: bool, dtype: torch.dtype, recipe: str = "") -> Calls:
    """`gathered`: rows of x are gathered from tokens, as those of fc1."""
    offsets = (_offsets((40, 60, 0)), _offsets((7, 0, 9)), _offsets((0, 1, 0)))
    dy, x = (tuple(torch.empty(int(o[-1]), width, dtype=dtype) for o in offsets) for width in (128, 256))
    row_ids = tuple(torch.empty(t.shape[0], dtype=torch.int32) for t in x) if gathered else ()
    yield triton_impl.wgrad_of_segments_, ([torch.empty(3, 128, 256)], [], dy, x, offsets, (), row_ids, add, recipe)


def _many_experts(dtype: torch.dtype) -> Calls:
    num_experts, num_rows = 512, 600
    for counts in (torch.empty(num_experts, dtype=torch.int64), torch.empty(num_experts, dtype=torch.int32)):
        yield triton_impl.checked_plan, (counts, num_rows)
    x, w = torch.empty(num_rows, 16, dtype=dtype), torch.empty(num_experts, 16, 16, dtype=dtype)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    yield triton_impl.grouped_gemm, (x, [w], [], offsets, "", False)
    yield triton_impl.wgrad_of_segments_, ([torch.empty_like(w)], [], (x,), (x,), (offsets,), (), (), False, "")
    ids, probs = torch.empty(num_rows // 8, 8, dtype=torch.int64), torch.empty(num_rows // 8, 8)
    yield triton_impl.order_rows, (ids, probs, num_experts)
    for width in (256, 255):
        y, places = torch.empty(num_rows, width, dtype=dtype), torch.empty(num_rows, dtype=torch.int32)
        yield _combine, (y, places, num_rows // 8)
        yield _spread, (y[: num_rows // 8], places, offsets)


def _plan_combine(builder: Builder, y_RH: Array, places_R: Array, num_tokens: int) -> None:
    combine_.plan(builder, builder.empty((num_tokens, y_RH.shape[1]), y_RH.dtype), y_RH, places_R)


def _plan_spread(builder: Builder, x_TH: Array, places_R: Array, offsets: Array) -> None:
    out_RH = builder.empty((places_R.shape[0], x_TH.shape[1]), x_TH.dtype)
    spread_.plan(builder, out_RH, x_TH, places_R, Schedule(offsets, places_R.shape[0]))


_combine, _spread = Operator(_plan_combine, None), Operator(_plan_spread, None)


def _plan_quantize(
    builder: Builder,
    x_RC: Array,
    offsets: Array,
    row_ids_R: Array | None,
    recipe: Recipe,
    row_copy: bool,
    token_copy: bool,
) -> None:
    num_rows, C = (x_RC if row_ids_R is None else row_ids_R).shape[0], x_RC.shape[1]
    schedule = Schedule.planned(builder, offsets, num_rows, offsets.shape[0] - 1)
    num_tiles = schedule.max_tiles(quantized.TILE_ROWS)

    def made(shape: tuple[int, ...]) -> Quantized:
        scales = quantized.scales_shape(num_tiles, C, recipe), quantized.SCALE_DTYPES[recipe]
        return Quantized(builder.empty(shape, torch.float8_e4m3fn), builder.empty(*scales))

    rows = made((num_rows, C)) if row_copy else None
    tokens = made(quantized.token_copy_shape(num_tiles, C, recipe)) if token_copy else None
    grouped_quantize_.plan(builder, rows, tokens, x_RC, schedule, recipe, row_ids_R=row_ids_R)


_quantize = Operator(_plan_quantize, None)


def _quantizing(recipe: Recipe, gathered: bool, _: torch.dtype) -> Calls:
    """Calls with x of every dtype, as launches without a tile are compiled once."""
    offsets, row_ids = _offsets((40, 60, 0)), torch.empty(100, dtype=torch.int32) if gathered else None
    x, half, single = (torch.empty(100, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    unaligned = torch.empty(100, 257, dtype=torch.bfloat16)[:, 1:]
    for of in (x, half, single, unaligned):
        yield _quantize, (of, offsets, row_ids, recipe, True, True)
    for copies in ((True, False), (False, True)):
        yield _quantize, (x, offsets, row_ids, recipe, *copies)


def _plan_quantize_weights(
    builder: Builder, experts: ExpertTensors | list[Array], recipe: Recipe, by_in: bool, by_out: bool
) -> None:
    w = ExpertTensors.packed(experts[0], 2) if isinstance(experts, list) else experts

    def made(M: int, C: int) -> Quantized:
        scales = quantized.weight_scales_shape(w.num_experts, M, C, recipe), quantized.SCALE_DTYPES[recipe]
        return Quantized(builder.empty((w.num_experts, M, C), torch.float8_e4m3fn), builder.empty(*scales))

    copies = made(256, 384) if by_in else None, made(384, 256) if by_out else None
    grouped_quantize_weights_.plan(builder, *copies, w, recipe)


_quantize_weights = Operator(_plan_quantize_weights, None)


def _quantizing_weights(recipe: Recipe, _: torch.dtype) -> Calls:
    """Calls with weights of every dtype; by a stride, by a table of addresses, and where vectors do not fit."""
    packed = [torch.empty(2, 256, 384, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    apart = [torch.empty(256, 384, dtype=torch.bfloat16) for _ in range(2)]
    unaligned = torch.empty(2, 256, 385, dtype=torch.bfloat16)[:, :, 1:]
    for group in (*([w] for w in packed), apart, [unaligned]):
        yield _quantize_weights, (group, recipe, True, True)
    for copies in ((True, False), (False, True)):
        yield _quantize_weights, (packed[:1], recipe, *copies)


def _plan_act_quantize(
    builder: Builder,
    h_RG: Array,
    d_RF: Array,
    offsets: Array,
    probs_R: Array | None,
    activation: str,
    recipe: Recipe,
    outputs: str,
) -> None:
    """Forward and backward. `outputs` of backward: "everything", "copies" or "16 bits"."""
    (num_rows, F), G = d_RF.shape, h_RG.shape[1]
    schedule = Schedule.planned(builder, offsets, num_rows, offsets.shape[0] - 1)
    act, num_tiles = triton_impl.act_options(activation), schedule.max_tiles(quantized.TILE_ROWS)

    def made(shape: tuple[int, ...], C: int) -> Quantized:
        scales = quantized.scales_shape(num_tiles, C, recipe), quantized.SCALE_DTYPES[recipe]
        return Quantized(builder.empty(shape, torch.float8_e4m3fn), builder.empty(*scales))

    def tokens(C: int) -> Quantized:
        return made(quantized.token_copy_shape(num_tiles, C, recipe), C)

    options: dict[str, Any] = {"probs_R": probs_R}
    grouped_act_quantize_.plan(builder, made((num_rows, F), F), h_RG, schedule, act, recipe, **options)
    copies = (None, None, None) if outputs == "16 bits" else (made((num_rows, G), G), tokens(G), tokens(F))
    if outputs != "copies":
        options |= {"dh_RG": builder.empty((num_rows, G), h_RG.dtype), "a_RF": builder.empty(d_RF.shape, h_RG.dtype)}
    grouped_dgrad_act_quantize_.plan(builder, *copies, d_RF, h_RG, schedule, act, recipe, **options)


_act_quantize = Operator(_plan_act_quantize, None)


def _act_quantizing(recipe: Recipe, _: torch.dtype) -> Calls:
    """Forward and backward: every layout of channels, and each optional input and output absent and present."""
    bf16, offsets, probs = torch.bfloat16, _offsets((40, 60, 0)), torch.empty(100)
    variants = [
        (_SWIGLU, 256, True, "copies"),
        (_SWIGLU, 256, True, "everything"),
        (_SWIGLU, 256, False, "16 bits"),
        (_GPT_OSS, 256, True, "everything"),
        (Activation("geglu", limit=7.0), 256, True, "copies"),
        (Activation("gelu"), 256, True, "everything"),
    ]
    if recipe == "mxfp8":
        variants.append((_SWIGLU, 96, True, "everything"))
    for activation, F, with_probs, outputs in variants:
        G = 2 * F if activation.gated else F
        h, d = torch.empty(100, G, dtype=bf16), torch.empty(100, F, dtype=bf16)
        yield _act_quantize, (h, d, offsets, probs if with_probs else None, activation.encoded, recipe, outputs)


def quantizing(recipes: Iterable[Recipe]) -> Cases:
    """Cases of the kernels that quantize."""
    rows: Cases = {
        f"{recipe}{', gathered' * gathered}": partial(_quantizing, recipe, gathered)
        for recipe in recipes
        for gathered in (False, True)
    }
    own = {f"{recipe}, weights": partial(_quantizing_weights, recipe) for recipe in recipes}
    return rows | own | {f"{recipe}, activations": partial(_act_quantizing, recipe) for recipe in recipes}


def eight_bit(recipe: str) -> Cases:
    """Cases of layers whose GEMMs multiply in 8 bits."""
    own = f"{recipe}/{recipe}"
    demanding = Layer(_GPT_OSS, biases=True, experts="apart", gathered=True, recipe=own)
    many: Cases = {"many rows": Layer(sizes=(1024, 512), counts=_MANY, recipe=own)}  # TMA adds
    layers: Cases = {
        "main_grad": Layer(recipe=own),
        **(many if recipe == "fp8_block" else {}),
        "gathered, gpt-oss, biases, experts apart": demanding,
        "gelu": Layer(Activation("gelu"), recipe=own),
        "geglu, first micro-batch": Layer(Activation("geglu", limit=7.0), add=False, recipe=own),
        "in_out, reversed, no probs": Layer(in_out=True, experts="reversed", probs=False, recipe=own),
        "main_grad of the weight's dtype": Layer(grad_dtype=None, recipe=own),
        "wgrad in bf16": Layer(recipe=f"{recipe}/bf16"),
        "linear, bias": partial(_linear, True, recipe=own),
        "several micro-batches": partial(_microbatches, True, False, recipe=own),
    }
    return {f"{recipe}, {name}": calls for name, calls in layers.items()}


_SEVERAL: Cases = {"several micro-batches": partial(_microbatches, True, False)}

# Those that need the most registers come first, on every path that the tables have: by pointers (experts apart), by
# pointers without vectors (odd sizes), and by descriptors where there are any, for all operands or for all but the
# gathered one.
DEMANDING: Cases = {
    "gathered, gpt-oss, biases, experts apart": Layer(_GPT_OSS, biases=True, experts="apart", gathered=True),
    "gathered, odd sizes, gpt-oss, biases, experts apart": Layer(
        _GPT_OSS, biases=True, experts="apart", sizes=(257, 131), gathered=True
    ),
    "gathered micro-batches": partial(_microbatches, True, True),
    "gathered": Layer(gathered=True),
    "gathered, gpt-oss, biases": Layer(_GPT_OSS, biases=True, gathered=True),
    "gpt-oss, biases": Layer(_GPT_OSS, biases=True),
    **_SEVERAL,
    "first micro-batch": Layer(add=False),
    "geglu, in_out, biases": Layer(Activation("geglu", limit=7.0), biases=True, in_out=True),
    "no dx": Layer(need_dx=False),
    "odd sizes, biases, first micro-batch": Layer(biases=True, sizes=(257, 131), add=False),
    "512 experts": _many_experts,  # for the kernels that plan a load
    "adapters, gathered, gpt-oss, biases": Layer(_GPT_OSS, biases=True, gathered=True, rank=16, only_biases=True),
    "adapters": Layer(rank=16, only_biases=True),
}
# The same for warp-specialized kernels.
WARP_SPECIALIZED: Cases = {
    "main_grad": Layer(),
    "gpt-oss, biases": DEMANDING["gpt-oss, biases"],
    "gathered": DEMANDING["gathered"],
    "gathered, gpt-oss, biases": DEMANDING["gathered, gpt-oss, biases"],
    "gathered, geglu, biases, experts apart": Layer(
        Activation("geglu", limit=7.0), biases=True, experts="apart", gathered=True
    ),
    "gelu, experts apart": Layer(Activation("gelu"), experts="apart"),
    "geglu, in_out, biases": DEMANDING["geglu, in_out, biases"],
    "first micro-batch": Layer(add=False),
    "many rows, wide": Layer(sizes=(4096, 1024), counts=_MANY),
    "many rows, wide, gathered": Layer(sizes=(4096, 1024), counts=_MANY, gathered=True),
    "many rows, first micro-batch": Layer(sizes=(1024, 512), counts=_MANY, add=False),
    "many rows, gathered, first micro-batch": Layer(sizes=(1024, 512), counts=_MANY, add=False, gathered=True),
    "gathered micro-batches": DEMANDING["gathered micro-batches"],
    **_SEVERAL,
    "adapters, gathered, gpt-oss, biases": DEMANDING["adapters, gathered, gpt-oss, biases"],
    "adapters, swiglu, in_out": Layer(in_out=True, rank=16, only_biases=True),
}
# Cases that differ most between kernels, and so between compilers: for every dtype and path. Together they have every
# optional input absent and present, adding and overwriting, gated and not, aligned and not.
CORE: Cases = {
    "no option": Layer(probs=False, grad_dtype=None, add=False),
    "main_grad": Layer(),
    "gelu, biases, first micro-batch": Layer(Activation("gelu"), biases=True, add=False),
    "odd sizes, biases": Layer(biases=True, sizes=(257, 131)),
    "gpt-oss, biases, experts apart": Layer(_GPT_OSS, biases=True, experts="apart"),
    "odd sizes, gpt-oss, biases, experts apart": Layer(_GPT_OSS, biases=True, experts="apart", sizes=(257, 131)),
    **_SEVERAL,
}
# Cases that differ in layout or in the scalar function: for bf16 and fp32.
VARIATIONS: Cases = {
    "in_out, biases": Layer(biases=True, in_out=True),
    "experts reversed, main_grad of the weight's dtype": Layer(experts="reversed", grad_dtype=None),
    "odd sizes, in_out, experts apart": Layer(experts="apart", in_out=True, sizes=(257, 131)),
    "multiples of 8, gelu, biases": Layer(Activation("gelu"), biases=True, sizes=(264, 136)),
    "several micro-batches, first": partial(_microbatches, False, False),
    "gathered, first micro-batch": Layer(add=False, gathered=True),
    "gathered, odd sizes, gelu": Layer(Activation("gelu"), sizes=(257, 131), gathered=True),
    "linear, bias": partial(_linear, True),
    "bias gradients alone": Layer(biases=True, only_biases=True),
}
# Cases that no dtype changes: activations are computed in fp32, plans of loads in integers.
ONCE: Cases = {
    "geglu": Layer(Activation("geglu")),
    "geglu_tanh": Layer(Activation("geglu_tanh")),
    "reglu": Layer(Activation("reglu")),
    "relu2": Layer(Activation("relu2")),
    "situ_glu": Layer(Activation("situ_glu")),
    "linear": partial(_linear, False),
}
