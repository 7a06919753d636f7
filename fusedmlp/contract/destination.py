"""Finds and checks the tensor to which a weight gradient is added: `param.main_grad`, or `param.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.parameter_state import find_state

Mode = Literal["auto", "main_grad", "grad", "off"]
MODES = ("auto", "main_grad", "grad", "off")
_SHAPE, _REQUIRES_GRAD = attrgetter("shape"), attrgetter("requires_grad")
Place = tuple[str, int | None]  # a parameter in messages: the weight's name, and the expert (None: packed, all)


def has_main_grad(param: Tensor) -> bool:
    """Whether a parameter has a `main_grad`, or one that Megatron-FSDP allocates on demand."""
    return getattr(param, "main_grad", None) is not None or hasattr(param, "__fsdp_param__")


def main_grad_of(param: Tensor) -> Tensor | None:
    """The `main_grad` of a parameter, or None; this call makes Megatron-FSDP allocate it."""
    if hasattr(param, "__fsdp_param__"):
        return param.get_main_grad()  # type: ignore[attr-defined, no-any-return]
    return getattr(param, "main_grad", None)


def resolve_auto(name: str, params: Sequence[Tensor], trained: Sequence[bool]) -> Mode:
    """Resolve "auto" for a weight: "main_grad" if its `trained` parameters have one, "grad" if none has.

    `params` is one packed parameter, or one per expert; `trained`: which of them get a gradient.
    """
    having = [has_main_grad(param) if wanted else None for param, wanted in zip(params, trained, strict=True)]
    if True in having and False in having:
        lacks, has = having.index(False), having.index(True)
        raise ValueError(
            f"{name}: expected main_grad on all experts or on none; experts {lacks} and {has} differ (after "
            "experts have been unfrozen, make the buffer of main_grad again)"
        )
    return "main_grad" if True in having else "grad"


def label(place: Place) -> str:
    """A parameter as error messages name it."""
    name, expert = place
    return name if expert is None else f"{name}[{expert}]"


def existing_grad(param: Tensor, place: Place, *, returnable: bool = False) -> Tensor | None:
    """The `.grad` to which a GEMM may add a parameter's gradient; None if there is none.

    Raises if a GEMM may not add to it (a tensor hook, a wrong kind of tensor). If the gradient is `returnable`, returns
    None instead, and PyTorch adds it. A `.grad` whose elements share memory always raises: PyTorch's addition would be
    wrong or fail.
    """
    return None if param.grad is None else checked_grad(param, param, param.grad, place, returnable=returnable)


def checked_grad(param: Tensor, weight: Tensor, grad: Tensor, place: Place, *, returnable: bool) -> Tensor | None:
    """Check `grad` as `existing_grad` does. If `param` is a DTensor, `weight` and `grad` are local tensors."""
    try:
        refuse_tensor_hooks(param, place)
        _check_kind(weight, grad, ".grad", place)
    except (RuntimeError, TypeError, ValueError):
        if not returnable:
            raise
        return None
    _check_memory(grad, ".grad", place)
    return grad


def of_one_kind(targets: list[Tensor | None]) -> list[Tensor | None]:
    """Keep the targets that one GEMM can add to together: distinct, with the dtype and strides of the first.

    None stands for those that are left out.
    """
    present = [target for target in targets if target is not None]
    kinds = {(target.dtype, target.stride()) for target in present}
    if len(kinds) <= 1 and len(set(map(id, present))) == len(present):
        return targets
    kept: list[Tensor | None] = []
    for target in targets:
        alike = target is not None and target.dtype == present[0].dtype and same_strides(target, present[0])
        kept.append(target if alike and not any(target is other for other in kept) else None)
    return kept


def existing_main_grad(param: Tensor, place: Place) -> Tensor:
    """The `main_grad` of a parameter; raises if there is none, or a GEMM may not write to it."""
    target = main_grad_of(param)
    if target is None:
        raise no_main_grad(label(place))
    _check(param, target, "main_grad", place)
    return target


def alike_main_grads(params: Sequence[Tensor]) -> list[Tensor] | None:
    """The `main_grad`s of a weight's experts, if they are alike and the first one passes all checks.

    None: check each with `existing_main_grad`, which is slower.
    """
    try:
        targets = [param.main_grad for param in params if not hasattr(param, "__fsdp_param__")]  # type: ignore[attr-defined]
    except AttributeError:
        return None
    if (
        len(targets) < len(params)
        or targets[0] is None
        or not are_alike(targets)
        or any(map(_REQUIRES_GRAD, targets[1:]))
        or len(set(map(_SHAPE, params))) > 1  # forward found them alike; one has been changed since
    ):
        return None
    try:
        _check(params[0], targets[0], "main_grad", ("", None))
    except (TypeError, ValueError):
        return None
    return targets


def refuse_common(group: Sequence[tuple[Place, Tensor, Tensor | None]]) -> None:
    """Raise if two parameters have one `main_grad` in common; `group` has places, parameters and `main_grad`s."""
    first: dict[int, tuple[Place, Tensor]] = {}
    for place, param, target in group:
        owner, other = first.setdefault(id(target), (place, param))
        if other is not param:  # unless experts share the parameter itself
            raise ValueError(f"{label(place)}: expected a main_grad of its own; got that of {label(owner)}")


def no_main_grad(what: str) -> RuntimeError:
    """The error for a parameter without `main_grad`."""
    return RuntimeError(
        f'{what}: accumulate_wgrad="main_grad" expects a main_grad attribute on the parameter; got none '
        "(attach one with fusedmlp.MainGradBuffer)"
    )


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

    Megatron sets `skip_backward_post_hook` on parameters with hooks that wait for it.
    """
    if param._post_accumulate_grad_hooks and not getattr(param, "skip_backward_post_hook", False):
        raise RuntimeError(
            f"{label(place)}: the parameter has a post-accumulate-grad hook, which backward runs before its delayed "
            "gradient is computed; expected none (an optimizer in backward?), or a layer without delay"
        )


def _check(param: Tensor, target: Tensor, what: str, place: Place) -> None:
    try:
        _check_kind(param, target, what, place)
        _check_memory(target, what, place)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        if not isinstance(target, Tensor):
            got = f"{type(target).__name__} {target!r}"[:120]
            raise TypeError(f"{label(place)}: expected {what} to be a tensor; got {got}") from None
        raise


def _check_kind(param: Tensor, target: Tensor, what: str, place: Place) -> None:
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


def _check_memory(target: Tensor, what: str, place: Place) -> None:
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
    """The dtype that `.grad` of a parameter must have."""
    if torch.compiler.is_compiling():  # Dynamo cannot read grad_dtype; the engine casts
        return param.dtype
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None) if param.is_leaf else None
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
            and len(set(map(Tensor.stride, tensors))) == 1
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
