"""Mutual exclusion of writers to a `.grad`: a weight-gradient GEMM, and PyTorch's AccumulateGrad in another thread.

AccumulateGrad adds without the GIL and without `accumulation_lock`. So while a GEMM adds to a `.grad`, and another
thread could begin a backward, the AccumulateGrad nodes of the GEMM's parameters have a hook that waits for the lock. A
backward that is already running in another thread may have passed the hook: then PyTorch adds instead of a GEMM.

To clear `.grad`, add to it, and return it would need no lock, as AccumulateGrad takes such a tensor back. But tensor
hooks would change the whole sum, a tensor with other references would be copied (`tests/contract/test_stock_pytorch.py`
shows both), and AccumulateGrad of another thread raises if it is adding at that moment.

A GPU needs none of this inside a backward: one thread of the engine runs all nodes of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.parameter_state import accumulation_lock

Held = list[tuple[Any, Any]]  # nodes, kept as their hooks live in them, and handles of the hooks


def hold_others(params: Sequence[Tensor]) -> Held | None:
    """Until `release`, make other threads wait before they accumulate into `params`.

    Returns None if another thread may be accumulating already. The caller holds the lock until after `release`.
    """
    if not params or not engine.other_threads():  # only this thread could start one, and it is busy here
        return []
    if engine.others_run_backward():
        return None
    nodes = [engine.accumulating_node(param) for param in params if param.requires_grad]
    held = [(node, node.register_prehook(_wait)) for node in nodes]
    if engine.others_run_backward():  # it may have passed the node before the hook was there
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
