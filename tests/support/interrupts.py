"""An exception at any line of the library, as an interrupt of the user's would raise it."""

import sys
from pathlib import Path

import fusedmlp

LIBRARY = str(Path(fusedmlp.__file__).parent)


class Interrupted(BaseException):
    """Like KeyboardInterrupt."""


def interrupted(call, line):
    """Run `call` and raise at the given line that the library executes in it, from 0; the exception, or None."""
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        if not frame.f_code.co_filename.startswith(LIBRARY):
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
        return error
    finally:
        sys.settrace(before)
    return None
