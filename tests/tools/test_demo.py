import copy
import errno
import json
import re
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import forked

from fusedmlp import __main__ as cli
from fusedmlp import command_line
from fusedmlp.demo import command
from fusedmlp.demo.command import Trainer, problems, table, train
from fusedmlp.demo.count import count_step
from fusedmlp.demo.model import ModelConfig
from fusedmlp.recipe import BLOCKS

# The smallest features of mxfp8, and 64 rows an expert, the fewest of an 8-bit recipe.
SMALL = 0, "cpu", ModelConfig(hidden=32, ffn=32, experts=4, context=16)
STEPS, EXPERT_WEIGHTS = 4, 4  # two layers, fc1 and fc2 each
FC1_BYTES, FC2_BYTES = 4 * 4 * 64 * 32, 4 * 4 * 32 * 32
ALL_BYTES = 2 * (FC1_BYTES + FC2_BYTES)


@pytest.fixture(scope="session")
def runs():
    return {column: train(column, STEPS, *SMALL) for column in ("plain", "fused", "bf16", "mxfp8")}


def test_no_other_parameter_has_the_shape_of_an_expert_weight():
    trainer = Trainer("plain", STEPS, *SMALL)
    experts, shapes = {*map(id, trainer.weights)}, {p.shape for p in trainer.weights}
    assert len(experts) == EXPERT_WEIGHTS
    assert not [n for n, p in trainer.model.named_parameters() if id(p) not in experts and p.shape in shapes]


def test_plain_autograd_adds_once_per_expert_weight_and_fusedmlp_never(runs):
    counts = {column: [*run["step"].values()][:2] for column, run in runs.items()}
    assert counts == {"plain": [0, EXPERT_WEIGHTS], "fused": [0, 0], "bf16": [0, 0], "mxfp8": [0, 0]}


def test_copies_are_counted():
    trainer = Trainer("plain", STEPS, *SMALL)
    for weight in trainer.weights:  # autograd copies a gradient whose strides are not the weight's
        weight.register_hook(lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2))
    assert count_step(trainer.step, trainer.weights).copies == EXPERT_WEIGHTS


def test_peak_memory_is_the_gradients_plus_what_the_second_micro_batch_of_a_layer_needs(runs):
    peaks = [run["step"]["peak_bytes"] for run in runs.values()]
    assert peaks == [ALL_BYTES + FC1_BYTES + FC2_BYTES, ALL_BYTES, None, None]


def test_losses_agree_and_fall(runs):
    assert problems(runs) == []
    assert runs["fused"]["losses"][0] == runs["plain"]["losses"][0]
    learned = train("fused", 40, *SMALL)
    assert learned["final_loss"] < learned["losses"][0] - 0.5
    assert runs["bf16"]["losses"][0] != runs["mxfp8"]["losses"][0]


def test_the_first_micro_batch_overwrites_what_the_last_step_left():
    losses = []
    for stale in (0.0, 1e3):
        trainer = Trainer("fused", STEPS, *SMALL)
        trainer.buffer.flat.fill_(stale)
        trainer.buffer.zero_grad()
        losses.append([trainer.step() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_lost_micro_batch_does_not_agree(runs):
    trainer = Trainer("fused", STEPS, *SMALL)
    forward = trainer.model.forward
    trainer.model.forward = lambda batch: (trainer.buffer.zero_grad(), forward(batch))[1]
    lost = runs["fused"] | {"losses": [trainer.step() for _ in range(STEPS)]}
    assert problems({"plain": runs["plain"], "fused": lost}) == [
        "The losses of fused DO NOT AGREE with those of plain."
    ]


def test_a_log_gets_lines_and_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "PROGRESS_SECONDS", 0.01)
    train("plain", STEPS, *SMALL)
    logged = capsys.readouterr().err
    assert re.search(r"^plain     step [0-4] of 4, loss (nan|\d\.\d{3})$", logged, re.MULTILINE)
    assert "\r" not in logged
    assert "%" not in logged


def test_a_full_disk_costs_neither_the_table_nor_older_files(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "loss.png").write_text("older")
    monkeypatch.setattr(command, "train", lambda column, *_: runs[column])
    monkeypatch.setattr(Path, "write_bytes", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        cli.main(["demo", "--out", str(tmp_path)])
    assert "All losses agree." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert (tmp_path / "loss.png").read_text() == "older"


def test_an_interrupt_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", mock.Mock(side_effect=KeyboardInterrupt))
    with suppress(KeyboardInterrupt):
        cli.main(["demo", "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def _set(column, key, value):
    def change(runs):
        found = copy.deepcopy(runs)
        found[column]["step" if key in ("copies", "adds") else "losses"][key] = value
        return found

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda runs: runs, None),
        (_set("fused", 1, 6.0), "fused DO NOT AGREE"),
        (_set("fused", 2, float("nan")), "fused DO NOT AGREE"),
        (_set("mxfp8", 3, 6.1), "mxfp8 DO NOT AGREE"),
        (lambda runs: runs | {"mxfp8": runs["fused"]}, "The experts DID NOT COMPUTE in mxfp8"),
        (_set("fused", "adds", 1), "copied or added gradients of expert weights in fused"),
        (_set("bf16", "copies", 1), "copied or added gradients of expert weights in bf16"),
    ],
)
def test_exit_status_and_files(runs, change, says, tmp_path, monkeypatch, capsys):
    changed = change(runs)
    monkeypatch.setattr(command, "train", lambda column, *_: changed[column])
    folder = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--recipe", "mxfp8", "--out", str(folder)]) == (says is not None)
    shown = capsys.readouterr().out
    assert (says or "All losses agree.") in shown
    assert table(changed) in shown
    assert re.search(rf"^fused .* {ALL_BYTES:,} +0 +\d\n", shown, re.MULTILINE)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "results.json").read_text())
    assert list(document["columns"]) == ["plain", "fused", "bf16", "mxfp8"]
    assert bool(document["problems"]) == (says is not None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--device", "cuda:99"], "cuda|CUDA"), (["--device", "gpu"], "gpu"), (["--out", "file/new"], "file")],
)
def test_what_cannot_work_is_refused_before_training(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(["demo", *arguments]) == 2
    assert re.match(f"demo: .*({says})", capsys.readouterr().err)


def test_eight_bits_run_on_the_cpu_if_nothing_else_is_asked_for(monkeypatch, runs, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)  # the demo's check of the device
    asked = []
    monkeypatch.setattr(command, "train", lambda column, *rest: (asked.append((column, rest[2])), runs[column])[1])
    for arguments in (["--recipe", "mxfp8"], ["--recipe", "mxfp8", "--device", "cuda"], []):
        assert cli.main(["demo", *arguments, "--out", str(tmp_path)]) == 0
    assert [device for column, device in asked if column == "fused"] == ["cpu", "cuda", "cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BLOCKS)
def test_both_recipes_fit_the_demo(recipe):
    """Sizes and rows an expert of the demo's own settings."""
    losses = [Trainer(column, 1, 0, "cpu", ModelConfig()).step() for column in ("bf16", recipe)]
    assert losses[0] != losses[1]


@pytest.mark.exhaustive
def test_command_line(tmp_path):
    done = forked.run("-m", "fusedmlp", "demo", "--steps", "1", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--steps", "0"], ["demo", "--recipe", "fp16"]])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
