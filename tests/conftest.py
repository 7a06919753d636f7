"""Set-up for every test: kernels run under Triton's CPU interpreter unless there is a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import pytest

torch.set_num_threads(1)  # tests run in parallel processes


@pytest.fixture
def poison():
    """Fill uninitialised memory with NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
