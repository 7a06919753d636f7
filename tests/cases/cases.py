"""Every pass and path at sizes of several compiled tiles, for the emulator, and for a GPU when there is one.

Each case compares with float64 by the one tolerance rule (`tolerance.py`), knows the path that it should take,
and poisons what must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.oracle import tolerance
from cases import (
    adapters,
    dgrad_act,
    factory,
    fc1_act,
    fc1_act_quantized,
    gemm,
    gemm_quantized,
    moe,
    wgrad,
    wgrad_quantized,
)
from cases.experts import DEVICE
from cases.factory import wgrad_segment
from fusedmlp.kernels.tiles import select
from fusedmlp.kernels.tiles.table import Path, Recipe
from fusedmlp.kernels.warp_specialized import refusal

BF16, FP16, FP32, TF32 = "bf16", "fp16", "fp32", "tf32"
DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, TF32: torch.float32}
EVERY = (BF16, FP16, FP32, TF32)
SHAPES = ("short", "long")
# The recipe that the kernels of a GPU multiply in.
RECIPES: dict[str, Recipe] = {"sm_90": "fp8_block", "sm_100": "mxfp8", "sm_120": "mxfp8", "gfx950": "mxfp8"}

# Rows of each expert, and padding rows after them.
LOADS = {
    "uneven": ((70, 0, 150, 1, 33), 9),
    "few": ((3, 0, 17, 1), 2),
    "empty": ((0, 0, 0), 5),
    "one": ((0, 131, 0), 0),
    "tall": ((520, 0, 331, 40), 3),  # more steps over rows than any pipeline has stages
    "even": ((128, 128, 128, 128), 0),
    "many": ((1, 0, 2, 65, 0, 0, 7, 1, 128, 3, 0), 70),
}
# (H, F). ALIGNED suits descriptors and vectors. Rows of EIGHTS are multiples of 16 bytes, as descriptors need, and not
# of 32, as vectors need.
ALIGNED, ODD, EIGHTS, DEEP = (208, 144), (101, 67), (136, 72), (656, 144)
GPT_OSS = {"interleaved": True, "limit": 0.7, "alpha": 1.702, "linear_offset": 1.0}


@dataclass(frozen=True)
class Case:
    """`check()` raises unless the results are right. `shape`: the class of tiles to use, whatever the load."""

    name: str
    precision: str
    shape: str
    check: Callable[[], None]
    quick: bool = False  # part of every run
    descriptors: bool = True  # as on a GPU that has them

    def run(self) -> None:
        """`check()` from the same random numbers every time, with TF32 where that is the case's precision."""
        setting = torch.backends.cuda.matmul
        before, setting.fp32_precision = setting.fp32_precision, "tf32" if self.precision == TF32 else "ieee"
        torch.manual_seed(0)
        try:
            self.check()
        finally:
            setting.fp32_precision = before

    @property
    def id(self) -> str:
        return f"{self.shape}-{self.precision}-{self.name}"


def cases() -> list[Case]:
    """All cases, for any GPU."""
    return [*_gemm(), *_fc1_act(), *_dgrad_act(), *_wgrad(), *_layers()]


def of_recipes(architecture: str) -> list[Case]:
    """Cases of kernels that multiply in 8 bits, on a GPU that has them."""
    if architecture not in RECIPES:
        return []
    recipe, path = RECIPES[architecture], "warp_specialized" if architecture in ("sm_90", "sm_100") else "pointer"
    fused = _fc1_act_quantized(recipe) if path == "warp_specialized" else ()
    return [*_gemm_quantized(recipe, path), *fused, *_wgrad_quantized(recipe, path)]


def _grid(
    name: str,
    check: Callable[[torch.dtype], None],
    precisions: tuple[str, ...] = (BF16,),
    shapes: tuple[str, ...] = SHAPES,
    **options: bool,
) -> Iterator[Case]:
    """One case by dtype and class of tiles; fp32 has one class."""
    for precision in precisions:
        dtype = DTYPES[precision]
        for shape in shapes if dtype != torch.float32 else shapes[:1]:
            yield Case(name, precision, shape, partial(check, dtype), **options)


