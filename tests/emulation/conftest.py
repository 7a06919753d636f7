"""This project's kernels on the emulator, which is tested in `ptx_emulator/`: the same holds for both folders."""

from ptx_emulator.conftest import _compiler, collect_ignore_glob

__all__ = ["_compiler", "collect_ignore_glob"]
