import dataclasses
import errno
import json
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import forked

from fusedmlp import __main__ as cli
from fusedmlp import progress
from fusedmlp.demo import compare, report
from fusedmlp.demo.count import count_step
from fusedmlp.demo.model import ModelConfig
from fusedmlp.demo.train import MICRO_BATCHES, Settings, Trainer, text, train
from fusedmlp.operators import torch_products, torch_quantize
from fusedmlp.recipe import BLOCKS

TINY = Settings(steps=4, micro_batch=2, model=ModelConfig(hidden=32, ffn=48, experts=4, context=16))
# The smallest features of mxfp8, and 64 rows an expert, the fewest of an 8-bit recipe.
SMALL = Settings(steps=3, micro_batch=8, model=ModelConfig(hidden=32, ffn=32, experts=4, context=16))
EXPERT_WEIGHTS = 4  # two layers, fc1 and fc2 each
FC1_BYTES, FC2_BYTES = 4 * 4 * 96 * 32, 4 * 4 * 32 * 48
ALL_BYTES = 2 * (FC1_BYTES + FC2_BYTES)


@pytest.fixture(scope="module")
def results():
    return compare.compare(TINY)


def test_the_text_is_the_language_reference():
    train, held_out = text()
    assert len(train) > 400_000
    assert len(held_out) == pytest.approx(len(train) / 9, abs=9)
    assert b'The "assert" statement' in bytes(train.tolist()) + bytes(held_out.tolist())


def test_no_other_parameter_has_the_shape_of_an_expert_weight():
    model = Trainer(TINY, "plain").model
    experts = {id(p) for p in model.expert_weights()}
    assert len(experts) == EXPERT_WEIGHTS
    shapes = {p.shape for p in model.expert_weights()}
    assert not [name for name, p in model.named_parameters() if id(p) not in experts and p.shape in shapes]


def test_plain_autograd_adds_once_per_expert_weight_and_fusedmlp_never(results):
    assert (results.plain.step.copies, results.plain.step.adds) == (0, EXPERT_WEIGHTS)
    assert (results.fused.step.copies, results.fused.step.adds) == (0, 0)


def test_copies_are_counted():
    trainer = Trainer(TINY, "plain")
    for weight in trainer.model.expert_weights():  # autograd copies a gradient whose strides are not the weight's
        weight.register_hook(lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2))
    assert count_step(trainer).copies == EXPERT_WEIGHTS


def test_peak_memory_is_the_gradients_plus_what_the_second_micro_batch_of_a_layer_needs(results):
    assert results.fused.step.peak_bytes == ALL_BYTES
    assert results.plain.step.peak_bytes == ALL_BYTES + FC1_BYTES + FC2_BYTES


@pytest.mark.slow
def test_activations_as_large_as_a_weight_are_no_weight_gradients():
    """Rows of uneven loads, whose products have a weight among their inputs."""
    rows = TINY.model.experts * TINY.model.hidden
    settings = dataclasses.replace(TINY, micro_batch=rows // (TINY.model.experts_per_token * TINY.model.context))
    assert compare.compare(settings).fused.step.peak_bytes == ALL_BYTES


def test_the_first_micro_batch_overwrites_what_the_last_step_left():
    losses = []
    for stale in (0.0, 1e3):
        trainer = Trainer(TINY, "fused")
        trainer.buffer.flat.fill_(stale)
        trainer.buffer.zero_grad()
        losses.append([float(trainer.step()) for _ in range(3)])
    assert losses[0] == losses[1]


def test_the_curves_agree_and_the_loss_falls(results):
    assert results.agreement.agree
    assert results.agreement.difference[0] == 0  # the same weights and bytes
    assert results.agreement.bound[2] < 1e-5
    assert results.losses["fused"][-1] < results.losses["fused"][0] - 0.01
    assert results.passed


def test_a_log_gets_lines_and_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    train(Trainer(TINY, "plain"))
    logged = capsys.readouterr().err
    assert re.search(r"^plain    step [0-4] of 4, loss (nan|\d\.\d{3})$", logged, re.MULTILINE)
    assert "\r" not in logged
    assert "%" not in logged


def test_a_lost_micro_batch_does_not_agree(results):
    trainer = Trainer(TINY, "fused")
    forward = trainer.model.forward
    trainer.model.forward = lambda batch: (trainer.buffer.zero_grad(), forward(batch))[1]
    losses = [float(trainer.step()) for _ in range(TINY.steps)]
    curves = compare.agreement(results.losses["plain"], losses, results.losses["control"])
    assert not curves.agree
    assert curves.difference[1] > curves.bound[1]


def test_the_control_run_flips_the_closest_decision_of_a_layer():
    model = Trainer(TINY, "control").model
    moe = model.blocks[0].moe
    router = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.4, 0.26, 0.25, 0.09], [0.1, 0.2, 0.3, 0.4]])
    probs, experts = moe._choose(router)
    assert experts.tolist() == [[0, 1], [0, 2], [3, 2]]
    assert probs.tolist() == router.gather(1, experts).tolist()
    assert all(block.moe.flip_closest for block in model.blocks)
    assert Trainer(TINY, "plain").model.blocks[0].moe._choose(router)[1].tolist() == [[0, 1], [0, 1], [3, 2]]


