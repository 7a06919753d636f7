"""The demo's experiment: the three runs, and whether the loss curves of the two that matter agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from fusedmlp.demo.count import StepCount, count_step
from fusedmlp.demo.train import Column, Run, Settings, Trainer, train

# How far two runs that differ only in rounding can be apart, in units of how far two others are: see `agreement`.
_SLACK = 10
_FP32_EPSILON = 2**-23


@dataclass(frozen=True)
class Measured:
    """One column of the table: losses in nats per byte, `ms` per step."""

    final_loss: float
    held_out_loss: float
    ms: float
    step: StepCount


@dataclass(frozen=True)
class Agreement:
    """How far the loss curves are apart, step by step, and how far they may be, in nats per byte."""

    difference: list[float]
    bound: list[float]

    @property
    def agree(self) -> bool:
        """Whether no step is out of bounds. A loss that is not a number agrees with nothing."""
        return all(d <= b for d, b in zip(self.difference, self.bound, strict=True))

    @property
    def worst_step(self) -> int:
        """The step, from 0, with the largest difference."""
        return max(range(len(self.difference)), key=lambda step: _nan_is_largest(self.difference[step]))


@dataclass(frozen=True)
class Results:
    """Everything that the demo found out."""

    settings: Settings
    plain: Measured
    fused: Measured
    losses: dict[Column, list[float]]
    agreement: Agreement

    @property
    def passed(self) -> bool:
        """The curves agree, and autograd neither copied nor added a gradient of the fused expert weights."""
        return self.agreement.agree and self.fused.step.copies == 0 and self.fused.step.adds == 0


def compare(settings: Settings) -> Results:
    """Train `plain`, `fused` and `control`; count one more step of the first two."""
    runs: dict[Column, Run] = {}
    columns = {}
    for column in ("plain", "fused"):
        trainer = Trainer(settings, column)
        runs[column] = train(trainer)
        columns[column] = _measured(runs[column], count_step(trainer))
    runs["control"] = train(Trainer(settings, "control"))
    losses = {column: run.losses for column, run in runs.items()}
    curves = agreement(losses["plain"], losses["fused"], losses["control"])
    return Results(settings, columns["plain"], columns["fused"], losses, curves)


def _measured(run: Run, step: StepCount) -> Measured:
    return Measured(fmean(run.losses[-10:]), run.held_out, median(run.ms), step)


def agreement(plain: list[float], fused: list[float], control: list[float]) -> Agreement:
    """Compare the curves of `plain` and `fused` with a bound that is measured, not chosen.

    Two runs that differ only in rounding drift apart, exponentially at first: every step amplifies what came
    before, and a rounding difference can send a token to another expert. `control` is `plain` with all initial
    weights one unit in the last place away, so `|control - plain|` shows how far rounding alone has carried the loss
    by each step. `fused` may be ten times as far from `plain` as `control` has been up to that step: two drifts of
    one kind differ by a random factor. Up to the first visible drift, the unit in the last place of the loss
    stands in for it. An error in a gradient (a lost micro-batch, a wrong scale) shows in the second step, where
    the bound is still near 1e-6.
    """
    drift = [max(abs(c - p), _FP32_EPSILON * abs(p)) for c, p in zip(control, plain, strict=True)]
    difference = [abs(f - p) for f, p in zip(fused, plain, strict=True)]
    return Agreement(difference, [_SLACK * d for d in accumulate(drift, max)])


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value
