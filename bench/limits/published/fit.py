"""Constants of `bench.limits.rates` fitted to published points: `python -m bench.limits.published.fit` prints them.

The fit starts from round numbers and is drawn towards them, so that a constant that no point speaks of stays where it
is. An error far beyond `_KNEE` counts little more than one just beyond (Cauchy's loss), since a kernel that the model
does not understand says nothing about its constants. The method is D. Marquardt's ("An Algorithm for Least-Squares
Estimation of Nonlinear Parameters", 1963).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch

from bench.limits import rates
from bench.limits.published import points
from bench.limits.published.points import Point
from bench.limits.rates import Rates

START = {
    "sm_90": {
        "clock": 1.3e9,
        "clock_falls": 1 / 3,
        "l2": 48,
        "latency": 1000,
        "port": 48,
        "gap": 40,
        "tile": 500,
        "launch": 500,
    },
    "sm_100": {
        "clock": 1.15e9,
        "clock_falls": 1 / 2,
        "l2": 64,
        "latency": 1000,
        "port": 48,
        "gap": 40,
        "tile": 500,
        "launch": 500,
    },
}
_KNEE = 0.06  # errors count by their square below, by its logarithm above
# A constant this share from its start counts as much as an error of `_KNEE`. Chosen among 0.1 to 0.3 with the errors
# of points held out in view, as was `_KNEE`'s loss: a looser one fits tutorial 05 better, and steps 3 to 4 worse.
_PRIOR = 0.12
_ROUNDS, _CLOSE = 60, 1e-5


def fit(of: Sequence[Point]) -> Rates:
    """Constants of the points' architecture, fitted to them; the others are as `rates` has them."""
    architecture = of[0].architecture
    start, base = START[architecture], rates.of(architecture)
    names = list(start)

    def at(x: torch.Tensor) -> Rates:
        factors = torch.exp(x).tolist()
        return base._replace(**{name: start[name] * factor for name, factor in zip(names, factors, strict=True)})

    def residuals(x: torch.Tensor) -> torch.Tensor:
        rate = at(x)
        errors = torch.tensor([math.log1p(points.error(each, rate)) for each in of], dtype=torch.float64) / _KNEE
        rounded = torch.sign(errors) * torch.sqrt(torch.log1p(errors**2))
        return torch.cat([rounded, x / _PRIOR])

    return at(_least_squares(residuals, torch.zeros(len(names), dtype=torch.float64)))


def _least_squares(residuals: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    damping, at_x = 1e-2, residuals(x)
    for _ in range(_ROUNDS):
        columns = [(residuals(x + step) - at_x) / _CLOSE for step in _CLOSE * torch.eye(len(x), dtype=torch.float64)]
        slope = torch.stack(columns, dim=1)
        curvature = slope.T @ slope
        step = torch.linalg.solve(curvature + damping * torch.diag(curvature.diag()), -slope.T @ at_x)
        if (trial := residuals(x + step)).square().sum() < at_x.square().sum():
            x, at_x, damping = x + step, trial, damping / 3
        else:
            damping *= 4
    return x


def main() -> None:
    """Print the fitted constants of both architectures."""
    parser = argparse.ArgumentParser(prog="python -m bench.limits.published.fit", description=__doc__)
    parser.add_argument("--half", choices=("a", "b"), help="fit to one half of the points alone")
    half = parser.parse_args().half
    for architecture, start in START.items():
        of = [each for each in points.points() if each.use == "fit" and each.architecture == architecture]
        found = fit([each for each in of if half in (None, each.half)])
        print(architecture, ", ".join(f"{name} {getattr(found, name):.4g}" for name in start))


if __name__ == "__main__":
    main()
