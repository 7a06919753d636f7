"""Changes of Triton's interpreter, by which the tests run kernels where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy
import triton.language as tl
from triton.runtime import interpreter


def multiply_alike() -> None:
    """Make operands of products contiguous, whatever path loaded them: on some processors numpy rounds products of
    transposed operands in another way, and tests expect the same bits from every path."""
    product = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a.data, b.data = numpy.ascontiguousarray(a.data), numpy.ascontiguousarray(b.data)
        return product(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_language_once() -> None:
    """Patch `tl` at the launch, for all modules; for each call of a device function, that takes a third of the time."""
    patch, everywhere = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self, *args, **kwargs):
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(everywhere)
    interpreter.InterpretedFunction.__call__ = call


def remember_types() -> None:
    """Keep types of blocks, and numpy's types for Triton's: to make them anew takes a fifth of the time."""
    find, make = interpreter._get_np_dtype, tl.core.block_type.__init__
    dtypes, blocks = {}, {}

    def _get_np_dtype(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find(dtype)
        return dtypes[dtype.name]

    def __init__(self, element_ty, shape):
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    interpreter._get_np_dtype = _get_np_dtype
    tl.core.block_type.__init__ = __init__


def check_overflow(on: bool) -> None:
    """Check every operation on 32-bit integers for overflow, for tests of large numbers; it doubles the time."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=on)
