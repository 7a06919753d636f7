"""The comparisons and their report, on one tiny layer; and that a peer with wrong numbers is not timed."""

import os
import re
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch
from support import forked

from bench.cpu import checks, layers, passes, peers, recording
from bench.cpu.layers import TINY, Layer
from bench.report import command, page, results
from fusedmlp.kernels.tiles import table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder that the command writes, named as seen from another one than the clone's."""
    folder = tmp_path_factory.mktemp("report")
    # Without the variables of pytest-xdist, by which pytest-benchmark would think that it runs in a worker.
    told = {name: "" for name in os.environ if name.startswith("PYTEST_XDIST")}
    done = forked.run("-m", "fusedmlp", "bench", "--report", "out", "--tiny", cwd=folder, **told)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^layer (.*): (.) left, about . minutes$", done.stderr, re.MULTILINE) == [
        ("tiny, quarter empty, float32", "2"),
        ("tiny, quarter empty, bfloat16", "1"),
    ]
    assert {path.name for path in (folder / "out").iterdir()} == {"index.html", "results.csv"}
    return folder / "out"


def test_an_interrupted_run_leaves_no_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(command.facts, "commit", lambda root: "0123abc")
    monkeypatch.setattr(command.subprocess, "run", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        command.run(tmp_path / "out", None, tiny=True, as_json=False)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_is_resumed(tmp_path, monkeypatch, capsys):
    names, ran, saved = list(layers.cases("cpu", tiny=True)), [], []

    def measure(command, **_):
        options = dict(option.removeprefix("--").split("=", 1) for option in command if "=" in option)
        ran.append(options["layer"])
        if len(ran) == 2:
            raise KeyboardInterrupt
        Path(options["benchmark-json"]).write_text(options["layer"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(command.facts, "commit", lambda root: "0123abc")
    monkeypatch.setattr(command.subprocess, "run", measure)
    monkeypatch.setattr(results, "load", lambda folder: sorted(file.stem for file in folder.glob("*.json")))
    monkeypatch.setattr(results, "save", lambda found, _: saved.append(found))
    with pytest.raises(KeyboardInterrupt):
        command.run(tmp_path, None, tiny=True, as_json=False)
    assert saved == [names[:1]]
    parts = tmp_path / "layers-0123abc"
    assert command._measure(parts, tmp_path / "results.csv", tiny=True)
    assert ran == [names[0], names[1], names[1]]
    assert saved[1:] == [sorted(names)]
    assert f"1 of 2 layers are in {parts}, from an interrupted run" in capsys.readouterr().err


@pytest.mark.parametrize("commit", ["4567def", "0123abc-dirty", None])
def test_layers_of_other_code_are_measured_anew(commit, tmp_path, monkeypatch):
    """Neither of another commit nor of a tree with changes, of which two may differ."""
    for name in ("0123abc", "0123abc-dirty", "unknown"):
        for layer in layers.cases("cpu", tiny=True):
            file = tmp_path / f"layers-{name}" / f"{layer}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text("old")
    ran = []
    monkeypatch.setattr(command.facts, "commit", lambda root: commit)
    monkeypatch.setattr(
        command.subprocess,
        "run",
        lambda arguments, **_: (ran.append(arguments), subprocess.CompletedProcess(arguments, 1))[1],
    )
    assert command.run(tmp_path, None, tiny=True, as_json=False) == 1
    assert len(ran) == 1


@pytest.mark.slow
def test_one_command_makes_the_page(report):
    html = (report / "index.html").read_text(encoding="utf-8")
    assert html.count("<svg") == 3
    for name in ("grouped_mm", "loop over experts", "Transformers eager", "fusedmlp moe_experts"):
        assert name in html
    assert "transformer_engine is not installed" in html
    assert ">nan<" not in html  # neither where fusedmlp has no time of its own


@pytest.mark.slow
def test_every_row_was_checked_and_has_its_figures(report):
    found = results.load(report / "results.csv")
    table = found.table
    assert found.about["device"] == "cpu"
    assert set(found.missing.who) == {"TransformerEngine", "Liger", "SonicMoE", "QuACK"} | {
        f"fusedmlp, {what}" for what in ("fc1_act", "dgrad_act")
    }
    assert table.groupby("what").who.count().to_dict() == {
        **{
            f"{what}, {level}": 2 * 3
            for what in ("forward", "backward")
            for level in ("sorted rows", "whole layer of tokens")
        },
        "gemm of fc2": 2 * 3,
        "wgrad of fc1": 2 * 4,
        **dict.fromkeys(("fc1_act", "dgrad_act"), 2 * 2),  # on a CPU, two peers have times
    }
    assert (table.ms > 0).all()
    assert (table.error <= table.allowed).all()
    assert (table[table.who == "fusedmlp"].speedup == 1).all()
    slower = table[(table.who == "grouped_mm") & (table.what == "gemm of fc2")].iloc[0]
    ours = table[(table.what == slower.what) & (table.dtype == slower["dtype"]) & (table.who == "fusedmlp")].iloc[0]
    assert slower.speedup == pytest.approx(slower.ms / ours.ms)
    assert table.of_limit.notna().all()


@pytest.mark.slow
def test_backward_allocates_no_weight_gradient(report):
    table = results.load(report / "results.csv").table
    backward = table[(table.what == "backward, sorted rows") & (table.dtype == "float32")].set_index("who")
    assert backward.largest_bytes["grouped_mm"] >= 4 * TINY[0].E * 2 * TINY[0].F * TINY[0].H
    assert backward.peak_bytes["fusedmlp"] < backward.peak_bytes["grouped_mm"]


@pytest.mark.slow
def test_a_saved_table_gives_the_same_page(report, tmp_path):
    found = results.load(report / "results.csv")
    results.save(found, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (report / "results.csv").read_text()
    assert page.render(found) == (report / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_turns_are_compared_one_by_one(report):
    """A machine that is slow in one turn is slow for all peers."""
    table = results.load(report / "results.csv").table
    turns = [table.assign(turn=turn, ms=table.ms * slow) for turn, slow in enumerate((1, 5, 2))]
    shuffled = pd.concat(turns).sample(frac=1, random_state=0).drop(columns="speedup")
    together = results.over_turns(results.with_speedups(shuffled))
    keys = [*results.LAYER, "what", "who"]
    together, table = (t.set_index(keys).sort_index() for t in (together, table))
    pd.testing.assert_series_equal(together.speedup, table.speedup)
    pd.testing.assert_series_equal(together.ms, 2 * table.ms)
    assert (together.rounds == 3 * table.rounds).all()


@pytest.fixture(scope="module")
def layer():
    return Layer(TINY[0], "quarter empty", torch.float32, "cpu")


def _checked(layer, peer):
    layer.zero()  # now: peers that run before fusedmlp add to it themselves
    for _ in range(2):
        layer.reset()
        y = peer.forward(layer)
        peer.backward(layer, y)
    return checks.check(layer, peer.level, y, peer.name, times=2)


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_peers_are_right(peer, layer, monkeypatch):
    """Also peers for GPUs, where they are installed and the interpreter runs them."""
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    if peer.missing("cuda"):
        assert "is not installed" in peer.missing("cuda")
    else:
        assert max(_checked(layer, peer).relative().values()) < 1e-5


class _Overwriting(peers.Peer):
    def backward(self, layer, y):
        y.backward(layer.dy_RH)
        for weight in layer.weights:
            weight.main_grad.copy_(weight.grad)
            weight.grad = None


def test_peers_with_wrong_numbers_are_found(layer):
    grouped_mm = next(peer for peer in peers.PEERS if peer.name == "grouped_mm")
    scaled = replace(grouped_mm, forward=lambda layer: 1.001 * grouped_mm.forward(layer))
    with pytest.raises(AssertionError, match="grouped_mm on tiny, quarter empty, float32: dfc1: error"):
        _checked(layer, scaled)
    with pytest.raises(AssertionError, match="dfc1"):
        _checked(layer, _Overwriting("overwriting", "rows", grouped_mm.forward))


PASSES = [import_module(f"bench.cpu.bench_{name}").PASS for name in table.PASSES]
WAYS = [pytest.param(one, way, id=f"{one.what}-{way.name}") for one in PASSES for way in one.ways]


@pytest.mark.parametrize(("one", "way"), WAYS)
def test_ways_to_run_a_pass_are_right(one, way, layer):
    """Our kernels, too, which are interpreted here."""
    if why := way.missing("cpu"):
        assert "is not installed" in why
    else:
        assert max(passes.check(one, layer, way).relative().values()) < 1e-5


@pytest.mark.parametrize("one", PASSES, ids=lambda one: one.what)
def test_a_way_with_wrong_numbers_is_found(one, layer):
    way = one.ways[0]
    for name in passes.check(one, layer, way).found:

        def results(*args, name=name):
            right = one.results(*args)
            return right | {name: 1.001 * right[name]}

        with pytest.raises(AssertionError, match=f"fusedmlp on tiny, quarter empty, float32: {name}: error"):
            passes.check(one._replace(results=results), layer, way)


def test_a_wgrad_that_overwrites_where_it_should_add_is_found(layer):
    wgrad = PASSES[-1]
    (way,) = (way for way in wgrad.ways if way.overwrites)
    with pytest.raises(AssertionError, match="dfc1"):
        passes.check(wgrad, layer, way._replace(overwrites=False))


def test_not_a_number_is_an_error(layer):
    nan = replace(peers.FUSED_ROWS, forward=lambda layer: peers.FUSED_ROWS.forward(layer) * float("nan"))
    with pytest.raises(AssertionError, match="inf"):
        _checked(layer, nan)


def test_saved_bytes_and_allocations_are_counted():
    x = torch.randn(1000, requires_grad=True)
    assert recording.saved_bytes(lambda: (2 * x).exp().sum(), (x,)) == 4000  # the result of exp
    used = recording.footprint(lambda: torch.ones(500) + torch.ones(250).sum())
    assert used.largest_bytes == 2000
    assert 4000 <= used.peak_bytes <= 6100
    assert used.ops > 3
