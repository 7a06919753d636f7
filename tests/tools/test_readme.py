"""The README is true: its example runs as pasted, and all figures are those of the committed results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import figures, gpu

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 110


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).is_file(), link


def test_the_example_runs_as_pasted(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in example.splitlines() if line]
    assert len([line for line in lines if not line.startswith("import ")]) <= 12
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    norms = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(norms) == 3
    assert all(0 < norm <= 1 for norm in norms)


@pytest.mark.parametrize("page", figures.FIGURES)
def test_every_figure_comes_from_committed_results(page):
    assert figures.render(page) == (ROOT / page).read_text(encoding="utf-8")


def test_every_picture_comes_from_committed_results():
    for name, svg in figures.pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == svg + "\n", name


def test_pictures_say_on_what_they_were_measured():
    for name, svg in figures.pictures().items():
        device = "one NVIDIA H200" if name == "gpu_steps.svg" else "a CPU: PyTorch's operators, not the kernels"
        assert f"Measured on {device}" in svg, name


def test_figures_of_a_gpu_are_the_results():
    """Two cells and a ratio, read here without the code that makes the table."""
    rows = (ROOT / "bench" / "results" / "gpu" / "h200_timings.csv").read_text().splitlines()
    fields = [row.split(",") for row in rows if '"' not in row]
    of = {(kind, shape, what): float(ms) for kind, shape, load, what, ms, _ in fields[1:] if load == "even"}
    (line,) = [line for line in gpu.gpu_steps().splitlines() if line.startswith("| sonic-c ")]
    ours, peer = of["ws", "sonic-c", "step"], of["default", "sonic-c", "grouped_mm step+add"]
    assert f"| {ours:.2f} | " in line
    assert f"| {peer:.2f} | " in line
    assert ours < of["default", "sonic-c", "step"]
    ratios = [of["default", s, "grouped_mm step+add"] / of["ws", s, "step"] for s in gpu.steps().index]
    assert f"**{min(ratios):.1f} to {max(ratios):.1f} times as fast**" in gpu.gpu_numbers()
