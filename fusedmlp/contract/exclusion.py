"""One adder at a time for each `.grad`: a weight-gradient GEMM, or PyTorch's AccumulateGrad in another thread.

AccumulateGrad adds without the GIL and without the lock of the layers. So while a GEMM adds to a `.grad`, and another
thread could begin a backward, the AccumulateGrad nodes of its parameters have a hook that waits for the lock. Hooks do
not stop a backward that is under way, which may be past them: then no GEMM adds, and PyTorch does.

A GPU needs none of this inside a backward: one thread of the engine runs all nodes of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.parameter_state import accumulation_lock

Held = list[tuple[Any, Any]]  # nodes, which keep their hooks alive, and the handles of those


def hold_others(params: Sequence[Tensor]) -> Held | None:
    """Make other threads wait before they accumulate into these, until `release`; None: one may be doing it already.

    The caller has the lock, and keeps it until after `release`.
    """
    if not params or not engine.other_threads():  # only a thread starts another, and this one is busy
        return []
    if engine.others_run_backward():
        return None
    nodes = [engine.accumulating_node(param) for param in params if param.requires_grad]
    held = [(node, node.register_prehook(_wait)) for node in nodes]
    if engine.others_run_backward():  # since, and maybe past the hook before it was there
        release(held)
        return None
    return held


def release(held: Held | None) -> None:
    """Undo `hold_others`."""
    for _, handle in held or ():
        handle.remove()


def _wait(grads: tuple[Tensor | None, ...]) -> None:
    with accumulation_lock:
        pass
