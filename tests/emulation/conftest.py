"""Tests of this project's kernels on the emulator; they run where those of the emulator, in `ptx_emulator/`, run."""

from ptx_emulator.conftest import _compiler, collect_ignore_glob

__all__ = ["_compiler", "collect_ignore_glob"]
