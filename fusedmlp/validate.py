"""Checks the arguments of the public functions. Each error names the argument, what was expected, and what came."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmlp import environment
from fusedmlp.contract.checks import are_alike, check_flag, same_strides
from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.contract.route import MODES, Mode
from fusedmlp.recipe import BLOCKS, DTYPES, SAVES, WGRADS, computed_dtypes

WEIGHT_LAYOUTS = ("out_in", "in_out")
IMPLS = ("auto", "triton", "torch")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WITHOUT_KERNELS = ("cpu", "meta")  # types of devices
_SUCCESSORS = {
    "is_first_microbatch": ": a step of main_grad begins with buffer.zero_grad() or optimizer.zero_grad(), where its "
    "owner zeroes it, or with param.overwrite_main_grad; copies of weights that outlive a call are quantized_weights="
}
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class ExpertWeight(NamedTuple):
    """A weight as a list of tensors (one packed, or one per expert), and its logical sizes."""

    tensors: list[Tensor]
    num_experts: int
    out_features: int
    in_features: int


class Options(NamedTuple):
    """Arguments of a layer that are not tensors, by their names there."""

    weight_layout: str
    accumulate_wgrad: Mode
    wgrad_queue: WgradQueue | None
    impl: str
    recipe: str | None
    wgrad: str
    quantized_weights: Any = None  # QuantizedWeights
    save: str = "x"
    batch_invariant: bool = False

    def check(self) -> Options:
        """Raise for a wrong one; return self."""
        one_of("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        one_of("accumulate_wgrad", self.accumulate_wgrad, MODES)
        if self.wgrad_queue is not None and not isinstance(self.wgrad_queue, WgradQueue):
            raise TypeError(f"wgrad_queue: expected a fusedmlp.WgradQueue or None; got {kind(self.wgrad_queue)}")
        recipe(self.recipe, self.wgrad)
        check_flag("batch_invariant", self.batch_invariant)
        saved(self.save, self.recipe, self.wgrad, delayed=self.wgrad_queue is not None)
        return self


def refuse_removed(arguments: dict[str, Any]) -> None:
    """Raise TypeError, as Python does, for arguments that a function does not take; name what has replaced one."""
    for name in arguments:
        successor = _SUCCESSORS.get(name, "")
        raise TypeError(f"fusedmlp: got an unexpected keyword argument {name!r}{successor}")


class Input(NamedTuple):
    """The layer's input, against which other arguments are checked, and the name of its argument."""

    name: str
    tensor: Tensor
    dtypes: tuple[torch.dtype, ...]  # that weights and biases may have; the layer computes in the first

    def expected_dtypes(self) -> str:
        """`dtypes`, and the reason for them, for messages."""
        reason = "as the layer casts to the first" if len(self.dtypes) > 1 else f"that of {self.name}"
        advice = ' (recipe="bf16" or autocast casts float32)' if torch.float32 not in self.dtypes else ""
        return f"{names(self.dtypes)}, {reason}{advice}"

    def computed(self) -> Tensor:
        """The input in the dtype that the layer computes in, contiguous."""
        try:
            return self.tensor.to(self.dtypes[0]).contiguous()
        except RuntimeError:
            refuse_sparse(self.name, self.tensor)
            raise


def recipe(recipe: str | None, wgrad: str, also: Sequence[str] = ()) -> None:
    """Check `recipe` and `wgrad`; messages list `also`, other names that the caller has translated."""
    if recipe is not None and recipe not in DTYPES:
        one_of("recipe", recipe, [*DTYPES, *also])
    one_of("wgrad", wgrad, WGRADS)
    if wgrad == "bf16" and DTYPES.get(recipe or "") is not torch.bfloat16:
        raise ValueError(f'wgrad="bf16": expected a recipe that computes in bfloat16; got recipe={recipe!r}')