def ragged_check(
    check: Callable[..., object],
    load: str = "uneven",
    sizes: tuple[int, int] = ALIGNED,
    *,
    where: str = "packed",
    layout: str = "out_in",
    bias: bool = False,
    probs: bool = True,
    activation: str = "swiglu",
    options: dict[str, object] | None = None,
    **rest: object,
) -> Callable[[torch.dtype], None]:
    """A check of an M-ragged pass, with the best path that these operands allow."""
    counts, padding = LOADS[load]
    best = "unaligned" if sizes == ODD or "misaligned" in where else "pointer" if "scattered" in where else "tma"
    if rest.get("gathered") and best == "tma":
        best = "gather"

    def run(dtype: torch.dtype) -> None:
        case = factory.Case(
            counts=counts,
            padding=padding,
            H=sizes[0],
            F=sizes[1],
            activation=activation,
            options=options or {},
            layout=layout,
            bias=bias,
            probs=probs,
            dtype=dtype,
        )
        check(case, where, best=best, **rest)

    return run


def _gemm() -> Iterator[Case]:
    case = partial(ragged_check, gemm.check)
    plain = {"bias": False}  # gemm.check adds a bias by default
    yield from _grid("gemm packed", case(), EVERY, quick=True)
    yield from _grid("gemm in_out", case(layout="in_out"), EVERY)
    for name in ("no bias", "scaled bias"):
        check = partial(gemm.check, **(plain if name == "no bias" else {"scale": True}))
        yield from _grid(f"gemm {name}", ragged_check(check), (BF16, TF32))
    for where in ("reversed", "scattered", "misaligned", "scattered misaligned"):
        yield from _grid(f"gemm {where}", case(where=where), (BF16, FP32))
        yield from _grid(f"gemm {where} in_out", case(where=where, layout="in_out"), shapes=("long",))
    yield from _grid("gemm odd", case(sizes=ODD), EVERY)
    yield from _grid("gemm eights", case(sizes=EIGHTS))
    yield from _grid("gemm deep", case(sizes=DEEP), EVERY)
    yield from _grid("gemm deep scattered", case(sizes=DEEP, where="scattered"))
    yield from _grid("gemm without descriptors", case(), (BF16, FP16), descriptors=False)
    for load in ("few", "empty", "one", "many"):
        yield from _grid(f"gemm {load}", case(load))


def _gemm_quantized(recipe: Recipe, path: Path) -> Iterator[Case]:
    def case(name: str, load: str = "uneven", *, quick: bool = False, **options: object) -> Case:
        counts, padding = LOADS[load]
        own = gemm_quantized.Case(recipe, counts, padding, path=path, **options)
        return Case(f"gemm {name}", recipe, "long", partial(gemm_quantized.check, own), quick)

    yield case("packed", bias=True, quick=True)
    yield case("no bias")
    yield case("scaled bias", bias=True, scale=True)
    yield case("biases scattered", bias=True, scale=True, biases="scattered misaligned")
    yield case("dprobs", dprobs=True)
    yield case("left half of a tile", N=96)
    yield case("narrow", N=288, K=32)
    yield case("deep", N=544, K=672)  # more steps than stages, and several tiles a program
    for load in ("few", "empty", "one", "many", "even"):
        yield case(load, load)


def _fc1_act_quantized(recipe: Recipe) -> Iterator[Case]:
    def case(name: str, load: str = "uneven", *, quick: bool = False, **options: object) -> Case:
        counts, padding = LOADS[load]
        own = fc1_act_quantized.Case(recipe, counts, padding, **options)
        return Case(f"fc1_act {name}", recipe, "long", partial(fc1_act_quantized.check, own), quick)

    yield case("swiglu", quick=True)
    yield case("gpt_oss", options=GPT_OSS, bias=True, quick=True)
    yield case("gpt_oss biases scattered", options=GPT_OSS, bias=True, biases="scattered misaligned", F=384)
    yield case("bias without probs", bias=True, probs=False)
    yield case("geglu clamped", activation="geglu", options={"limit": 0.5, "linear_offset": 1.0}, bias=True)
    yield case("geglu_tanh", activation="geglu_tanh")
    yield case("gelu", activation="gelu", bias=True, F=384)  # one and a half tiles
    yield case("relu2 without probs", activation="relu2", bias=True, probs=False)
    yield case("deep", F=384, H=672)  # more steps than stages, and several tiles a program
    if recipe == "mxfp8":  # no whole chunks
        yield case("gpt_oss, blocks", options=GPT_OSS, bias=True, F=160, H=160)
        yield case("gelu, blocks", activation="gelu", bias=True, F=288, H=32)
    for load in ("few", "empty", "one", "many", "even"):
        yield case(load, load)


