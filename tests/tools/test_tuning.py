"""The tuner, on the interpreter and with an invented clock: what it keeps, and what it refuses."""

import json

import pytest
import torch

import fusedmlp
from fusedmlp import __main__ as cli
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import select, table, tuned
from fusedmlp.kernels.tiles.table import Key
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments
from fusedmlp.tuning import command, tuner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the clock is invented")
PROBLEM = tuner.Problem(3, 32, 32, 64, torch.float32, torch.device("cpu"))
KERNELS = ("gemm", "fc1_act", "dgrad_act", "wgrad")


@pytest.fixture(autouse=True)
def untuned(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    monkeypatch.setattr(tuner, "_CHOICES", {"BLOCK_M": (16, 32), "BLOCK_K": (16, 32), "num_warps": (1, 2, 4)})


def clock(run):
    """The more warps and the larger BLOCK_M the faster, whatever runs; small BLOCK_K costs nothing: noise."""
    run()
    (settings,) = run.args
    tile = list(settings.tuned.values())[-1]
    return 10.0 / (tile.num_warps + tile.BLOCK_M / 16)


@pytest.mark.slow
def test_finds_the_fastest_tile_of_every_kernel():
    found = [step for step in tuner.tune(PROBLEM, clock) if isinstance(step, tuner.Found)]
    assert [f.key.kernel for f in found] == list(KERNELS)
    for f in found:
        assert (f.tile.num_warps, f.tile.BLOCK_M) == (4, 32)
        assert f.tile.BLOCK_K == f.shipped.BLOCK_K
        assert (f.shipped_ms, f.ms) == (5.0, 10 / 6)


def test_tiles_that_fail_or_compute_something_else_are_not_taken(monkeypatch):
    def run(settings):
        tile = settings.tuned[key]
        if tile.num_warps == 2:
            raise RuntimeError("does not fit")
        return [torch.full((2,), 1.0 if tile.BLOCK_M == 16 else 1.1)]

    key = Key("gemm", "pointer", "fp32", "short")
    monkeypatch.setattr(tuner, "_scratch_calls", lambda _: iter([tuner._Scratch("gemm", run)]))
    monkeypatch.setattr(tuner, "_key", lambda *_: key)
    *trials, found = tuner.tune(PROBLEM, clock)
    notes = {(t.tile.num_warps, t.tile.BLOCK_M): t.note for t in trials}
    assert notes[2, 16] == "RuntimeError"
    assert notes[1, 32] == "other results than the shipped tile's"
    assert found.tile == found.shipped


def test_an_accumulating_kernel_is_compared_from_the_same_start():
    (wgrad,) = [s for s in tuner._scratch_calls(PROBLEM) if s.kernel == "wgrad"]
    first = wgrad.results(select.DEFAULT)
    wgrad.run(select.DEFAULT)
    assert all(torch.equal(a, b) for a, b in zip(wgrad.results(select.DEFAULT), first, strict=True))
    assert first[0].any()


@pytest.mark.slow
def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tuner, "_gpu_timer", clock)
    sizes = ["--experts", "3", "--hidden", "32", "--ffn", "32", "--rows", "64", "--dtype", "float32"]
    assert cli.main(["tune", *sizes]) == 2
    assert "expected a GPU" in capsys.readouterr().err
    assert cli.main(["tune", *sizes, "--device", "cpu", "--json"]) == 0
    out = capsys.readouterr()
    rows = json.loads(out.out)
    assert [row["key"]["kernel"] for row in rows] == list(KERNELS)
    kept = tuned.read(tuned.tiles_file(tmp_path, PROBLEM.device))
    assert [(key._asdict(), tile._asdict()) for key, tile in kept.items()] == [(r["key"], r["tile"]) for r in rows]
    assert "wgrad: 5.0000 -> 1.6667 ms" in out.err
    assert cli.main(["tune", *sizes, "--device", "cpu"]) == 0
    assert "use it with FUSEDMLP_TUNED=1" in capsys.readouterr().out


def test_a_file_of_another_version_is_refused_before_the_search(monkeypatch, tmp_path):
    path = tuned.tiles_file(tmp_path, PROBLEM.device)
    path.write_text('[{"key": {"kernel": "gemm", "path": "tma", "bits": 16, "shape": "long"}, "tile": {}}]')
    monkeypatch.setattr(command, "tune", lambda _: pytest.fail("expected no search"))
    with pytest.raises(
        ValueError, match=r"as the tuner of this version writes them \(delete the file, then tune again\)"
    ):
        command.run(PROBLEM, as_json=False)


@pytest.mark.parametrize(("hidden", "path"), [(32, "tma"), (36, "tma"), (33, "unaligned")])
def test_the_path_that_is_tuned_is_the_one_that_is_launched(hidden, path):
    problem = tuner.Problem(3, hidden, 32, 64, torch.float32, torch.device("cpu"))
    for scratch in tuner._scratch_calls(problem):
        with recording() as log:
            scratch.run(select.DEFAULT)
        taken = {launch.path for launch in log if launch.chosen and launch.chosen.key.kernel == scratch.kernel}
        assert taken == {tuner._key(scratch.kernel, problem).path} == {path}


