"""The table in fusedmlp/contract/__init__.py as rows, with what every tensor holds, for eager and compiled layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Case:
    """A layer in the state of a row, and what its tensors hold then."""

    def __init__(self, row: Row, layer: Any, assert_close: Any) -> None:
        self.row, self.layer, self.assert_close = row, layer, assert_close
        self.queue = fusedmlp.WgradQueue() if row.delayed else None
        self.options = {"accumulate_wgrad": row.mode, "wgrad_queue": self.queue}
        if row.main_grad:
            layer.attach(row.attribute)
        for param in layer.params:
            if row.overwrite:
                param.overwrite_main_grad = True
                if row.fused:
                    param.main_grad.fill_(float("nan"))
            if row.existing:
                param.grad = torch.full_like(param, 2.0)
        self.before = [param.main_grad.clone() for param in layer.params] if row.main_grad else []

    def run_queue(self) -> None:
        if self.queue is not None:
            self.queue.run()

    def check(self, arrived: Sequence[Tensor | None], *, added: bool = True) -> None:
        """Compare `.grad`, the flag and main_grad of each weight with the table.

        `arrived`: the gradients of backwards so far, None where there was none; not `added`: they are in the queue.
        """
        row = self.row
        for i, (param, wgrad) in enumerate(zip(self.layer.params, arrived, strict=True)):
            fused = row.fused and wgrad is not None
            assert hasattr(param, "main_grad") == row.main_grad
            if fused and added:
                self.assert_close([param.main_grad], [wgrad if row.overwrite else self.before[i] + wgrad])
            elif row.main_grad:
                assert torch.equal(param.main_grad.nan_to_num(7), self.before[i].nan_to_num(7))
            flag = True if fused and row.attribute is not ABSENT else row.attribute
            assert getattr(param, "grad_added_to_main_grad", ABSENT) is flag
            if fused and row.attribute is not ABSENT:
                assert torch.equal(param.grad, torch.zeros_like(param))
                assert not any(param.grad.stride()), "a dummy that costs memory"
            elif wgrad is not None and added and not row.fused:
                self.assert_close([param.grad], [wgrad + 2 * row.existing])
            elif row.existing:
                assert torch.equal(param.grad, torch.full_like(param, 2.0))
            else:
                assert param.grad is None


def check(row: Row, layer: Any, assert_close: Any) -> None:
    """Run a backward, and the queue; compare with the table before and after each."""
    case, none, wgrads = Case(row, layer, assert_close), [None] * len(layer.params), layer.wgrads()
    pointers = [grad.data_ptr() for grad in layer.grads() if grad is not None]
    x, dy = layer.batch(1)
    y = layer(x, **case.options)
    case.check(none)
    y.backward(dy)
    case.check(wgrads, added=not row.delayed)
    if case.queue is not None:
        assert len(case.queue) == len(layer.groups)
        case.run_queue()
        case.check(wgrads)
        assert not row.existing or [grad.data_ptr() for grad in layer.grads()] == pointers