def _wgrad_quantized(recipe: Recipe, path: Path) -> Iterator[Case]:
    def case(name: str, load: str = "uneven", *, quick: bool = False, **options: object) -> Case:
        counts, padding = LOADS[load]
        own = wgrad_quantized.Case(recipe, path=path, **{"segments": (counts,), "padding": padding, **options})
        return Case(f"wgrad {name}", recipe, "long", partial(wgrad_quantized.check, own), quick)

    yield case("packed", quick=True)
    yield case("overwrite", accumulate=False)
    yield case("in_out", place="packed in_out")
    yield case("reversed", place="reversed")
    yield case("misaligned", place="misaligned")
    yield case("scattered", place="scattered", quick=True)
    yield case("of bf16", dtype=torch.bfloat16)
    yield case("of bf16, overwrite", dtype=torch.bfloat16, accumulate=False)
    yield case("one full tile", segments=((128,),), padding=0)  # nothing lies behind its last column
    yield case("deep", segments=((700, 0, 131),))
    yield case("tall", N=1152, K=32)
    yield case("spread", spread=10, positive=True)  # truncation is worst here
    segments = ((70, 0, 150, 1, 33), (0, 0, 0, 0, 0), (1, 0, 128, 0, 300))
    yield case("segments", segments=segments)
    yield case("segments overwrite", segments=segments, accumulate=False)
    for load in ("few", "empty", "one", "many", "even"):
        yield case(load, load)


def _activations(check: Callable[..., object], name: str) -> Iterator[Case]:
    """Cases of a pass with an activation: fc1_act or dgrad_act."""
    case = partial(ragged_check, check)
    gpt_oss = {"options": GPT_OSS, "bias": True}
    clamped = {"activation": "geglu", "options": {"limit": 0.5, "linear_offset": 1.0}, "bias": True}
    yield from _grid(f"{name} swiglu", case(), EVERY)
    yield from _grid(f"{name} in_out without probs", case(layout="in_out", probs=False))
    yield from _grid(f"{name} gathered in_out bias", case(layout="in_out", gathered=True, bias=True), shapes=("long",))
    yield from _grid(f"{name} deep in_out", case(sizes=DEEP, layout="in_out"), shapes=("long",))
    yield from _grid(f"{name} gpt_oss", case(**gpt_oss), (BF16, FP32), quick=name == "dgrad_act")
    yield from _grid(f"{name} gelu reversed", case(activation="gelu", where="reversed", bias=True))
    yield from _grid(f"{name} clamped", case(**clamped), shapes=("long",))
    yield from _grid(f"{name} clamped scattered", case(where="scattered", **clamped))
    for activation, shape in (
        ("geglu_tanh", "short"),
        ("relu2", "short"),
        ("reglu", "long"),
    ):
        yield from _grid(f"{name} {activation}", case(activation=activation), shapes=(shape,))
    tight = {"activation": "situ_glu", "options": {"alpha": 0.5, "linear_scale": 0.5}}  # bounds that change most values
    yield from _grid(f"{name} situ_glu", case(**tight), shapes=("long",))
    yield from _grid(f"{name} gathered", case(gathered=True), EVERY, quick=name == "fc1_act")
    yield from _grid(f"{name} gathered gpt_oss", case(gathered=True, **gpt_oss))
    yield from _grid(f"{name} gathered scattered", case(gathered=True, where="scattered"))
    yield from _grid(f"{name} gathered odd", case(gathered=True, sizes=ODD, bias=True))
    yield from _grid(f"{name} odd", case(sizes=ODD, bias=True), (BF16, FP16, TF32))
    yield from _grid(f"{name} odd gpt_oss in_out", case(sizes=ODD, layout="in_out", options=GPT_OSS))
    yield from _grid(f"{name} misaligned", case(where="misaligned", bias=True))
    yield from _grid(f"{name} eights", case(sizes=EIGHTS))
    yield from _grid(f"{name} without descriptors", case(), descriptors=False)
    for load in ("few", "empty", "one", "many"):
        yield from _grid(f"{name} {load}", case(load, bias=load == "few"))
    yield from _grid(f"{name} deep", case(sizes=DEEP), (BF16, TF32))
    yield from _grid(f"{name} deep gathered gpt_oss", case(sizes=DEEP, gathered=True, **gpt_oss))
    yield from _grid(f"{name} deep scattered", case(sizes=DEEP, where="scattered", bias=True))