def saved(save: str, recipe: str | None, wgrad: str, *, delayed: bool) -> None:
    """Check `save`: what other options must be for "tokens"."""
    one_of("save", save, SAVES)
    if save == "tokens" and (recipe not in BLOCKS or wgrad != "recipe" or delayed):
        raise ValueError(
            'save="tokens": expected an 8-bit recipe, wgrad="recipe", and weight gradients that are not delayed; got '
            f"recipe={recipe!r}, wgrad={wgrad!r}{', delayed' if delayed else ''}"
        )


def rows(name: str, x: object, recipe: str | None) -> Input:
    """Check the layer's input: `[rows, in]`, of a supported dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor; got {kind(x)}")
    if x.dim() != 2:
        advice = f" (pass {name}.flatten(0, -2))" if x.dim() > 2 else ""
        raise ValueError(f"{name}: expected 2 dimensions [rows, features]; got shape {tuple(x.shape)}{advice}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: expected dtype {names(FLOAT_DTYPES)}; got {x.dtype}")
    try:
        dtypes = computed_dtypes(x, recipe)
    except RuntimeError:
        if x.is_meta:
            raise _on_meta(name) from None
        raise
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {names(dtypes)} for recipe={recipe!r}; got {x.dtype}")
    return Input(name, plain(name, x), dtypes)


def experts(name: str, weight: object, weight_layout: str, x: Input) -> ExpertWeight:
    """Check a weight: `[E, out, in]` or E times `[out, in]`, the last two swapped for `in_out`."""
    tensors, packed = _group(name, weight)
    alike = not torch.compiler.is_compiling() and are_alike(tensors)
    if not (alike and _is_kind(tensors[0], x, 3 if packed else 2)):
        _same_kind(name, tensors, x, 3 if packed else 2)
    for i, tensor in enumerate(() if alike else tensors):
        if not same_strides(tensor, tensors[0]):
            raise ValueError(
                f"{name}[{i}]: expected the strides of {name}[0], {tensors[0].stride()}; got {tensor.stride()}"
            )
    count = tensors[0].shape[0] if packed else len(tensors)
    if count == 0:
        raise ValueError(f"{name}: expected at least one expert; got shape {tuple(tensors[0].shape)}")
    if tensors[0].numel() == 0:  # kernels expect every product to have terms
        raise ValueError(f"{name}: expected at least one feature in and out; got shape {tuple(tensors[0].shape)}")
    out_features, in_features = tensors[0].shape[-2:]
    if weight_layout == "in_out":
        out_features, in_features = in_features, out_features
    return ExpertWeight(tensors, count, out_features, in_features)


def first_tensor(name: str, weight: object) -> Tensor:
    """The packed tensor, or that of the first expert."""
    return _group(name, weight)[0][0]


def biases(name: str, bias: object, weight: ExpertWeight, x: Input) -> list[Tensor]:
    """Check a bias: None, `[E, out]` or E times `[out]`."""
    if bias is None:
        return []
    tensors, packed = _group(name, bias)
    _same_kind(name, tensors, x, 2 if packed else 1)
    count = tensors[0].shape[0] if packed else len(tensors)
    if (count, tensors[0].shape[-1]) != (weight.num_experts, weight.out_features):
        raise ValueError(
            f"{name}: expected {weight.num_experts} experts of {weight.out_features} features; got {count} of "
            f"{tensors[0].shape[-1]}"
        )
    try:
        return [tensor.contiguous() for tensor in tensors]
    except RuntimeError:
        refuse_sparse(name, tensors)
        raise


def size(name: str, what: str, expected: int, got: int) -> None:
    """Check one size of an argument against another argument's."""
    if expected != got:
        raise ValueError(f"{name}: expected {what} = {expected}; got {got}")


def width(x: Input, name: str, in_features: int, weight_layout: str) -> None:
    """Check the width of the layer's input against a weight."""
    got = x.tensor.shape[1]
    if got != in_features:
        raise ValueError(
            f"{x.name}: expected rows of {in_features} features, the in_features of {name} with "
            f"weight_layout={weight_layout!r}; got {got}"
        )


def same_device(name: str, tensor: Tensor, x: Input) -> None:
    """Check that a tensor is on the device of x."""
    if tensor.device != x.tensor.device:
        raise ValueError(f"{name}: expected device {x.tensor.device}, that of {x.name}; got {tensor.device}")


