"""Training runs that differ in one thing each, from the same seed, on the same bytes in the same order.

`plain`: PyTorch accumulates the gradients of the micro-batches in `.grad`. `fused`: the backward of the experts
accumulates them in `main_grad`. Both compute the same sums, but a GEMM that adds into its output may round at other
places than a GEMM followed by an add. Mostly that stays invisible, until it sends a token to another expert; training
amplifies that. `control` measures how far: it is `plain`, except that in every layer and micro-batch the token with the
closest choice of experts goes to its runner-up expert. Every other run is `fused` with the recipe of its name for the
experts, whose weights stay float32.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pydoc_data.topics import topics
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from fusedmlp.contract.buffer import MainGradBuffer
from fusedmlp.demo.model import LanguageModel, ModelConfig
from fusedmlp.progress import lines
from fusedmlp.recipe import DTYPES

Column = Literal["plain", "fused", "control", "bf16", "fp8_block", "mxfp8"]
MICRO_BATCHES = 2
_BALANCE_WEIGHT = 0.01
_WARMUP = 20  # steps; then the learning rate falls linearly


@dataclass(frozen=True)
class Settings:
    """Settings that all runs share."""

    steps: int = 200
    micro_batch: int = 8
    learning_rate: float = 4e-3
    seed: int = 0
    device: str = "cpu"
    model: ModelConfig = field(default_factory=ModelConfig)


@cache
def text() -> tuple[Tensor, Tensor]:
    """CPython's language reference as byte values (int64, on the CPU): the first 90% and the held-out rest."""
    everything = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    split = len(everything) * 9 // 10
    return everything[:split], everything[split:]


class Trainer:
    """A model, its optimizer, its data, and one step of the loop.

    Args:
        settings: shared by all runs.
        column: the run. Runs differ only in what depends on it.
    """

    def __init__(self, settings: Settings, column: Column) -> None:
        self.settings, self.column = settings, column
        torch.manual_seed(settings.seed)
        fused = column not in ("plain", "control")
        recipe = column if column in DTYPES else None
        self.model = LanguageModel(settings.model, "main_grad" if fused else "off", recipe)
        if column == "control":
            self.model.flip_closest()
        self.model.to(settings.device)
        self.buffer: MainGradBuffer | None = None
        if fused:
            self.buffer = MainGradBuffer(self.model.expert_weights())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.learning_rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / _WARMUP, max(1 - step / settings.steps, 0))
        )
        self._order = torch.Generator().manual_seed(settings.seed)
        self._train, self._held_out = (part.to(settings.device) for part in text())

    def _windows(self, data: Tensor, starts: Tensor) -> Tensor:
        window = torch.arange(self.settings.model.context + 1)
        return data[(starts[:, None] + window).to(data.device)]

    def step(self) -> Tensor:
        """Run one optimizer step on new data; return the loss before it: the mean over micro-batches, on the device."""
        losses = []
        for _ in range(MICRO_BATCHES):
            last = len(self._train) - self.settings.model.context
            starts = torch.randint(last, (self.settings.micro_batch,), generator=self._order)
            loss, balance = self.model(self._windows(self._train, starts))
            ((loss + _BALANCE_WEIGHT * balance) / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss in nats per byte over windows spread evenly over the held-out text."""
        last = len(self._held_out) - self.settings.model.context - 1
        starts = torch.linspace(0, last, 8 * self.settings.micro_batch).long()
        batches = torch.split(self._windows(self._held_out, starts), self.settings.micro_batch)
        return fmean(float(self.model(batch)[0]) for batch in batches)


@dataclass(frozen=True)
class Run:
    """Measurements of one run: `losses` in nats per byte, `ms` per step."""

    losses: list[float]
    ms: list[float]
    held_out: float


def train(trainer: Trainer) -> Run:
    """Run all steps, with a progress bar on stderr or, if that is not a terminal, with a line now and then."""
    losses: list[float] = []
    ms: list[float] = []
    steps = trainer.settings.steps
    says = lines(lambda: f"{trainer.column:8} step {len(ms)} of {steps}, loss {losses[-1] if losses else math.nan:.3f}")
    bar = tqdm(_timed_steps(trainer), desc=f"{trainer.column:8}", total=steps, unit="step", disable=None)
    with nullcontext() if sys.stderr.isatty() else says, bar:
        for loss, seconds in bar:
            losses.append(loss)
            ms.append(1e3 * seconds)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    return Run(losses, ms, trainer.held_out_loss())


def _timed_steps(trainer: Trainer) -> Iterator[tuple[float, float]]:
    for _ in range(trainer.settings.steps):
        start = time.perf_counter()
        loss = float(trainer.step())  # waits for the device
        yield loss, time.perf_counter() - start
