"""With `param.overwrite_main_grad`, the first gradient of each backward overwrites `main_grad`; the others add.

The attribute says that the owner gives the parameter a new `main_grad` for every backward. An owner that does so
several times in a backward clears `grad_added_to_main_grad` each time. A delayed gradient belongs to its backward, in
which the attribute is read; it overwrites, or adds, when the queue runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.checks import label
from fusedmlp.contract.engine import Backward
from fusedmlp.contract.parameter_state import ParameterState, Place, waiting


def asks(param: Tensor) -> bool:
    """Tell whether the owner wants the first gradient of a backward to overwrite."""
    return getattr(param, "overwrite_main_grad", False)


def any_asks(params: Sequence[Tensor]) -> bool:
    """`asks` of any of them, in less time."""
    return any(map(getattr, params, repeat("overwrite_main_grad"), repeat(False)))


def takes_overwrite(param: Tensor, state: ParameterState, backward: Backward) -> bool:
    """Decide whether a gradient of `backward`, whose owner asked for it, overwrites; note that the next one adds."""
    last, flag_cleared = state.overwritten_in, not getattr(param, "grad_added_to_main_grad", True)
    if flag_cleared:
        param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    state.overwritten_in = backward
    return flag_cleared or last is not backward


def refuse_superseded(state: ParameterState, backward: Backward, place: Place) -> None:
    """Raise if a later backward has overwritten `main_grad`."""
    last = state.overwritten_in
    if last is not None and last.number > backward.number:
        raise RuntimeError(
            f"{label(place)}: expected gradients of the backward that overwrote main_grad, or of later ones; got one "
            "of an earlier backward, which was never run: call queue.clear() to discard it"
        )


def refuse_to_be_erased(param: Tensor, backward: Backward, place: Place, last: Backward | None = None) -> None:
    """Raise if a queued gradient of an earlier backward is going to overwrite one of `backward`, or of `last`, a later
    one whose gradient the same GEMM computes.
    """
    for other in waiting():
        if (
            other.backward is not backward
            and id(param) in other.asked
            and other.backward.number < (last or backward).number
        ):
            raise RuntimeError(
                f"{label(place)}: a queued gradient is going to overwrite main_grad, and would erase this one, "
                "which came later; run its queue first"
            )


def refuse_compiled_writer(state: ParameterState, place: Place) -> None:
    """Raise if a compiled graph in another backward, which holds no lock, is adding to the parameter's `main_grad`."""
    other = state.compiled_in
    if other is not None and not other.over and not (engine.inside_backward() and other is engine.current_backward()):
        raise RuntimeError(
            f"{label(place)}: a compiled backward in another thread is adding to this main_grad, and one of the "
            "sums would be lost; expected one backward after the other, or the layer outside of torch.compile"
        )
