"""Experts of frameworks that compute in the dtype of their weights, also under autocast, unless they have a recipe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(recipe: str | None, device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is no recipe for a call without one."""
    if recipe is None and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
