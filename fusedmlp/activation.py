"""Activations: their names and options."""

from __future__ import annotations

import ast
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

_QUICK_ALPHA = 1.702


class Kind(NamedTuple):
    """The curve of an activation, whether it is gated, and its defaults."""

    curve: str  # the scalar function, by its name in `kernels/device/activation.py`
    gated: bool
    alpha: float | None = None  # default of the curve's parameter, as `Activation` describes it; None: it has none
    linear_scale: float | None = None  # default of the linear part's bound; None: it has none


KINDS = {
    "swiglu": Kind("sigmoid", True, 1.0),
    "geglu": Kind("gelu", True),
    "geglu_tanh": Kind("gelu_tanh", True),
    "quick_geglu": Kind("sigmoid", True, _QUICK_ALPHA),
    "reglu": Kind("relu", True),
    "situ_glu": Kind("situ", True, 4.0, 25.0),
    "silu": Kind("sigmoid", False, 1.0),
    "gelu": Kind("gelu", False),
    "gelu_tanh": Kind("gelu_tanh", False),
    "quick_gelu": Kind("sigmoid", False, _QUICK_ALPHA),
    "relu": Kind("relu", False),
    "relu2": Kind("relu2", False),
}

# The keyword arguments of `Activation` in their order, on which its encoded form depends.
NUMBERS = ("limit", "alpha", "linear_offset", "linear_scale")
OPTIONS = ("interleaved", *NUMBERS)


@dataclass(frozen=True)
class Activation:
    """An activation between fc1 and fc2.

    Gated kinds (`swiglu`, `geglu`, `geglu_tanh`, `quick_geglu`, `reglu`, `situ_glu`) split the `2F` channels of fc1
    into a gate `g` and a linear part `l` and compute `curve(g) * (l + linear_offset)`.
    Ungated kinds
    (`silu`, `gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `relu2`)
    compute `curve(h)` on `F` channels.
    With the sigmoid curve (`swiglu`, `silu`, `quick_*`), `curve(g) = g * sigmoid(alpha * g)`; `situ_glu` has
    `curve(g) = alpha * tanh(g / alpha) * sigmoid(g)`.

    Args:
        name: one of the kinds above.
        interleaved: gate and linear channels alternate (gate first); otherwise the first half is the gate.
        limit: clamps the gate to `<= limit` and the linear part to `[-limit, limit]`. Gated kinds only.
        alpha: scale of the sigmoid's argument; 1 for `swiglu` and `silu`, 1.702 for `quick_*` when None. For
            `situ_glu` the bound of the gate's tanh, positive; Kimi K3's 4 when None.
        linear_offset: added to the (clamped or bounded) linear part. Gated kinds only.
        linear_scale: positive bound of the linear part, which becomes `linear_scale * tanh(l / linear_scale)`. For
            `situ_glu` only; Kimi K3's 25 when None.

    Raises:
        ValueError: an unknown name, or an option that the kind does not have.

    Sources: GLU variants, Shazeer 2020 (arXiv 2002.05202); squared ReLU, So et al. 2021 (arXiv 2109.08668);
    the clamped, offset swiglu is the one of gpt-oss; SiTU-GLU is the one of Kimi K3 (arXiv 2607.24653).
    """

    name: str
    _: KW_ONLY
    interleaved: bool = False
    limit: float | None = None
    alpha: float | None = None
    linear_offset: float = 0.0
    linear_scale: float | None = None
    # Computed in __post_init__ for torch.compile: in a graph it treats floats as variables, and of a frozen object it
    # knows only the fields.
    gated: bool = field(init=False, repr=False, compare=False)  # whether fc1 has 2F output channels
    encoded: str = field(init=False, repr=False, compare=False)  # as text, for operators

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ValueError(f"activation: expected one of {', '.join(KINDS)}; got {self.name!r}")
        object.__setattr__(self, "gated", KINDS[self.name].gated)
        for name in NUMBERS:
            number = getattr(self, name)
            if number is not None and number != 0 and not (isinstance(number, Real) and isfinite(number)):
                raise ValueError(f"activation: expected a finite number as {name}; got {number!r}")
        if self.interleaved not in (False, True):
            raise ValueError(f"activation: expected True or False as interleaved; got {self.interleaved!r}")
        if not self.gated and (self.interleaved or self.limit is not None or self.linear_offset):
            raise ValueError(
                f"activation: interleaved, limit and linear_offset need a gated activation; got {self.name!r}"
            )
        if self.linear_scale is not None and self.linear_bound is None:
            raise ValueError(f"activation: linear_scale needs an activation with a bound, situ_glu; got {self.name!r}")
        if self.linear_bound is not None and not (self.linear_bound > 0 and self.sigmoid_alpha > 0):
            raise ValueError(
                f"activation: alpha and linear_scale of {self.name} must be positive; got alpha={self.alpha}, "
                f"linear_scale={self.linear_scale}"
            )
        if self.alpha is not None and KINDS[self.name].alpha is None:
            raise ValueError(
                f"activation: alpha scales a sigmoid's argument; {self.name!r} has none; got alpha={self.alpha}"
            )
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"activation: limit must be positive; got {self.limit}")
        object.__setattr__(self, "encoded", " ".join([self.name, *(str(value) for value in self.options.values())]))

    @property
    def options(self) -> dict[str, Any]:
        """Values of the keyword arguments, by name: `Activation(a.name, **a.options)` equals `a`."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def curve(self) -> str:
        """Name of the scalar function."""
        return KINDS[self.name].curve

    @property
    def sigmoid_alpha(self) -> float:
        """The curve's parameter: scale of the sigmoid's argument, or situ's bound; 1 where there is none."""
        alpha = KINDS[self.name].alpha if self.alpha is None else self.alpha
        return 1.0 if alpha is None else alpha

    @property
    def linear_bound(self) -> float | None:
        """Bound of the tanh of the linear part; None where there is no tanh."""
        default = KINDS[self.name].linear_scale
        return default if default is None or self.linear_scale is None else self.linear_scale

    @staticmethod
    @lru_cache(maxsize=64)
    def decode(encoded: str) -> Activation:
        """Inverse of `encoded`."""
        name, *options = encoded.split(" ")
        return Activation(name, **dict(zip(OPTIONS, map(ast.literal_eval, options), strict=True)))

    def split(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and linear views `[..., F]` of the pre-activation `[..., 2F]`."""
        if self.interleaved:
            return h[..., 0::2], h[..., 1::2]
        gate, linear = h.chunk(2, dim=-1)
        return gate, linear