def _fc1_act() -> Iterator[Case]:
    return _activations(fc1_act.check, "fc1_act")


def _dgrad_act() -> Iterator[Case]:
    return _activations(dgrad_act.check, "dgrad_act")


def wgrad_check(
    loads: tuple[str, ...] = ("uneven",),
    sizes: tuple[int, int] = ALIGNED,
    *,
    where: str = "packed",
    grad: torch.dtype = torch.float32,
    accumulate: bool = True,
    bias: bool = False,
    scale: bool = False,
    gathered: str = "",
    shift: bool = False,
) -> Callable[[torch.dtype], None]:
    """A check of wgrad over micro-batches with these loads, with the best path that the operands allow.

    `shift`: the last micro-batch's `x` starts at an address that no vector can be loaded from.
    """

    def run(dtype: torch.dtype) -> None:
        N, K = sizes
        count = len(LOADS[loads[0]][0])
        segs = []
        for i, load in enumerate(loads):
            counts, padding = LOADS[load]
            segs.append(wgrad_segment((counts * count)[:count], N, K, dtype, padding, seed=i, device=DEVICE))
        if shift:
            segs[-1] = wgrad.shifted(segs[-1])
        target = select.target(torch.device(DEVICE), None, dtype)
        options = {"described": True, "gathered": bool(gathered), "segments": len(loads)}
        can_warp_specialize = not refusal(target, **options)
        described = sizes != ODD and not shift and can_warp_specialize
        best = "tma" if described and wgrad.is_warp_specialized(dtype, bool(gathered)) else wgrad.PLACES[where]
        best = best if sizes != ODD and not shift else "unaligned"
        _, experts = wgrad.main_grad(where, count, N, K, grad)
        if not accumulate:
            for expert in experts:
                expert.fill_(float("nan"))
        moved, row_ids = wgrad.gathered(segs, gathered) if gathered else (segs, {})
        if gathered and best == "tma":
            best = "gather"
        packed = "packed" in where
        db = torch.full((count, N), float("nan"), dtype=grad, device=DEVICE) if bias else None
        scale_R = segs[0].scale() if scale else None
        path = wgrad.run(experts, moved, accumulate, packed=packed, db=db, scale=scale_R, **row_ids)
        assert path == wgrad.path_of(best, dtype, sizes, can_warp_specialize)
        wgrad.check(experts, segs, wgrad.UNTOUCHED if accumulate else 0.0)
        wgrad.check_untouched(experts, segs, accumulate)
        if bias:
            wgrad.check_bias(db, segs[0], scale_R)

    return run


