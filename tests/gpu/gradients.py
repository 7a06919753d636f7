"""Two micro-batches into every destination of their gradients: the sum has the same bits as that of two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedmlp
from fusedmlp.environment import triton_interpret
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

COUNTS = (70, 0, 130, 1)


class Micro:
    """Weights `[E, 2F, H]` and `[E, H, F]`, packed or one for each expert, and two micro-batches of rows."""

    def __init__(self, device: str, impl: str, apart: bool, small: bool) -> None:
        self.impl, (H, F) = impl, (32, 16) if small else (256, 128)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        E = len(COUNTS)
        weights = [normal(E, 2 * F, H) * H**-0.5, normal(E, H, F) * F**-0.5]
        self.groups = [[Parameter(w.clone()) for w in t] if apart else [Parameter(t)] for t in weights]
        self.params = [param for group in self.groups for param in group]
        self.optimizer = torch.optim.SGD(self.params, lr=0.0)
        self.batches = [(normal(sum(COUNTS), H), normal(sum(COUNTS), H)) for _ in range(2)]
        self.counts = torch.tensor(COUNTS, device=device)

    def loss(self, micro: int, **options: object) -> Tensor:
        """Forward of one micro-batch."""
        x, dy = self.batches[micro]
        weights = [group if len(group) > 1 else group[0] for group in self.groups]
        y: Tensor = fusedmlp.grouped_mlp(x.requires_grad_(), *weights, self.counts, impl=self.impl, **options)
        return (y * dy).sum()

    def both(self, **options: object) -> None:
        """One backward after the other."""
        for micro in range(2):
            self.loss(micro, **options).backward()

    def on_two_streams(self) -> None:
        """Both micro-batches in one backward, each on a stream of its own."""
        if not self.counts.is_cuda:
            return self.both()
        streams, losses = [torch.cuda.Stream() for _ in range(2)], []
        for micro, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                losses.append(self.loss(micro))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return (losses[0] + losses[1]).backward()

    def in_two_threads(self) -> None:
        """A thread for each micro-batch; Triton's interpreter has room for one."""
        if triton_interpret():
            return self.both()
        threads = [threading.Thread(target=lambda i=i: self.loss(i).backward()) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None

    def delayed(self, fuse: bool) -> None:
        """Both wait in a queue."""
        queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
        self.both(wgrad_queue=queue)
        queue.run()

    def attach(self) -> None:
        """A `main_grad` of zeros for each weight, with the flag."""
        for param in self.params:
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
            param.grad_added_to_main_grad = False

    def main_grads(self) -> list[Tensor]:
        """Gradients in `main_grad`."""
        return [param.main_grad for param in self.params]

    def expected(self) -> list[Tensor]:
        """The sum of the gradients of two steps."""
        sums: list[Tensor] = []
        for micro in range(2):
            self.attach()
            self.loss(micro).backward()
            sums = [a + b for a, b in zip(sums, self.main_grads(), strict=True)] if sums else self.main_grads()
        for param in self.params:
            del param.main_grad, param.grad_added_to_main_grad
            param.grad = None
        return sums


def _in_main_grad(run: Callable[[Micro], None]) -> Callable[[Micro], Sequence[Tensor | None]]:
    def check(micro: Micro) -> Sequence[Tensor | None]:
        micro.attach()
        run(micro)
        return micro.main_grads()

    return check


def _in_a_buffer(micro: Micro) -> Sequence[Tensor | None]:
    _kept = fusedmlp.MainGradBuffer(micro.params)
    for _ in range(2):  # the second step overwrites the first one's gradients
        micro.optimizer.zero_grad()
        micro.both()
        micro.optimizer.step()
    return [param.grad for param in micro.params]


def _in_grad(run: Callable[[Micro], None]) -> Callable[[Micro], Sequence[Tensor | None]]:
    def check(micro: Micro) -> Sequence[Tensor | None]:
        FP32Accumulation(torch.nn.ParameterList(micro.params), micro.optimizer)
        run(micro)
        return [param.grad for param in micro.params]

    return check


DESTINATIONS: dict[str, Callable[[Micro], Sequence[Tensor | None]]] = {
    "main_grad": _in_main_grad(Micro.both),
    "main_grad, two streams": _in_main_grad(Micro.on_two_streams),
    "main_grad, two threads": _in_main_grad(Micro.in_two_threads),
    "main_grad, queue": _in_main_grad(lambda micro: micro.delayed(False)),
    "a buffer": _in_a_buffer,
    ".grad": _in_grad(Micro.both),
    ".grad, two streams": _in_grad(Micro.on_two_streams),
    ".grad, two threads": _in_grad(Micro.in_two_threads),
    ".grad, queue": _in_grad(lambda micro: micro.delayed(False)),
}