def implementation(impl: str, device: torch.device) -> str:
    """Resolve `impl` to "triton" or "torch" for tensors on `device`."""
    one_of("impl", impl, IMPLS)
    if impl == "auto":
        impl = "torch" if device.type == "cpu" else "triton"
    if impl == "triton":
        if not _HAS_TRITON:
            raise RuntimeError(f'impl: expected triton to be installed; it is not: pass impl="torch" for {device}, too')
        if device.type in _WITHOUT_KERNELS and not (device.type == "cpu" and environment.triton_interpret()):
            if device.type == "meta":
                raise _on_meta("impl")
            raise RuntimeError(
                'impl="triton": expected tensors on a GPU; got tensors on the CPU: pass impl="auto" or "torch" (to '
                "have kernels interpreted, slowly, set TRITON_INTERPRET=1 before Python starts)"
            )
    return impl


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check an argument that is one of several names."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}; got {value!r}")


def _group(name: str, value: object) -> tuple[list[Tensor], bool]:
    """The tensors of a packed (True) or per-expert (False) argument."""
    if isinstance(value, Tensor):
        return [value], True
    if isinstance(value, Sequence | torch.nn.ParameterList):
        tensors = list(value)
        if tensors and all(map(isinstance, tensors, repeat(Tensor))):
            return tensors, False
    raise TypeError(f"{name}: expected a tensor or a sequence of one tensor per expert; got {kind(value)}")


def _same_kind(name: str, tensors: list[Tensor], x: Input, dim: int) -> None:
    """Check that all tensors are plain, of one shape with `dim` dimensions, of one dtype, and on the device of x."""
    shape = tensors[0].shape
    for i, tensor in enumerate(tensors):
        label = name if len(tensors) == 1 else f"{name}[{i}]"
        if tensor.dim() != dim:
            raise ValueError(f"{label}: expected {dim} dimensions; got shape {tuple(tensor.shape)}")
        if tensor.shape != shape:
            raise ValueError(f"{label}: expected shape {tuple(shape)}, that of {name}[0]; got {tuple(tensor.shape)}")
        plain(label, tensor)
        if tensor.dtype not in x.dtypes:
            raise TypeError(f"{label}: expected dtype {x.expected_dtypes()}; got {tensor.dtype}")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"{label}: expected dtype {tensors[0].dtype}, that of {name}[0]; got {tensor.dtype}")
        same_device(label, tensor, x)


def _is_kind(tensor: Tensor, x: Input, dim: int) -> bool:
    """Whether a single tensor passes `_same_kind`."""
    like = x.tensor
    return tensor.dim() == dim and is_plain(tensor) and tensor.dtype in x.dtypes and tensor.device == like.device


def refuse_sparse(name: str, value: Tensor | Sequence[Tensor]) -> None:
    """Raise if an argument that could not be used is sparse: called after an error, as a check would take time."""
    tensors, _ = _group(name, value)
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            label = name if len(tensors) == 1 else f"{name}[{i}]"
            raise TypeError(f"{label}: expected a dense tensor; got one in {tensor.layout}") from None


def _on_meta(name: str) -> ValueError:
    return ValueError(
        f"{name}: expected tensors on a GPU or the CPU; got them on meta, where they have no data (for shapes alone, "
        "PyTorch has FakeTensorMode)"
    )


def plain(name: str, tensor: Tensor) -> Tensor:
    """Check that operators run once, on this tensor's own memory; return it."""
    if not is_plain(tensor):
        raise TypeError(
            f"{name}: expected a plain tensor; got a {type(tensor).__name__} (of a DTensor, pass .to_local(): its "
            "gradient flows back through that, with accumulate_wgrad 'auto', 'grad' or 'off')"
        )
    return tensor


def module(name: str, value: object) -> None:
    """Check an argument that is a module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module; got {kind(value)}")


def kind(value: object) -> str:
    """The type and the value, for messages."""
    return f"{type(value).__name__} {value!r}"[:120]


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes, for messages."""
    return " or ".join(str(d) for d in dtypes)
