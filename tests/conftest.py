"""Set-up for every test: kernels run under Triton's CPU interpreter unless there is a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import pytest

torch.set_num_threads(1)  # tests run in parallel processes


def _interpret_products_alike():
    """Of operands that lie in memory alike, whatever path brought them: on some processors numpy's products of
    transposed operands round otherwise, and tests ask for the same bits from every path."""
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder

    product = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a.data, b.data = numpy.ascontiguousarray(a.data), numpy.ascontiguousarray(b.data)
        return product(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_products_alike()


@pytest.fixture
def poison():
    """Fill uninitialised memory with NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
