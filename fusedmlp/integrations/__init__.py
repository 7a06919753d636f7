"""Integrations with training frameworks: a file for each, a test of the same name, and a line in this list.

`doctor` and docs/api.md are made from the list; tests check that docs/frameworks.md and the site have its pages.
"""

from __future__ import annotations

from typing import NamedTuple


class Integration(NamedTuple):
    """A library that fusedmlp integrates with."""

    name: str
    package: str  # to install
    module: str  # of this folder
    library: str = ""  # what the package installs, if that has another name
    page: str = ""  # docs/<page>.md, if it has another name than the module


INTEGRATIONS = (
    Integration("Megatron-core", "megatron-core", "megatron", "megatron"),
    Integration("Transformers", "transformers", "transformers"),
    Integration("torchtitan", "torchtitan", "torchtitan"),
    Integration("NeMo Automodel", "nemo_automodel", "automodel"),
    Integration("PyTorch DDP", "torch", "ddp"),
    Integration("PyTorch FSDP2", "torch", "fsdp2"),
)
