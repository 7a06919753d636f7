"""An exception at any line of the library that handles gradients, as an interrupt of the user's would raise it."""

import sys
from pathlib import Path

from fusedmlp import autograd, contract, functional


def _sources(module):
    """Its file, or the files of its folder."""
    path = Path(module.__file__)
    return path.parent.rglob("*.py") if path.name == "__init__.py" else [path]


FILES = {str(path) for module in (autograd, functional, contract) for path in _sources(module)}


class Interrupted(BaseException):
    """Like KeyboardInterrupt."""


def interrupted(call, line, kept):
    """Run `call` and raise at the given line that those files execute in it, from 0; whether it got there.

    The exception goes to the list `kept`, unless Python swallows it (in `__del__`).
    """
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            executed += 1
            if executed > line:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted as error:
        kept.append(error)
    finally:
        sys.settrace(before)
    return executed > line
