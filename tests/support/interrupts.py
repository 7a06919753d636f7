"""An exception at any line of the library that handles gradients, as an interrupt of the user's would raise it."""

import sys
from pathlib import Path

from fusedmlp import contract, functional
from fusedmlp.autograd import layers

FILES = {layers.__file__, functional.__file__, *map(str, Path(contract.__file__).parent.glob("*.py"))}


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
