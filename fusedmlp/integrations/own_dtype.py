"""Autocast is no recipe for experts of frameworks, which compute in the dtype of their weights without one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context that turns autocast off, where it is on."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
