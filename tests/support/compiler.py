"""Marks for tests of layers inside the graphs of `torch.compile`, which older versions of torch must not have."""

import pytest

from fusedmlp import versions

# tests/tools/test_old_versions.py has what these versions do instead.
in_graphs = pytest.mark.skipif(bool(versions.compiler_problem()), reason=versions.compiler_problem())

# Dynamo itself instantiates an autograd.Function while it traces one, and looks at .grad of every input.
DYNAMO_WARNS = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
