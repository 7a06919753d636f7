"""Progress of a long command whose output is not a terminal: a line now and then instead of a bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 10.0


@contextmanager
def lines(line: Callable[[], str]) -> Iterator[None]:
    """Print `line()` on stderr every ten seconds while the block runs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(SECONDS):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