def test_the_bound_follows_the_control_run_and_refuses_nan():
    plain, control = [1.0] * 6, [1.0, 1.001, 1.0, 1.0, 1.01, 1.0]
    curves = compare.agreement(plain, plain, control)
    assert curves.bound == pytest.approx([4 * 2**-23] * 3 + [4e-2] * 3)
    assert compare.agreement(plain, [1.0, 1.0, 1.0, 1.039, 0.961, 1.0], control).agree
    assert not compare.agreement(plain, [1.0, 1.0, 1.000001, 1.0, 1.0, 1.0], control).agree
    assert not compare.agreement(plain, [1.0] * 5 + [1.041], control).agree
    nan = compare.agreement(plain, [1.0, float("nan"), 1.041, *plain[3:]], control)
    assert not nan.agree
    assert nan.worst_step == 1


def test_table_and_json_say_what_was_measured(results):
    shown = report.table(results)
    assert re.search(r"plain autograd +fusedmlp\n", shown)
    assert re.search(rf"adds to expert weights per step +{EXPERT_WEIGHTS} +0\n", shown)
    assert re.search(rf"memory, bytes +{ALL_BYTES + FC1_BYTES + FC2_BYTES:,} +{ALL_BYTES:,}\n", shown)
    assert "The loss curves agree to rounding: largest difference" in shown
    document = json.loads(report.as_json(results))
    assert document["losses"]["fused"] == results.losses["fused"]
    assert document["columns"]["plain autograd"]["step"]["adds"] == EXPERT_WEIGHTS
    assert document["curves"]["largest_difference"] == max(results.agreement.difference)


@pytest.fixture(scope="module")
def with_recipe():
    return compare.compare(SMALL, "mxfp8")


@pytest.mark.slow
def test_the_columns_of_a_recipe_compute_in_its_format(with_recipe):
    assert list(with_recipe.recipes) == ["bf16", "mxfp8"]
    for column, other in (("bf16", "fused"), ("mxfp8", "bf16")):
        beside = with_recipe.recipes[column]
        losses, others = (with_recipe.losses[name] for name in (column, other))
        assert beside.other == other
        assert beside.difference == [abs(a - b) / b for a, b in zip(losses, others, strict=True)]
        assert beside.difference[0] > 0
        assert max(beside.difference) < compare.MOST
        assert (beside.measured.step.copies, beside.measured.step.adds) == (0, 0)
    assert with_recipe.recipes["mxfp8"].difference[0] > 4 * with_recipe.recipes["bf16"].difference[0]
    assert with_recipe.passed


def test_experts_of_a_recipe_quantize_every_operand(monkeypatch):
    """Rows along features and along tokens; weights along both of their features, in each micro-batch."""
    blocks, weights = set(), Counter()
    quantize, rounded_weights = torch_quantize.quantize, torch_products.rounded_weights

    def rows(x, recipe, block):
        blocks.add(block)
        return quantize(x, recipe, block)

    def of_weight(w, recipe, transposed):
        weights[w[0].shape, transposed] += 1
        return rounded_weights(w, recipe, transposed)

    monkeypatch.setattr(torch_quantize, "quantize", rows)
    monkeypatch.setattr(torch_products, "rounded_weights", of_weight)
    Trainer(SMALL, "bf16").step()
    assert not blocks
    assert not weights
    trainer = Trainer(SMALL, "mxfp8")
    trainer.step()
    assert blocks == {(1, 32), (32, 1)}
    expected = Counter()
    for weight in trainer.model.expert_weights():
        for transposed in (False, True):
            expected[weight.shape, transposed] += MICRO_BATCHES
    assert weights == expected


