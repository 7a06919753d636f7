"""Trainings of whole models, tried on the CPU: every stack runs, and a wrong gradient of the experts is noticed."""

import csv
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from support import forked
from torch import nn

from bench.gpu import jobs, packages
from bench.gpu.stacks import __main__ as command
from bench.gpu.stacks import training
from bench.gpu.stacks.__main__ import COLUMNS
from bench.gpu.stacks.widths import WIDTHS
from bench.report import gpu_stacks


@pytest.mark.slow
def test_every_stack_trains_and_its_experts_agree_with_ours(tmp_path):
    done = forked.run("-m", "bench.gpu", "stacks", "--rehearse", "--jobs", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log.txt").read_text()
    steps = jobs.stacks("cpu")
    assert f"{len(steps)} of {len(steps)} steps ok" in done.stdout
    with (tmp_path / "stacks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    key = itemgetter("stack", "model", "mode")
    trainings = {training: list(of) for training, of in groupby(sorted(rows, key=key), key)}
    assert len(trainings) == len(steps)
    for (stack, _, mode), of in trainings.items():
        assert sum(row["experts"].startswith("fusedmlp") for row in of) == len(of) - 1 == 1 + (stack == "ddp")
        for row in of:
            assert row["agrees"] == "True"
            assert float(row["ms"]) > 0
            assert bool(row["experts_ms"]) == (mode == "eager")
            assert float(row["experts_ms"] or 1) > 0
            assert row["version"]
    assert "not measured yet" not in str(gpu_stacks.lines(rows))


class Experts(nn.Module):
    """Two experts of one product each, with their weights as one parameter or as two."""

    def __init__(self, apart):
        super().__init__()
        weights = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
        self.weights = nn.ParameterList([*weights]) if apart else nn.ParameterList([weights])

    def forward(self, x):
        return torch.stack([weight for each in self.weights for weight in each.view(-1, 16, 16)]) @ x


def _training(change=lambda grad: grad, apart=False, name="grad"):
    """A training whose gradients are changed."""
    experts = Experts(apart)

    def step(text, update):
        x = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = experts(x).square().sum()
        loss.backward()
        for parameter in experts.parameters():
            grad, parameter.grad = change(parameter.grad), None
            setattr(parameter, name, grad)
        return float(loss.detach())

    return training.Training(step, [experts])


def _measured(*args, **options):
    return training.run(lambda: _training(*args, **options), WIDTHS["mixtral"].tiny, "cpu", compiled=False)


def test_gradients_are_compared_wherever_a_stack_keeps_them():
    own = _measured()
    assert own.experts_ms > 0
    assert len(own.losses) == training.REHEARSED
    assert not training.differ(own, _measured(apart=True))
    assert not training.differ(own, _measured(name="main_grad"))
    assert not training.differ(own, _measured(lambda grad: grad * 1.01))


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        torch.neg,
        lambda grad: 2 * grad,
        lambda grad: grad.flip(0),
        lambda grad: grad.mT.contiguous(),
        lambda grad: torch.full_like(grad, torch.nan),
    ],
    ids=("lost", "negated", "twice", "experts swapped", "transposed", "nan"),
)
def test_a_wrong_gradient_differs(change):
    assert "layer 0: expected Gradient(norm=" in training.differ(_measured(), _measured(change))


def test_the_page_names_what_is_not_measured_and_what_differs(tmp_path):
    header, _, *lines = gpu_stacks.gpu_stacks(tmp_path).splitlines()
    assert header.count("|") == len(gpu_stacks.HEADER) + 1
    assert len(lines) == len(jobs.stacks("cuda"))
    assert all("not measured yet" in line for line in lines)
    step = {"stack": "ddp", "model": "qwen3-30b", "mode": "eager", "experts": "fusedmlp", "tokens": "16384"}
    times = {"ms": "100", "experts_ms": "25", "mib": "2048", "first_loss": "5.5", "last_loss": "4.5", "agrees": "False"}
    with (tmp_path / "h200_stacks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="x")
        writer.writeheader()
        writer.writerow(step | times)
    line = "| ddp, qwen3-30b, eager | fusedmlp | 100.0 | 25% | 163,840 | 2.0 | 5.5 to 4.5 | **differ** |"
    assert line in gpu_stacks.gpu_stacks(tmp_path).splitlines()


def test_nothing_agrees_with_experts_that_failed(tmp_path, monkeypatch, capsys):
    def fails():
        raise RuntimeError("no memory")

    stack = SimpleNamespace(variants=lambda *_: {"own": fails, "fusedmlp": lambda: _training(torch.neg)})
    monkeypatch.setattr(command, "import_module", lambda _: stack)
    monkeypatch.setenv("BENCH_GPU_OUT", str(tmp_path))
    (tmp_path / "machine.json").write_text("{}")
    assert command.main(["ddp", "qwen3-30b", "--device", "cpu"]) == 1
    assert "FAIL own: RuntimeError: no memory" in capsys.readouterr().out
    with (tmp_path / "stacks.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["experts"], row["agrees"]) == ("fusedmlp", "")
    assert "| not compared |" in gpu_stacks.table(gpu_stacks.HEADER, gpu_stacks.lines([row | {"mib": "1"}]))


def test_packages_are_packed_as_far_as_they_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packages, "STACKS", ("tyro", "numpy", "no-such-package"))
    packages.copy_stacks(tmp_path / "site", 4)
    words = capsys.readouterr().out.splitlines()
    assert words[0].startswith("stacks: copied tyro, ")
    assert "docstring-parser" in words[0]
    assert words[1].startswith("stacks: left out numpy, ")
    assert words[2] == "stacks: left out no-such-package, which is not installed"
    assert (tmp_path / "site" / "tyro" / "__init__.py").exists()
    assert not (tmp_path / "site" / "numpy").exists()
    assert not list((tmp_path / "site").rglob("__pycache__"))
