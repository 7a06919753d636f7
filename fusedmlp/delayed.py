"""Every queue of delayed weight gradients in a model: run them, or give a step up."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fusedmlp import validate
from fusedmlp.contract.queue import WgradQueue


def backward_dw(model: nn.Module) -> None:
    """Compute the weight gradients that layers of a model have delayed (`delay_wgrad=True`, Megatron's
    `delay_wgrad_compute`), with the hooks that wait for them. A queue that several layers share runs once.

    Raises:
        TypeError: the model is no module.
    """
    for module, queue in _queues(model):
        waiting = len(queue)
        while waiting:
            module.backward_dw() if hasattr(module, "backward_dw") else queue.run()  # type: ignore[operator]
            if len(queue) == waiting:  # the module's own runs another queue
                queue.run()
            waiting = len(queue)


def discard(model: nn.Module) -> None:
    """Drop the weight gradients that layers of a model have delayed, to give up a step: see `WgradQueue.clear`.

    Raises:
        TypeError: the model is no module.
    """
    for _, queue in _queues(model):
        queue.clear()


def _queues(model: nn.Module) -> Iterator[tuple[nn.Module, WgradQueue]]:
    """Each queue that is an attribute of a module in the model, once, and that module."""
    validate.module("model", model)
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, WgradQueue) and id(value) not in seen:
                seen.add(id(value))
                yield module, value
