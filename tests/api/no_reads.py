"""Python that would wait for a GPU, or that a CUDA graph could not replay, raises: values of tensors are not read.

Interpreted kernels may read: on a GPU they run there.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from fusedmlp.operators import ops

METHODS = (
    *("item", "tolist", "numpy", "cpu", "to"),
    *("__bool__", "__int__", "__index__", "__float__", "__array__", "__contains__"),
)
OPERATORS = {
    "_local_scalar_dense",  # of item(), bool(), float()
    "nonzero",
    "masked_select",
    "bincount",
    "repeat_interleave",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


class _NoReads(TorchDispatchMode):
    """Operators that wait for a GPU, also inside our own, which `torch.library` otherwise hides from a mode."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if function.namespace == "fusedmlp":
            *arguments, impl = args
            with self:
                return getattr(ops._implementation(impl), name)(*arguments)
        indices = [t for argument in args if isinstance(argument, list | tuple) for t in argument]
        by_mask = name.startswith("index") and any(getattr(t, "dtype", None) == torch.bool for t in indices)
        if name in OPERATORS or by_mask:
            raise AssertionError(f"{name} reads a tensor on the host")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_reads():
    """Inside, nothing but kernels reads tensors."""
    launching = False

    def refused(name, method):
        def run(tensor, *args, **kwargs):
            if not launching and (name != "to" or "cpu" in [a for a in args if isinstance(a, str)]):
                raise AssertionError(f"{name} reads a tensor on the host")
            return method(tensor, *args, **kwargs)

        return run

    def launch(*args, **kwargs):
        nonlocal launching
        launching = True
        try:
            with _disable_current_modes():
                return run_kernel(*args, **kwargs)
        finally:
            launching = False

    run_kernel = InterpretedFunction.run
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(InterpretedFunction, "run", launch)
        for name in METHODS:  # on a CPU some are no operators
            patch.setattr(torch.Tensor, name, refused(name, getattr(torch.Tensor, name)))
        stack.enter_context(_NoReads())
        yield
