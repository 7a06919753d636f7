"""Tests here need compiled kernels, not interpreted ones. Triton decides that when it is imported: `make emulate`."""

import os

import pytest
from ptx_emulator import build

collect_ignore_glob = [] if os.environ.get("EMULATE") else ["*"]


@pytest.fixture(autouse=True)
def _compiler():
    if build.compiler() is None:
        message = "no C++ compiler: expected $CXX, c++, g++ or clang++"
        if os.environ.get("CI"):
            pytest.fail(f"{message}, without which no compiled kernel is executed")
        pytest.skip(message)
