"""Checks of flags, of tensors to which weight gradients are added, and of hooks of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.parameter_state import Place, find_state

_SHAPE = attrgetter("shape")


def label(place: Place) -> str:
    """A parameter as error messages name it."""
    name, expert = place
    return name if expert is None else f"{name}[{expert}]"


def check_flag(name: str, value: object) -> None:
    """Check a boolean: any other value would count as True or False by chance ("no" is True)."""
    if isinstance(value, Tensor) or getattr(value, "ndim", False) or value not in (0, 1):
        raise TypeError(f"{name}: expected True or False; got {type(value).__name__} {value!r}"[:200])


def refuse_tensor_hooks(param: Tensor, place: Place) -> None:
    """Raise if a parameter has a tensor hook other than that of `plain_gradient.py`."""
    for key in param._backward_hooks or ():
        state = find_state(param)
        if state is None or state.catch is None or key != state.catch.id:
            raise RuntimeError(
                f"{label(place)}: the parameter has a tensor hook (register_hook), which would see None instead of the "
                "gradient; use register_post_accumulate_grad_hook, or accumulate_wgrad='off'"
            )


def refuse_late_hooks(param: Tensor, place: Place) -> None:
    """Raise for a post-accumulate-grad hook, which backward runs before a delayed gradient is computed.

    Owners set `skip_backward_post_hook` on parameters with hooks that wait for it.
    """
    state = find_state(param)
    ours = state is not None and state.memory is not None  # memory.py has registered one
    if len(param._post_accumulate_grad_hooks or ()) > ours and not getattr(param, "skip_backward_post_hook", False):
        raise RuntimeError(
            f"{label(place)}: the parameter has a post-accumulate-grad hook, which backward runs before its delayed "
            "gradient is computed; expected none (an optimizer in backward?), or a layer without delay"
        )


def check(param: Tensor, target: Tensor, what: str, place: Place) -> None:
    """Raise unless a GEMM may write the gradient of a parameter to `target`, which messages call `what`: in float32 or
    the dtype of the parameter.
    """
    try:
        check_kind(param, target, what, place)
        check_memory(target, what, place)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        if not isinstance(target, Tensor):
            got = f"{type(target).__name__} {target!r}"[:120]
            raise TypeError(f"{label(place)}: expected {what} to be a tensor; got {got}") from None
        raise


def check_kind(param: Tensor, target: Tensor, what: str, place: Place) -> None:
    """Raise unless `target` has a shape, a device, a layout, a dtype and memory for the gradient of a parameter."""
    where = label(place)
    if target.shape != param.shape:
        raise ValueError(f"{where}: expected {what} of shape {tuple(param.shape)}; got {tuple(target.shape)}")
    if target.device != param.device:
        raise ValueError(f"{where}: expected {what} on {param.device}; got {target.device}")
    if target.layout != torch.strided:
        raise ValueError(f"{where}: expected {what} to be dense; got one in {target.layout}")
    if target.dtype not in (torch.float32, param.dtype):
        allowed = " or ".join(map(str, dict.fromkeys((torch.float32, param.dtype))))
        raise ValueError(f"{where}: expected {what} in {allowed}; got {target.dtype}")
    if not engine.is_plain(target):
        raise TypeError(f"{where}: expected {what} to be a plain tensor; got a {type(target).__name__}")
    if target.requires_grad:
        raise ValueError(f"{where}: expected {what} with requires_grad=False; got True")
    if target.untyped_storage()._cdata == param.untyped_storage()._cdata and _offset(target) == _offset(param):
        raise ValueError(f"{where}: expected {what} in memory of its own; got the parameter's own memory")


def _offset(tensor: Tensor) -> int:
    """Bytes from the start of the storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def check_memory(target: Tensor, what: str, place: Place) -> None:
    """Raise unless each element has memory of its own."""
    if target.is_contiguous():
        return
    where = label(place)
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise ValueError(
            f"{where}: expected a writable {what}; got an expanded one with strides {target.stride()} (the dummy of "
            "an earlier main_grad step? clear it with zero_grad(set_to_none=True))"
        )
    if _may_overlap(target):
        raise ValueError(
            f"{where}: expected {what} whose elements each have memory of their own; got shape {tuple(target.shape)} "
            f"with strides {target.stride()}, in which several share it"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether elements may share memory: a stride lies within the extent of the dimensions with smaller strides."""
    reach = 0  # offset of the last element of the dimensions so far
    for stride, size in sorted(zip(map(abs, tensor.stride()), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a new `.grad` of a parameter."""
    if torch.compiler.is_compiling():  # Dynamo cannot read grad_dtype; the engine casts
        return param.dtype
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None) if param.is_leaf else None
    if chosen is None and (state := find_state(param)) is not None:
        chosen = state.accumulates_in if state.memory is None else state.memory.dtype
    return chosen or param.dtype


def fresh_like(param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised gradient that PyTorch can steal: its own storage, the parameter's strides."""
    return torch.empty_like(param, dtype=dtype or grad_dtype(param), requires_grad=False)


def check_group(name: str, targets: Sequence[Tensor]) -> None:
    """Raise unless the gradients of a weight's experts have one dtype, shape and strides, as one GEMM writes them."""
    dtypes = {target.dtype for target in targets}
    if len(dtypes) > 1:
        raise ValueError(f"{name}: expected all experts to accumulate in one dtype; got {dtypes}")
    if len(set(map(Tensor.stride, targets))) == 1 and len(set(map(_SHAPE, targets))) == 1:
        return
    for i, target in enumerate(targets):
        if target.shape != targets[0].shape:
            raise ValueError(
                f"{name}[{i}]: expected a gradient of the shape of expert 0's, {tuple(targets[0].shape)}; got "
                f"{tuple(target.shape)}"
            )
        if not same_strides(target, targets[0]):
            raise ValueError(
                f"{name}[{i}]: expected a gradient with the strides of expert 0's, {targets[0].stride()}; got "
                f"{target.stride()}"
            )


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have the type, the shape, the dtype, the device and the strides of the first."""
    if len(tensors) == 1:
        return True
    try:
        return (
            len(set(map(type, tensors))) == 1
            and len(set(map(_SHAPE, tensors))) == 1
            and (all(map(Tensor.is_contiguous, tensors)) or len(set(map(Tensor.stride, tensors))) == 1)
            and engine.have_one_dtype_and_device(tensors)
        )
    except (AttributeError, RuntimeError, TypeError):  # sparse and opaque tensors have no strides; no tensors at all
        return False


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides; those of dimensions of size 1 do not matter."""
    return (
        a.stride() == b.stride()
        or a.numel() == 0
        or all(size == 1 or i == j for size, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))
    )