def _wgrad() -> Iterator[Case]:
    case = wgrad_check
    bf16 = {"grad": torch.bfloat16}
    yield from _grid("wgrad packed", case(), EVERY, quick=True)
    yield from _grid("wgrad overwrite", case(accumulate=False), EVERY)
    yield from _grid("wgrad of bf16", case(**bf16))
    yield from _grid("wgrad overwrite of bf16", case(accumulate=False, **bf16))
    yield from _grid("wgrad of fp16", case(grad=torch.float16), (FP16,))
    yield from _grid("wgrad in_out", case(where="packed in_out"), EVERY)
    yield from _grid("wgrad in_out of bf16", case(where="packed in_out", **bf16))
    yield from _grid("wgrad in_out bias", case(where="packed in_out", bias=True))
    for where in list(wgrad.PLACES)[2:]:
        yield from _grid(f"wgrad {where}", case(where=where), (BF16, FP32) if "in_out" not in where else (BF16,))
    yield from _grid("wgrad scattered of bf16", case(where="scattered", **bf16))
    yield from _grid("wgrad reversed in_out overwrite", case(where="reversed in_out", accumulate=False))
    yield from _grid("wgrad odd", case(sizes=ODD), (BF16, FP32))
    yield from _grid("wgrad eights", case(sizes=EIGHTS))
    yield from _grid("wgrad bias", case(bias=True), (BF16, FP16, FP32))
    yield from _grid("wgrad scaled bias overwrite", case(bias=True, scale=True, accumulate=False))
    yield from _grid("wgrad scaled bias odd", case(bias=True, scale=True, sizes=ODD))
    yield from _grid("wgrad segments", case(("uneven", "few", "empty")), EVERY)
    yield from _grid("wgrad segments overwrite", case(("few", "uneven"), accumulate=False))
    yield from _grid("wgrad segments in_out of bf16", case(("uneven", "one"), where="packed in_out", **bf16))
    yield from _grid("wgrad segments shifted", case(("uneven", "few"), shift=True))
    yield from _grid("wgrad segments scattered", case(("uneven", "few"), where="scattered"))
    yield from _grid("wgrad segments odd", case(("uneven", "few"), sizes=ODD))
    for name in ("dy", "x"):
        yield from _grid(f"wgrad gathered {name}", case(gathered=name), (BF16, FP16, TF32), quick=name == "dy")
    yield from _grid("wgrad gathered x in_out", case(gathered="x", where="packed in_out"))
    yield from _grid("wgrad gathered dy scaled bias", case(gathered="dy", bias=True, scale=True))
    yield from _grid("wgrad gathered odd", case(gathered="dy", sizes=ODD))
    yield from _grid("wgrad gathered segments", case(("uneven", "few", "empty"), gathered="x"))
    yield from _grid("wgrad gathered segments of bf16", case(("uneven", "few"), gathered="dy", **bf16))
    yield from _grid("wgrad gathered scattered", case(gathered="x", where="scattered"))
    yield from _grid("wgrad without descriptors", case(), descriptors=False)
    yield from _grid("wgrad deep", case(sizes=DEEP))  # eight tiles a program
    yield from _grid("wgrad deep segments", case(("uneven", "few", "empty"), sizes=DEEP))
    yield from _grid("wgrad deep segments overwrite", case(("few", "empty"), sizes=DEEP, accumulate=False))
    yield from _grid("wgrad deep gathered segments", case(("uneven", "few", "empty"), sizes=DEEP, gathered="x"))
    tall = partial(case, ("tall",))
    yield from _grid("wgrad tall", tall(), EVERY)
    yield from _grid("wgrad tall overwrite bias of bf16", tall(accumulate=False, bias=True, **bf16))
    yield from _grid("wgrad tall in_out scaled bias", tall(where="packed in_out", bias=True, scale=True))
    yield from _grid("wgrad tall gathered x", tall(gathered="x"))
    yield from _grid("wgrad tall gathered dy bias", tall(gathered="dy", bias=True))
    yield from _grid("wgrad tall gathered odd", tall(gathered="dy", sizes=ODD))
    yield from _grid("wgrad tall scattered", tall(where="scattered"), (BF16, FP32))
    yield from _grid("wgrad tall misaligned", tall(where="misaligned"), (BF16, FP32))
    yield from _grid("wgrad tall segments", case(("tall", "uneven", "tall")), (BF16, TF32))
    yield from _grid("wgrad tall gathered segments", case(("tall", "few", "tall"), gathered="x"))
    yield from _grid("wgrad many gathered x overwrite", case(("many",), gathered="x", accumulate=False))
    for load in ("few", "empty", "one", "many"):
        yield from _grid(f"wgrad {load}", case((load,)))
        yield from _grid(f"wgrad {load} overwrite bias", case((load,), accumulate=False, bias=True))