def test_passes_with_a_tuned_number_of_rows_share_one_plan():
    """The number is in no table, so a plan has no table of tiles for it."""
    key = Key("gemm", "tma", "fp32", "short")
    tile = select.target(PROBLEM.device, select.DEFAULT, torch.float32).tiles[key]._replace(BLOCK_M=64)
    tuned = {key._replace(kernel=kernel): tile for kernel in ("fc1_act", "gemm")}
    planned_for = select.target(PROBLEM.device, select.Settings(tuned=tuned), torch.float32)
    given = MLPArguments(
        x=torch.empty(8, 32),
        x_scales=None,
        fc1=[torch.empty(3, 32, 32)],
        fc2=[torch.empty(3, 32, 32)],
        bias1=[],
        bias2=[],
        offsets=torch.empty(500).int(),
        row_ids=None,
        probs=None,
        activation=fusedmlp.Activation("relu").encoded,
        recipe="",
        impl="triton",
    )
    launches = triton_impl.grouped_mlp.program(planned_for, *given.without_impl).launches
    assert [launch.name for launch in launches] == ["plan", "grouped_fc1_act", "grouped_gemm"]
    assert {launch.chosen.tile.BLOCK_M for launch in launches if launch.chosen} == {64}


# A warp-specialized kernel: its ms, and the error of its results.
WARP_SPECIALIZED = {"faster": (4.0, 0.0), "slower": (5.0, 0.0), "wrong": (1.0, 0.1)}


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("what", WARP_SPECIALIZED)
def test_a_warp_specialized_kernel_is_found_if_it_is_faster_and_right(monkeypatch, what, consumers):
    ms, error = WARP_SPECIALIZED[what]
    key = Key("gemm", "tma", "bf16", "long")
    warp_specialized = key._replace(path="warp_specialized")
    tiles = {key: table.Tile(16, 32, 32, 1, 1), warp_specialized: table.Tile(128, 256, 64, 4, 3)}
    architecture = "sm_90" if consumers == 2 else "sm_100"
    off = select.Settings(warp_specialized=False)
    monkeypatch.setattr(select, "target", lambda *_: select.Target(architecture, 3, tiles, off))
    monkeypatch.setattr(tuner, "_warp_specialized", lambda *_: warp_specialized)

    def used(settings):
        planned_for = select.Target(architecture, 3, tiles, settings)
        chosen = select.choose("gemm", torch.bfloat16, planned_for, True, True, 64)
        return chosen if chosen.path == "warp_specialized" else None

    def run(settings):
        return [torch.full((2,), 1.0 + (error if used(settings) else 0))]

    monkeypatch.setattr(tuner, "_CHOICES", {})
    monkeypatch.setattr(tuner, "_scratch_calls", lambda _: iter([tuner._Scratch("gemm", run)]))
    monkeypatch.setattr(tuner, "_key", lambda *_: key)

    def clock(run):
        run()
        chosen = used(*run.args)
        return ms + abs(chosen.tile.num_stages - 2) / 10 if chosen else 4.5

    steps = list(tuner.tune(PROBLEM, clock))
    found = [step for step in steps if isinstance(step, tuner.Found)]
    assert [f.key for f in found] == [key, warp_specialized] if what == "faster" else [key]
    if what == "faster":
        assert (found[1].tile.num_stages, found[1].shipped.num_stages) == (2, 3)
        assert (found[1].shipped_ms, found[1].ms) == (4.1, 4.0)
    if what == "wrong":
        assert steps[-1].note == "other results than the kernel that is not warp-specialized"
    else:  # two consumers are four warps each
        assert {step.tile.num_warps for step in steps if step.key == warp_specialized} == (
            {4, 8} if consumers == 1 else {4}
        )


def test_keys_of_warp_specialized_kernels():
    """The ring that a plan chooses for the problem."""
    target = select.Target("sm_90", 3, table.TABLES["sm_90"])

    def regimes(rows, hidden, ffn):
        problem = tuner.Problem(8, hidden, ffn, 8 * rows, torch.bfloat16, PROBLEM.device)
        keys = [tuner._warp_specialized(kernel, problem, target) for kernel in table.PASSES]
        return [key and key.regime for key in keys]

    assert regimes(64, 2048, 768) == ["any", "small", "small", "memory_add"]
    assert regimes(1024, 4096, 1024) == ["any", "any", "any", "mma_add"]
    assert regimes(63, 4096, 1024) == [None] * 4


def test_the_tuner_reaches_every_ring_of_wgrad_on_hopper():
    """From each shipped tile in steps of one number, whether they fit or not."""
    tiles = {tile for key, tile in table.TABLES["sm_90"].items() if key[:3] == ("wgrad", "warp_specialized", "bf16")}
    choices = tuner._WARP_SPECIALIZED_CHOICES | tuner._DEPTHS["wgrad"]
    for start in tiles:
        reached, new = {start}, {start}
        while new:
            new = {tile for each in new for tile in tuner._neighbours(each, choices)} - reached
            reached |= new
        assert tiles <= reached
