"""Code that several commands share: arguments, lines of progress, files, and errors where a package is missing."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRESS_SECONDS = 10.0
LAYER = {"experts": 128, "hidden": 2048, "ffn": 768, "rows": 65536}


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of a layer, and its dtype."""
    for name, default in LAYER.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def positive(argument: str) -> int:
    """Read a number that is at least 1."""
    if not argument.isdecimal() or int(argument) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1; got {argument!r}")
    return int(argument)


def install(package: str | None, extra: str) -> str:
    """The command that installs a package that is missing, or in a clone all of an extra."""
    return f"pip install {package}, or in a clone pip install -e '.[{extra}]'"


def without_triton(command: str) -> int:
    """Print that a command needs Triton; return its exit status."""
    print(f"{command}: expected triton to be installed; got none: pip install triton", file=sys.stderr)
    return 2


@contextmanager
def lines(line: Callable[[], str]) -> Iterator[None]:
    """Print `line()` on stderr every ten seconds while the block runs, as progress where stderr is no terminal."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def write(path: Path, content: str | bytes) -> None:
    """Write a file under another name, then rename it: if that fails, an older file is as it was."""
    data = content.encode() if isinstance(content, str) else content
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
