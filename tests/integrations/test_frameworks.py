"""Every loop of docs/systems.md in every column: right, against plain PyTorch in the same loop, or refused."""

import json

import pytest
from support import forked, frameworks
from support.frameworks import COLUMNS, FRAMEWORKS
from support.world import launch


def results(row, folder):
    """The result of `frameworks.run` on every rank."""
    if row.ranks > 1:
        return launch("support.frameworks:run", row.ranks, folder, row.name)
    out, log = folder / "out.json", folder / "log"
    process = forked.start(frameworks.run_alone, row.name, str(out), out=log)
    try:
        process.join()
    finally:
        forked.end(process)
    assert process.exitcode == 0, log.read_text()[-4000:]
    return [json.loads(out.read_text())]


CASES = [
    pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if row.library or row.heavy else [])
    for row in FRAMEWORKS.values()
]


@pytest.mark.slow
@pytest.mark.sparse
@pytest.mark.parametrize("row", CASES)
def test_framework(row, tmp_path):
    if row.library:
        assert frameworks.LIBRARIES.is_dir(), "run: make .frameworks/.ready"
    for found in results(row, tmp_path):
        assert found["doubled"] > 2 * row.tolerance  # a wrong gradient would show
        for column in COLUMNS:
            if column in row.refused:
                assert row.refused[column] in found[column], column
            else:
                assert found[column] <= row.tolerance, column
