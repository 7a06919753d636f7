"""The demo's experiment: training runs, and whether their loss curves agree as they should."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

from fusedmlp.demo.count import StepCount, count_step
from fusedmlp.demo.train import Column, Run, Settings, Trainer, train
from fusedmlp.recipe import DTYPES

# The bound in units of the last place of the loss (the first `_EARLY` steps) or of the drift: see `agreement`.
SLACK = 4
_EARLY = 3
_FP32_EPSILON = 2**-23
MOST = 0.05  # of a loss: how far that of a run with a recipe may be from it, see `Beside`


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
class Beside:
    """A run with a recipe beside `other`, the run in the next wider format.

    Both begin with the same weights, so their first losses differ by the rounding of one forward. If they are equal,
    the experts did not use the recipe, as with too few rows. Training amplifies the difference, which must stay below
    `MOST`.
    """

    measured: Measured
    other: Column
    difference: list[float]  # of losses, as parts of the other run's

    @property
    def worst(self) -> tuple[int, float]:
        """The step, from 0, with the largest difference, and that."""
        return max(enumerate(self.difference), key=lambda item: _nan_is_largest(item[1]))

    @property
    def computed(self) -> bool:
        """Whether the experts computed in the recipe's format."""
        return self.difference[0] > 0

    @property
    def passed(self) -> bool:
        """Whether they did, and the losses stayed close; a NaN never is."""
        return self.computed and all(part <= MOST for part in self.difference)


@dataclass(frozen=True)
class Results:
    """Everything that the demo measured."""

    settings: Settings
    plain: Measured
    fused: Measured
    losses: dict[Column, list[float]]
    agreement: Agreement
    recipes: dict[Column, Beside] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all curves agree, and autograd copied and added gradients of expert weights in `plain` alone."""
        steps = [self.fused.step, *(beside.measured.step for beside in self.recipes.values())]
        unfused = any(step.copies or step.adds for step in steps)
        return self.agreement.agree and not unfused and all(beside.passed for beside in self.recipes.values())


def compare(settings: Settings, recipe: Column | None = None) -> Results:
    """Train `plain`, `fused` and `control`, and with an 8-bit recipe also `bf16` and the recipe.

    One more step of each but `control` is counted.
    """
    others: dict[Column, Column] = {} if recipe is None else {"bf16": "fused", recipe: "bf16"}
    runs: dict[Column, Run] = {}
    columns: dict[Column, Measured] = {}
    for column in ("plain", "fused", *others):
        trainer = Trainer(settings, column)
        runs[column] = train(trainer)
        columns[column] = _measured(runs[column], count_step(trainer, has_peak=column not in DTYPES))
    runs["control"] = train(Trainer(settings, "control"))
    losses = {column: run.losses for column, run in runs.items()}
    curves = agreement(losses["plain"], losses["fused"], losses["control"])
    recipes = {
        column: Beside(columns[column], other, _parts(losses[column], losses[other]))
        for column, other in others.items()
    }
    return Results(settings, columns["plain"], columns["fused"], losses, curves, recipes)


def _measured(run: Run, step: StepCount) -> Measured:
    return Measured(fmean(run.losses[-10:]), run.held_out, median(run.ms), step)


def _parts(losses: list[float], others: list[float]) -> list[float]:
    return [abs(loss - other) / other for loss, other in zip(losses, others, strict=True)]


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
