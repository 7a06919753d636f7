"""Autocast for experts of frameworks, which compute in the dtype of their weights unless they have a recipe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(recipe: str | None, device_type: str) -> AbstractContextManager[object]:
    """A context that turns autocast off for a layer without a recipe, for which it would be one."""
    if recipe is None and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
