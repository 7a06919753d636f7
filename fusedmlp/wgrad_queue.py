"""Weight gradients put off until later, so that their GEMMs can overlap communication."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp import ops
from fusedmlp.main_grad import Route


class Operands(NamedTuple):
    """`dw = dy^T x`: `dy [R, out]`, `x [R, in]`, `offsets [E + 1]`; row `r` is `dy[dy_rows[r]]` and `x[x_rows[r]]`."""

    dy: Tensor
    x: Tensor
    offsets: Tensor
    dy_rows: Tensor | None
    x_rows: Tensor | None

    def versions(self) -> list[int]:
        """Grow with every modification in place."""
        return [tensor._version for tensor in self if tensor is not None]


class _Delayed(NamedTuple):
    route: Route
    transposed: bool  # the weight is stored [in, out]
    operands: Operands
    versions: list[int]
    captured: bool
    impl: str

    def shares_launch(self, other: _Delayed) -> bool:
        """Whether both gradients go to the same place in the same way."""
        return (
            [id(param) for param in self.route.params] == [id(param) for param in other.route.params]
            and self.route.uses == other.route.uses
            and self.route.mode == other.route.mode
            and self.transposed == other.transposed
            and self.impl == other.impl
            and (self.operands.dy_rows is None) == (other.operands.dy_rows is None)
            and (self.operands.x_rows is None) == (other.operands.x_rows is None)
        )


class WgradQueue:
    """First in, first out queue of delayed weight gradients.

    A layer called with `wgrad_queue=queue` computes everything but its weight gradients in backward and puts
    those here; `run()` computes them into `main_grad`, or into `.grad`, which it sets where it is None. The queue
    keeps the layer's input, pre-activation gradient and output gradient alive until then.

    Args:
        fuse_microbatches: compute all queued gradients of one weight in one launch, which reads and writes
            `main_grad` once instead of once per micro-batch. Equal to `False` within the rounding of `main_grad`, or
            of `.grad`. With `impl="torch"` it runs and rounds as `False`.
    """

    def __init__(self, *, fuse_microbatches: bool = False) -> None:
        self.fuse_microbatches = fuse_microbatches
        self._pending: deque[_Delayed] = deque()

    def __len__(self) -> int:
        """Number of weight gradients waiting."""
        return len(self._pending)

    def put(self, route: Route, operands: Operands, *, transposed: bool, impl: str) -> None:
        """Queue `dw (+)= dy^T x`, for the layer's own use."""
        captured = _capturing(operands.dy)
        self._pending.append(_Delayed(route, transposed, operands, operands.versions(), captured, impl))

    @torch.no_grad()
    def run(self) -> None:
        """Compute everything queued; a no-op when empty.

        A gradient leaves the queue once it has been added. If one raises before its GEMM started (a `main_grad`
        that was swapped for a wrong one, say), it and those behind it are still queued.

        Raises:
            RuntimeError: a tensor that a queued gradient needs was modified in place after backward; or only one of
                backward and run is captured by a CUDA graph.
        """
        while self._pending:
            self._run_next()

    @torch.no_grad()
    def run_oldest(self) -> None:
        """Compute what the oldest backward of one layer queued: one gradient of each of its weights."""
        done: list[set[int]] = []
        while self._pending:
            weight = {id(param) for param in self._pending[0].route.params}
            if weight in done:
                return
            done.append(weight)
            self._run_next()

    def _run_next(self) -> None:
        batch = list(self._next_batch())
        _run(batch)
        done = {id(delayed) for delayed in batch}
        self._pending = deque(d for d in self._pending if id(d) not in done)

    def _next_batch(self) -> Iterator[_Delayed]:
        """The first gradient and, if fusing, those of the same weight up to one that overwrites."""
        first = self._pending[0]
        yield first
        if not self.fuse_microbatches:
            return
        weight = {id(param) for param in first.route.params}
        for delayed in list(self._pending)[1:]:
            if any(
                overwrite and id(param) in weight
                for param, overwrite in zip(delayed.route.params, delayed.route.overwrites, strict=True)
            ):
                return
            if delayed.shares_launch(first):
                yield delayed


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _run(batch: list[_Delayed]) -> None:
    for delayed in batch:
        if delayed.operands.versions() != delayed.versions:
            raise RuntimeError(
                f"{delayed.route.name}: a tensor that its delayed gradient needs was modified in place between "
                "backward and the run of the queue"
            )
        if delayed.captured != _capturing(delayed.operands.dy):
            raise RuntimeError(
                f"{delayed.route.name}: expected backward and the run of the queue both captured by CUDA graphs, or "
                f"neither; got {'backward' if delayed.captured else 'the run'} captured alone, which replays would not "
                "repeat together"
            )
    first = batch[0]
    first.route.open()
    outs = [t.transpose(-1, -2) for t in first.route.outs] if first.transposed else first.route.outs
    operands = [delayed.operands for delayed in batch]
    ops.grouped_wgrad_(
        outs,
        [],
        [o.dy for o in operands],
        [o.x for o in operands],
        [o.offsets for o in operands],
        [o.dy_rows for o in operands if o.dy_rows is not None],
        [o.x_rows for o in operands if o.x_rows is not None],
        first.route.accumulate,
        first.impl,
    )
    first.route.finish_delayed()
