"""The demo's experiment: three training runs, and whether the loss curves of `plain` and `fused` agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from fusedmlp.demo.count import StepCount, count_step
from fusedmlp.demo.train import Column, Run, Settings, Trainer, train

# The bound in units of the last place of the loss (the first `_EARLY` steps) or of the drift: see `agreement`.
SLACK = 4
_EARLY = 3
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
        """Whether every step is within its bound; a NaN never is."""
        return all(d <= b for d, b in zip(self.difference, self.bound, strict=True))

    @property
    def worst_step(self) -> int:
        """The step, from 0, with the largest difference."""
        return max(range(len(self.difference)), key=lambda step: _nan_is_largest(self.difference[step]))


@dataclass(frozen=True)
class Results:
    """Everything that the demo measured."""

    settings: Settings
    plain: Measured
    fused: Measured
    losses: dict[Column, list[float]]
    agreement: Agreement

    @property
    def passed(self) -> bool:
        """Whether the curves agree, and autograd neither copied nor added a gradient of the fused expert weights."""
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

    Two runs that differ only in rounding stay within a few units in the last place of each other until a token with two
    nearly equal router probabilities goes to another expert; then they drift apart visibly. Whether and when that
    happens is chance, so the bound has two parts.

    In the first three steps it is `SLACK` units in the last place of the loss (of 8 seeds, the largest difference in
    the first 8 steps was 1.4 units). These steps find errors: a lost or stale gradient shows in the second or third
    one, at hundreds of times the bound.

    From then on it is `SLACK` times the largest drift `|control - plain|`, as two drifts of one kind differ by a random
    factor. `control` causes the drift on purpose: its closest routing decisions are flipped.
    """
    ulps = [_FP32_EPSILON * abs(p) for p in plain]
    drift = max(abs(c - p) for c, p in zip(control, plain, strict=True))
    difference = [abs(f - p) for f, p in zip(fused, plain, strict=True)]
    return Agreement(difference, [SLACK * (ulp if i < _EARLY else max(ulp, drift)) for i, ulp in enumerate(ulps)])


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value
