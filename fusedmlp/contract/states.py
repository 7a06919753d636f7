"""The states of one parameter's `main_grad` in a step, and all transitions: docs/gradients.md has them as a picture."""

from __future__ import annotations

from enum import Enum


class Holds(Enum):
    """Contents of a `main_grad`, as far as this library knows."""

    GRADIENT = "the gradient of this step; without a MainGradBuffer, whatever its owner has put there"
    ZEROS = "zeros, or what was written to it by hand: the next gradient adds"
    LENT = "ZEROS, or what plain PyTorch added to it inside as_grad"
    STEPPED = "a gradient from which an optimizer has stepped: the next gradient adds, unless a step begins first"
    STALE = "the gradient of an earlier step: the next gradient overwrites it"


GRADIENT, ZEROS, LENT, STEPPED, STALE = Holds  # looked up once, not for every parameter


class Event(Enum):
    """An event that changes the state."""

    ATTACH = "a MainGradBuffer is made"
    DETACH = "buffer.detach()"
    ZERO = "buffer.zero_(); .grad = None inside as_grad()"
    WRITE = "a fused gradient arrives; a delayed one arrives when its queue runs"
    CATCH = "a gradient of plain PyTorch is caught, or found in .grad"
    FAIL = "the backward of a gradient that overwrote fails"
    READ = "norm(), clip_norm_(), flat, as_grad(): what is stale becomes zeros"
    RETURN = "as_grad() ends"
    STEP = "an optimizer steps"


TRANSITIONS: dict[Event, dict[Holds, Holds]] = {
    Event.ATTACH: dict.fromkeys(Holds, ZEROS),
    Event.DETACH: dict.fromkeys(Holds, GRADIENT),
    Event.ZERO: dict.fromkeys(Holds, STALE),
    Event.WRITE: dict.fromkeys(Holds, GRADIENT),
    Event.CATCH: dict.fromkeys(Holds, GRADIENT),
    Event.FAIL: dict.fromkeys((GRADIENT, STALE), STALE),
    Event.READ: dict.fromkeys((STALE, GRADIENT, ZEROS, STEPPED), ZEROS),  # all but STALE if `.grad` is None
    Event.RETURN: {ZEROS: LENT},
    Event.STEP: dict.fromkeys(Holds, STEPPED),
}
