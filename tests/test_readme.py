"""The README says what is true: its examples run as pasted, and its figures are those of the committed results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import figures

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def printed_numbers(example, tmp_path):
    assert len([line for line in example.splitlines() if line]) <= 20
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()]


def test_the_examples_run_as_pasted(tmp_path):
    training, tokens = (
        printed_numbers(example, tmp_path) for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    )
    assert len(training) == 3
    assert all(0 < norm <= 1 for _, norm in training)
    assert all(norm > 0 for norm in tokens[0])


@pytest.mark.parametrize("page", figures.FIGURES)
def test_every_figure_comes_from_committed_results(page):
    assert figures.render(page) == (ROOT / page).read_text(encoding="utf-8")


def test_every_picture_comes_from_committed_results():
    for name, svg in figures.pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == svg + "\n", name


def test_every_switch_in_the_readme_exists():
    from fusedmlp import environment

    for switch in re.findall(r"\b(?:FUSEDMLP|TRITON)_[A-Z_]+", README):
        assert f"`{switch}`" in environment.__doc__