@pytest.mark.slow
def test_eight_bits_run_on_the_cpu_if_nothing_else_is_asked_for(monkeypatch, results, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = []
    monkeypatch.setattr(
        compare, "compare", lambda settings, recipe: (asked.append((settings.device, recipe)), results)[1]
    )
    out = ["--out", str(tmp_path / "out")]
    recipe = ["--recipe", "mxfp8"]
    for arguments in (recipe, [*recipe, "--device", "cuda"], []):
        assert cli.main(["demo", *arguments, *out]) == 0
    assert asked == [("cpu", "mxfp8"), ("cuda", "mxfp8"), ("cuda", None)]


def test_a_gpu_without_the_recipe_is_named(monkeypatch, tmp_path, capsys):
    def refuse(*_):
        raise NotImplementedError("recipe='mxfp8': expected a GPU with kernels for it")

    monkeypatch.setattr(compare, "compare", refuse)
    assert cli.main(["demo", "--recipe", "mxfp8", "--out", str(tmp_path / "out")]) == 2
    assert "demo: recipe='mxfp8': expected a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BLOCKS)
def test_both_recipes_fit_the_demo(recipe):
    """Sizes and rows an expert of the demo's own settings."""
    settings = Settings()
    losses = [float(Trainer(settings, column).step()) for column in ("bf16", recipe)]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_too_few_rows_for_eight_bits_are_noticed():
    results = compare.compare(dataclasses.replace(SMALL, micro_batch=7), "mxfp8")
    assert results.recipes["bf16"].passed
    assert not results.passed
    assert "mxfp8 DID NOT COMPUTE" in report.table(results)


@pytest.mark.slow
def test_table_and_json_of_a_recipe(with_recipe, results):
    shown = report.table(with_recipe)
    assert re.search(r"plain autograd +fusedmlp +fusedmlp bf16 +fusedmlp mxfp8\n", shown)
    assert re.search(r"memory, bytes +[\d,]+ +[\d,]+ +not counted +not counted\n", shown)
    assert re.search(r"adds to expert weights per step +4 +0 +0 +0\n", shown)
    beside = with_recipe.recipes["mxfp8"]
    assert (
        f"mxfp8 stays within 5% of bf16: losses differ by {beside.difference[0]:.1e} of their value at step 1" in shown
    )
    document = json.loads(report.as_json(with_recipe))
    assert document["losses"]["mxfp8"] == with_recipe.losses["mxfp8"]
    assert document["columns"]["fusedmlp mxfp8"]["final_loss"] == beside.measured.final_loss
    assert document["recipes"]["mxfp8"] == {"beside": "bf16", "difference": beside.difference, "passed": True}
    without = json.loads(report.as_json(results))
    assert without["recipes"] == {}
    assert list(without["columns"]) == ["plain autograd", "fusedmlp"]
    assert list(without["losses"]) == ["plain", "fused", "control"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([0.0, 0.01, 0.01], "mxfp8 DID NOT COMPUTE in its format"),
        ([0.01, 0.06, 0.01], "mxfp8 DOES NOT STAY within 5% of bf16: .* at most 6.0e-02, at step 2"),
        ([0.01, float("nan"), 0.01], "mxfp8 DOES NOT STAY within 5% of bf16: .* at most nan, at step 2"),
    ],
)
def test_a_recipe_that_fails_is_said(with_recipe, parts, says):
    beside = dataclasses.replace(with_recipe.recipes["mxfp8"], difference=parts)
    changed = dataclasses.replace(with_recipe, recipes=with_recipe.recipes | {"mxfp8": beside})
    assert not changed.passed
    assert re.search(says, report.table(changed))


def disagreeing(results):
    agreement = dataclasses.replace(results.agreement, difference=[1.0] * TINY.steps)
    return dataclasses.replace(results, agreement=agreement)


def adding(results):
    step = dataclasses.replace(results.fused.step, adds=1)
    return dataclasses.replace(results, fused=dataclasses.replace(results.fused, step=step))


def copying(results):
    step = dataclasses.replace(results.fused.step, copies=1)
    return dataclasses.replace(results, fused=dataclasses.replace(results.fused, step=step))


@pytest.mark.parametrize(
    ("change", "status"), [(lambda results: results, 0), (disagreeing, 1), (adding, 1), (copying, 1)]
)
def test_exit_status_and_files(results, change, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "compare", lambda settings, recipe: change(results))
    assert cli.main(["demo", "--out", str(tmp_path / "new" / "folder")]) == status
    shown = capsys.readouterr().out
    assert ("DO NOT AGREE" in shown) == (change is disagreeing)
    written = tmp_path / "new" / "folder"
    assert (written / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((written / "results.json").read_text())["passed"] == (status == 0)


def test_a_full_disk_costs_neither_the_table_nor_older_files(results, tmp_path, monkeypatch, capsys):
    (tmp_path / "loss.png").write_text("older")
    monkeypatch.setattr(compare, "compare", lambda settings, recipe: results)
    monkeypatch.setattr(Path, "write_bytes", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        cli.main(["demo", "--out", str(tmp_path)])
    assert "The loss curves agree" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert (tmp_path / "loss.png").read_text() == "older"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--device", "cuda:99"],
            r"--device: expected a device that torch finds; got cuda:99, and torch finds \d GPUs",
        ),
        (["--device", "gpu"], "--device: expected cpu, or cuda with or without an index; got 'gpu'"),
        (["--out", "file"], "--out: expected a folder; got file, where file is a file"),
        (["--out", "file/new"], "--out: expected a folder; got file/new, where file is a file"),
    ],
)
def test_what_cannot_work_is_refused_before_training(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(["demo", *arguments]) == 2
    assert re.fullmatch(f"demo: {says}\n", capsys.readouterr().err)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [[], ["--recipe", "mxfp8"]])
def test_command_line(recipe, tmp_path):
    done = forked.run("-m", "fusedmlp", "demo", "--steps", "1", "--json", "--out", str(tmp_path), *recipe)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "results.json").read_text())
    assert document["settings"]["steps"] == len(document["losses"]["plain"]) == 1
    assert document["columns"]["fusedmlp"]["step"]["adds"] == 0
    assert list(document["recipes"]) == (["bf16", "mxfp8"] if recipe else [])


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--steps", "0"], ["demo", "--recipe", "fp16"]])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
