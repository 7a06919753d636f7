"""Set-up for every test: kernels run under Triton's CPU interpreter unless there is a GPU.

`EMULATE=sm_90` compiles them for that GPU and executes the compiled code in `tests/ptx_emulator`; `EMULATE=sm_90:long`
does so with the tiles for long loads.
"""

import gc
import os
from pathlib import Path

# Tests run in parallel processes: OpenMP threads that wait for each other, on cores that others use, would wait long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if os.environ.get("EMULATE"):
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from support.clean_run import CleanRun
from support.grids import Grids

torch.set_num_threads(1)

collect_ignore = ["peers"]  # Transformers' own tests: `make peers`


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="nothing that is slow; see support/grids.py")
    parser.addoption("--part", default="1/1", metavar="K/N", help="a part of grids, and the K-th of each N other cases")


def pytest_configure(config):
    config.addinivalue_line("markers", "exhaustive: only in a run of all cases, or by the part that it is in")
    config.addinivalue_line("markers", "slow: a quick run leaves it out")
    config.addinivalue_line("markers", "sparse: of its grid a run has every value, not every two together")
    config.pluginmanager.register(Grids(config.getoption("quick"), config.getoption("part")))
    if not hasattr(config, "workerinput"):  # xdist's workers are this process's children
        config.pluginmanager.register(CleanRun(Path(__file__).parents[1]))


def pytest_collection_finish():
    """Take what stays for the whole run out of every later garbage collection, which saves a third of a second each."""
    gc.collect()
    if not os.environ.get("EMULATE"):  # the emulator looks for tensors in the collector's lists
        gc.freeze()


if os.environ.get("TRITON_INTERPRET") == "1":
    from support import interpreter

    interpreter.multiply_alike()
    interpreter.patch_language_once()
    interpreter.remember_types()
    interpreter.check_overflow(False)


if EMULATE := os.environ.get("EMULATE"):

    @pytest.fixture(autouse=True, scope="session")
    def _emulated():
        from emulation.layers import emulated

        target, _, shape = EMULATE.partition(":")
        with emulated(target, shape or None):
            yield


@pytest.fixture
def poison():
    """Fill uninitialised memory with NaN, so that an output that was not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 3])
def threads(request):
    """Run with so many of PyTorch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
