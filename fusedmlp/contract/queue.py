"""Queue of weight gradients that are computed later, so that their GEMMs can overlap communication."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmlp import debug
from fusedmlp.contract.checks import check_flag
from fusedmlp.contract.destinations.destination import Route
from fusedmlp.contract.engine import current_backward
from fusedmlp.contract.parameter_state import accumulation_lock, queues
from fusedmlp.contract.steps import watch_steps
from fusedmlp.operators import ops
from fusedmlp.versions import outside_of_wrong_graphs


class Operands(NamedTuple):
    """`dw = dy^T x`: `dy [R, out]`, `x [R, in]`, `offsets [E + 1]`; gathered rows: `dy[dy_row_ids]`, `x[x_row_ids]`."""

    dy: Tensor
    x: Tensor
    offsets: Tensor
    dy_row_ids: Tensor | None
    x_row_ids: Tensor | None

    def state(self) -> tuple[bool, list[int]]:
        """Whether a CUDA graph is being captured, and the tensors' versions, which count modifications in place.

        Tensors of `torch.inference_mode()` count none: -1.
        """
        return _capturing(self.dy), [-1 if t.is_inference() else t._version for t in self if t is not None]


class _Delayed(NamedTuple):
    """A weight gradient in the queue."""

    route: Route
    operands: Operands
    state: tuple[bool, list[int]]  # of the operands, in backward
    transposed: bool  # the weight is stored [in, out]
    recipe: str
    impl: str

    def launch_key(self) -> tuple[Any, ...]:
        """Key of a launch: gradients with equal keys can be computed by one."""
        route, dtypes = self.route, [None if t is None else t.dtype for t in self.operands]
        return [*map(id, route.params)], route.uses, route.destination, self.transposed, self.recipe, self.impl, dtypes

    def check(self) -> None:
        """Raise if the GEMM would not compute what backward asked for."""
        weight, (dy, x, *_) = self.route.params[0], self.operands
        size = (x.shape[1], dy.shape[1]) if self.transposed else (dy.shape[1], x.shape[1])
        if (weight.shape[-2:], weight.device) != (size, dy.device):
            raise RuntimeError(
                f"{self.route.name}: expected the weight of {[*size]} on {dy.device} that backward saw; got "
                f"{[*weight.shape[-2:]]} on {weight.device} (run the queue before a weight is changed or moved)"
            )
        (captured, versions), (capturing, now) = self.state, self.operands.state()
        if versions != now:
            raise RuntimeError(
                f"{self.route.name}: expected the tensors that its delayed gradient needs as backward left them (the "
                "layer's input among them); got one that was modified in place before the queue ran"
            )
        if captured != capturing:
            raise RuntimeError(
                f"{self.route.name}: expected backward and the run of the queue both captured by CUDA graphs, or "
                f"neither; got {'backward' if captured else 'the run'} captured alone, which replays would not repeat "
                "together"
            )


class WgradQueue:
    """First in, first out queue of delayed weight gradients.

    A layer called with `wgrad_queue=queue` computes everything but its weight gradients in backward and puts
    those here; `run()` computes them into `main_grad`, or into `.grad`, which it sets where it is None. The queue
    keeps the layer's input, pre-activation gradient and output gradient alive until then.

    Args:
        fuse_microbatches: compute all queued gradients of one weight in one launch, which reads and writes
            `main_grad` once instead of once per micro-batch. Results equal those of `False` within the rounding of
            `main_grad`, or of `.grad`. With `impl="torch"`, True runs and rounds as False does.
    """

    def __init__(self, *, fuse_microbatches: bool = False) -> None:
        check_flag("fuse_microbatches", fuse_microbatches)
        watch_steps()
        self.fuse_microbatches = fuse_microbatches
        self._pending: deque[_Delayed] = deque()
        self._begun: str | None = None  # name of a weight, from the start of its GEMM until it leaves the queue

    def __len__(self) -> int:
        """Number of weight gradients waiting."""
        return len(self._pending)

    def __del__(self) -> None:
        pending = getattr(self, "_pending", None)  # interrupted in __init__
        if pending:
            count, names = len(pending), ", ".join(sorted({delayed.route.name for delayed in pending}))
            self.clear()
            warnings.warn(
                f"WgradQueue: expected run() or clear() before the queue is dropped; got weight gradients that wait in "
                f"it, {count} of them, which are lost ({names})",
                RuntimeWarning,
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._pending:
            raise RuntimeError(
                f"WgradQueue: expected an empty queue to be copied or pickled; got one with {len(self)} gradients "
                "waiting, which belong to the original's parameters: run() it first"
            )
        return self.__dict__

    def put(self, route: Route, operands: Operands, *, transposed: bool, recipe: str, impl: str) -> None:
        """Queue `dw (+)= dy^T x`, for the layer's own use."""
        route.backward = current_backward()
        queues.setdefault(id(self), weakref.ref(self, partial(queues.pop, id(self))))
        self._pending.append(_Delayed(route, operands, operands.state(), transposed, recipe, impl))

    def routes(self) -> list[Route]:
        """List the gradients that wait, for checks in any thread."""
        return [delayed.route for delayed in [*self._pending]]

    def clear(self) -> None:
        """Discard everything queued, to give up a step after an error (see `run()`).

        The gradients are lost. Start the next step from a zeroed `main_grad`.
        """
        self._pending.clear()
        self._begun = None

    @torch.inference_mode(False)  # gradients and versions of tensors that backward made, wherever this is called
    @torch.no_grad()
    def run(self) -> None:
        """Compute everything queued; a no-op when empty.

        A gradient leaves the queue once it has been added. If one raises before its GEMM has begun (a `main_grad`
        that was swapped for a wrong one, say), it and those behind it are still queued, and can be run again. If its
        GEMM has begun, part of it may have been added: the queue then runs no more until `clear()` empties it.

        Raises:
            RuntimeError: after backward a tensor that a queued gradient needs was modified in place, or a weight got
                another shape or device; only one of backward and run is captured by a CUDA graph; or an earlier run
                failed after a GEMM had begun.
        """
        while self._pending:
            self._run_next()

    @torch.inference_mode(False)
    @torch.no_grad()
    def run_oldest(self) -> None:
        """Compute the weight gradients that the oldest backward queued: those of one micro-batch, of every layer in it
        and every use of a layer.
        """
        oldest = self._pending[0].route.backward if self._pending else None
        while self._pending and self._pending[0].route.backward is oldest:
            self._run_next()

    @outside_of_wrong_graphs
    def _run_next(self) -> None:
        if self._begun is not None:
            raise RuntimeError(
                f"{self._begun}: an earlier run failed after the GEMM of this weight gradient had begun, and main_grad "
                "(or .grad) may hold part of that gradient; discard the step: zero main_grad and .grad, and call "
                "queue.clear()"
            )
        batch = list(self._next_batch())
        for delayed in batch:
            delayed.check()
        with accumulation_lock:
            try:
                left = self._add(batch)
            except BaseException:
                if self._begun is None:
                    batch[0].route.destination.undo(batch[0].route)
                raise
            finally:
                batch[0].route.release()
        for param, grad in left:  # without the lock: AccumulateGrad in another thread may wait for it
            torch.autograd.backward([param], [grad])
        for delayed in batch:  # one by one: another thread may be adding to the queue
            self._pending.remove(delayed)
        self._begun = None

    def _add(self, batch: list[_Delayed]) -> list[tuple[Tensor, Tensor]]:
        first = batch[0]
        first.route.last = batch[-1].route.backward
        first.route.open()
        outs = [t.transpose(-1, -2) for t in first.route.outs] if first.transposed else first.route.outs
        fields = zip(*(delayed.operands for delayed in batch), strict=True)
        operands = [[t for t in tensors if t is not None] for tensors in fields]
        report = _watch(batch) if debug.enabled else None
        self._begun = first.route.name
        ops.grouped_wgrad_(outs, [], *operands, first.route.accumulate, first.recipe, first.impl)
        if report is not None:
            report(f"delayed wgrad of {first.route.name}", outs)
        return first.route.finish_delayed()

    def _next_batch(self) -> Iterator[_Delayed]:
        """The first gradient and, if fusing, those of the same weight up to a backward that overwrites."""
        first = self._pending[0]
        params = {*map(id, first.route.params)}
        yield first
        for delayed in list(self._pending)[1:] if self.fuse_microbatches else ():
            if delayed.route.backward is not first.route.backward and delayed.route.asked & params:
                return
            if delayed.launch_key() == first.launch_key():
                yield delayed


def _watch(batch: list[_Delayed]) -> Callable[[str, Any], None]:
    """Call `debug.watch` for what the GEMM of a batch reads."""
    route, read = batch[0].route, [delayed.operands for delayed in batch]
    earlier = route.outs if route.accumulate else None
    return debug.watch(
        read[0].dy,
        {
            "dy": [debug.Rows(each.dy, each.offsets, route.params, each.dy_row_ids) for each in read],
            "x": [debug.Rows(each.x, each.offsets, route.params, each.x_row_ids) for each in read],
            f"the earlier gradient of {route.name}": earlier,
        },
    )


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
