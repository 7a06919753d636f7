"""Versions of torch and Triton: those supported, those found, and the check that `import fusedmlp` begins with.

Outside them gradients are wrong without an error (docs/limits.md), so the import raises. `bench.gpu` alone sets the
switch that turns this into a warning. A torch whose compiler is wrong, and nothing else, keeps layers out of graphs.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ParamSpec, TypeVar

import torch

from fusedmlp import environment

OLDEST = {"torch": "2.11", "triton": "3.7"}
OLDEST_COMPILED = "2.13"  # the oldest torch inside whose graphs a layer's gradients are right
TESTED = {"torch": ("2.11.0", "2.12.1", "2.13.0", "2.15.0"), "triton": ("3.7.1", "3.8.0", "3.9.0")}  # by .ci/run

_P = ParamSpec("_P")
_R = TypeVar("_R")


def found(package: str) -> str | None:
    """The version that is installed; None if there is none. Does not import Triton, which a CPU does without."""
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problem() -> str:
    """The versions that are supported and those found, as one sentence; empty if each is supported."""
    versions = {package: found(package) for package in OLDEST}
    if all(each is None or _numbers(each) >= _numbers(OLDEST[package]) for package, each in versions.items()):
        return ""
    expected = " and ".join(f"{package}>={oldest}" for package, oldest in OLDEST.items())
    got = " and ".join(f"{package} {each or 'not installed'}" for package, each in versions.items())
    return f"fusedmlp: expected {expected}; got {got}, with which gradients can be wrong: install newer ones"


def check() -> None:
    """Raise if a version is not supported; warn instead under the switch of `bench.gpu`.

    Raises:
        ImportError: torch or Triton is too old.
    """
    message = problem()
    if message and not environment.unsupported_versions():
        raise ImportError(message)
    if message:
        warnings.warn(f"{message}. FUSEDMLP_UNSUPPORTED_VERSIONS=1 is for bench.gpu: do not train", stacklevel=2)


def compiler_problem() -> str:
    """Why layers stay outside of the graphs of `torch.compile` with this torch; empty if they do not."""
    torch_version = found("torch") or ""
    if _numbers(torch_version) >= _numbers(OLDEST_COMPILED):
        return ""
    return (
        f"expected torch>={OLDEST_COMPILED} for layers inside of its graphs; got torch {torch_version}, which leaves "
        "wrong numbers in main_grad there: layers run outside of them, and fullgraph=True is an error"
    )


def outside_of_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep Dynamo out of a function and what it calls: after a graph break it would compile pieces of them, and fail on
    views of parameters with a float32 `.grad`.

    This is `torch.compiler.disable`, but imports the compiler, which takes seconds, only if the program has done so.
    """
    disabled: Callable[[], Callable[_P, _R]] = cache(partial(torch.compiler.disable, function))

    @wraps(function)
    def choose(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return choose


def no_frame(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let Dynamo not compile a function as a frame of its own, only what it calls; a call costs nothing more."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def outside_of_wrong_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """With a torch whose compiler is wrong, break a graph before `function` and run it, and all it calls, eagerly.

    Under `fullgraph=True` the compiler raises an error with `compiler_problem()`: in these versions, which do not
    change, it looks for the mark.
    """
    problem = compiler_problem()
    if not problem:
        return function
    reason = f"fusedmlp inside torch.compile: {problem}"
    # Not by `outside_of_graphs`: Dynamo skips a function that has the mark, but compiles those that it calls.
    disabled: Callable[[], Callable[_P, _R]] = cache(partial(torch.compiler.disable, function, reason=reason))

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            raise RuntimeError(reason)  # while this function itself is traced, which then runs as it is
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    run._torchdynamo_disable, run._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return run


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