def _layer(dtype: torch.dtype, **options: object) -> None:
    """`grouped_mlp`, forward and backward, into main_grad."""
    counts, padding = LOADS["uneven"]
    case = factory.Case(**{"counts": counts, "padding": padding, "H": 208, "F": 144, "dtype": dtype, **options})
    inputs, magnitudes = factory.Inputs(case), {}
    expected = factory.reference(inputs, torch.float64, magnitudes)
    low = factory.reference(inputs, dtype)
    widest = max(dtype, case.main_grad_dtype, key=tolerance.eps)
    tolerance.assert_close(factory.run(inputs, "triton", DEVICE), expected, low, widest, magnitudes)


def _tokens(dtype: torch.dtype, **options: object) -> None:
    """`moe_experts`, forward and backward."""
    case = moe.Case(**{"T": 90, "K": 2, "E": 5, "H": 208, "F": 144, "dtype": dtype, **options})
    inputs = moe.Inputs(case)
    expected, low = (moe.reference(inputs, precision) for precision in (torch.float64, dtype))
    tolerance.assert_close(moe.run(inputs, "triton", DEVICE), expected, low, dtype)


def _adapted(dtype: torch.dtype, function: str, ranks: tuple[int, int] = (16, 72), **options: object) -> None:
    """A layer with adapters in fp32, forward and backward."""
    adapters.Large(function, ranks, dtype, **options).check(impl="triton", device=DEVICE)


def _layers() -> Iterator[Case]:
    def layer(
        name: str, check: Callable[..., None], *precisions: str, quick: bool = False, **options: object
    ) -> Iterator[Case]:
        return _grid(name, partial(check, **options), precisions or (BF16,), quick=quick)

    gpt_oss, gelu = {"options": GPT_OSS, "bias": True}, {"activation": "gelu"}
    yield from layer("grouped_mlp", _layer, *EVERY)
    yield from layer("grouped_mlp gpt_oss", _layer, **gpt_oss)
    yield from layer(
        "grouped_mlp gelu in_out overwrite", _layer, activation="gelu", bias=True, layout="in_out", overwrite=True
    )
    yield from layer("grouped_mlp experts apart", _layer, packed=False, bias=True)
    yield from layer("grouped_mlp odd", _layer, BF16, TF32, H=101, F=67, bias=True)
    yield from layer("grouped_mlp delayed", _layer, delayed=True)
    yield from layer("grouped_mlp into bf16", _layer, main_grad_dtype=torch.bfloat16)
    yield from layer("moe_experts", _tokens, BF16, FP16, FP32, quick=True)
    yield from layer("moe_experts gpt_oss", _tokens, **gpt_oss)
    yield from layer("moe_experts experts apart odd", _tokens, packed=False, H=101, F=67)
    yield from layer("grouped_mlp adapters", _adapted, function="grouped_mlp", quick=True)
    yield from layer("grouped_mlp adapters in_out gelu", _adapted, function="grouped_mlp", layout="in_out", **gelu)
    yield from layer("grouped_mlp adapters apart", _adapted, function="grouped_mlp", where="apart")
    yield from layer("grouped_mlp adapters reversed", _adapted, function="grouped_mlp", where="reversed")
    yield from layer("moe_experts adapters", _adapted, function="moe_experts", quick=True)
    yield from layer("moe_experts adapters of one rank", _adapted, FP16, FP32, function="moe_experts", ranks=(1, None))
    yield from layer("moe_experts adapters gpt_oss", _adapted, function="moe_experts", layout="in_out", **GPT_OSS)
    yield from layer("moe_experts adapters in_out", _adapted, function="moe_experts", ranks=(3, 128), layout="in_out")
    for mode in moe.MODES:  # what each row of the contract launches
        for queue in ("none", "delayed", "fused"):
            options = {"mode": mode, "queue": queue, "microbatches": 1 if queue == "none" else 2, "T": 40}
            yield from _grid(f"moe_experts {mode} {queue}", partial(_tokens, **options), shapes=("short",))
