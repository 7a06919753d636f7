"""Hatchling's hook: no archive without kernels."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsAreThere(BuildHookInterface):
    """Ends a build of a tree without symbolic links."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Check before anything is built."""
        runpy.run_path(str(Path(self.root, "fusedmlp", "links.py")))["check"]()
