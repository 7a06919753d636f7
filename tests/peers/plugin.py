"""The pytest plugin of one run: chooses the experts, seeds every test by its name, and records its outcome."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
import transformers

from peers import default_experts

_ORDER = ("passed", "skipped", "failed")  # the worst of a test's phases and subtests counts
_found: dict[str, dict] = {}
_before: dict[str, int] = {}


def pytest_configure(config):
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    default_experts.use(default_experts.chosen())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Give tests that set no seed the same weights and inputs with any experts and in any order."""
    transformers.set_seed(zlib.crc32(item.name.encode()))
    _before.clear()
    _before.update(default_experts.calls)


def pytest_runtest_logreport(report):
    test = report.nodeid.split("::", 1)[1].replace("::", ".")
    row = _found.setdefault(test, {"test": test, "outcome": "passed", "failures": 0, "seconds": 0.0, "why": ""})
    row["seconds"] += report.duration
    row["failures"] += report.outcome == "failed"
    if hasattr(report, "context") and report.skipped:  # a subtest: the others count
        return
    if report.outcome != "passed" and _ORDER.index(report.outcome) >= _ORDER.index(row["outcome"]):
        row["outcome"] = report.outcome
        row["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext


def pytest_runtest_logfinish(nodeid, location):
    row = _found.pop(nodeid.split("::", 1)[1].replace("::", "."))
    row["calls"] = {name: count - _before.get(name, 0) for name, count in default_experts.calls.items()}
    with Path(os.environ["OUTCOMES"]).open("a", encoding="utf-8") as file:  # a line a test: a crash loses only its own
        file.write(json.dumps(row) + "\n")
