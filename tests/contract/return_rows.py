"""The table in fusedmlp/contract/__init__.py as rows, with what every tensor holds, for eager and compiled layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import fusedmlp

ABSENT = None


class Row(NamedTuple):
    """The state before a backward."""

    mode: str
    main_grad: bool = False
    attribute: bool | None = ABSENT  # value of grad_added_to_main_grad
    delayed: bool = False
    overwrite: bool = False  # overwrite_main_grad
    existing: bool = False  # .grad holds twos

    def __str__(self) -> str:
        names = [name for name in ("main_grad", "delayed", "overwrite", "existing") if getattr(self, name)]
        return " + ".join([self.mode, *names, *[f"attribute {self.attribute}"] * (self.attribute is not ABSENT)])

    @property
    def fused(self) -> bool:
        return self.main_grad and self.mode in ("auto", "main_grad")


_FLAGS = (False, True)
ROWS = [
    *(Row(m, existing=e, delayed=d) for m in ("auto", "grad", "off") for e in _FLAGS for d in _FLAGS),
    *(
        Row(mode, True, attribute, delayed, overwrite)
        for mode in ("auto", "main_grad", "grad", "off")
        for attribute in (ABSENT, False, True)
        for delayed in _FLAGS
        for overwrite in _FLAGS
    ),
]


def check(row: Row, layer: Any, assert_close: Any) -> None:
    """Run a backward, and the queue; compare `.grad`, the flag and main_grad before and after each with the table."""
    wgrads, queue = layer.wgrads(), fusedmlp.WgradQueue() if row.delayed else None
    before = layer.attach(row.attribute) if row.main_grad else []
    for i, param in enumerate(layer.params):
        if row.overwrite:
            param.overwrite_main_grad = True
            if row.fused:
                before[i] = param.main_grad.fill_(float("nan")).clone()
        if row.existing:
            param.grad = torch.full_like(param, 2.0)
    pointers = [param.grad.data_ptr() for param in layer.params] if row.existing else []

    def holds(*, backward: bool, run: bool) -> None:
        added = backward and (run or not row.delayed)
        for i, param in enumerate(layer.params):
            assert hasattr(param, "main_grad") == row.main_grad
            if row.fused and added:
                assert_close([param.main_grad], [wgrads[i] if row.overwrite else before[i] + wgrads[i]])
            elif row.main_grad:
                assert torch.equal(param.main_grad.nan_to_num(7), before[i].nan_to_num(7))
            flag = True if row.fused and backward and row.attribute is not ABSENT else row.attribute
            assert getattr(param, "grad_added_to_main_grad", ABSENT) is flag
            if row.fused and backward and row.attribute is not ABSENT:
                assert torch.equal(param.grad, torch.zeros_like(param))
                assert not any(param.grad.stride()), "a dummy that costs memory"
            elif added and not row.fused:
                assert_close([param.grad], [wgrads[i] + 2 * row.existing])
            elif row.existing:
                assert torch.equal(param.grad, torch.full_like(param, 2.0))
            else:
                assert param.grad is None

    x, dy = layer.batch(1)
    y = layer(x, accumulate_wgrad=row.mode, wgrad_queue=queue)
    holds(backward=False, run=False)
    y.backward(dy)
    holds(backward=True, run=False)
    if queue is not None:
        assert len(queue) == len(layer.groups)
        queue.run()
        holds(backward=True, run=True)
        assert not row.existing or [grad.data_ptr() for grad in layer.grads()] == pointers
