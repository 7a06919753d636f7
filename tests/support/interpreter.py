"""Triton's interpreter, as the tests run kernels where there is no GPU: changes of it that they need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy
import triton.language as tl
from triton.runtime import interpreter


def multiply_alike() -> None:
    """Operands that lie in memory alike, whatever path brought them: on some processors numpy's products of
    transposed operands round otherwise, and tests ask for the same bits from every path."""
    product = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a.data, b.data = numpy.ascontiguousarray(a.data), numpy.ascontiguousarray(b.data)
        return product(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_language_once() -> None:
    """At the launch, for all modules; not in each call of a device function too, which takes a third of the time."""
    patch, everywhere = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self, *args, **kwargs):
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(everywhere)
    interpreter.InterpretedFunction.__call__ = call


def remember_dtypes() -> None:
    """Of numpy for those of Triton, which each operation asks for: the table of all is built again, a tenth of the
    time."""
    find, known = interpreter._get_np_dtype, {}

    def _get_np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = _get_np_dtype


def check_overflow(on: bool) -> None:
    """Of 32-bit integers, in every operation, which takes as long as all else; of use where numbers are large."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=on)
