"""Costs, limits and schedules against figures worked out by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
from support import forked

from bench.limits import balance, eight_bit, measure, roofline, scope, shapes
from bench.limits.gpus import GPUS, limit_ms
from bench.proof import cases
from fusedmlp.__main__ import main
from fusedmlp.kernels.launching import cost
from fusedmlp.targets import TARGETS

BY_NAME = {shape.name: shape for shape in shapes.SHAPES}
H100 = GPUS[0]


def test_weight_gradients_of_qwen3_take_1_44_ms_on_an_h100():
    shape = BY_NAME["qwen3-30b-8k"]
    passes = roofline.passes(shape, shapes.even(shape))
    grad_bytes = passes["wgrad fc1"].grad_bytes + passes["wgrad fc2"].grad_bytes
    assert grad_bytes == 128 * 3 * 768 * 2048 * 8  # 4.83 GB
    assert limit_ms(0, grad_bytes, H100.bf16_flops, H100.bandwidth) == pytest.approx(1.44, abs=0.005)
    overwritten = passes["wgrad fc1, overwrite"].grad_bytes + passes["wgrad fc2, overwrite"].grad_bytes
    assert overwritten == grad_bytes / 2


def test_costs_of_a_layer_small_enough_to_count():
    rows = [3, 0, 2]  # R 5, two experts used
    launch = cost.fc1_act(rows, 4, 6, 2)
    assert launch.flops == 2 * 5 * 12 * 4
    assert launch.bytes == 2 * (5 * 4 + 2 * 12 * 4 + 5 * 12 + 5 * 6) + 4 * 5
    launch = cost.gemm(rows, 4, 6, 2, bias=True, scale=4)
    assert launch.flops == 2 * 5 * 4 * 6
    assert launch.bytes == 2 * (5 * 6 + 2 * 4 * 6 + 2 * 4 + 5 * 4) + 4 * 5
    launch = cost.dgrad_act(rows, 4, 6, 2, gated=False, probs=0)
    assert launch.flops == 2 * 5 * 4 * 6
    assert launch.bytes == 2 * (5 * 4 + 2 * 4 * 6 + 3 * 5 * 6)
    adding = cost.wgrad(rows, 4, 6, 2, 4, accumulate=True)
    assert (adding.grad_bytes, adding.bytes) == (2 * 2 * 4 * 4 * 6, 2 * 5 * 10 + adding.grad_bytes)
    writing = cost.wgrad(rows, 4, 6, 2, 4, accumulate=False, bias_grad=2, scale=4)
    assert writing.grad_bytes == 3 * 4 * 4 * 6  # experts without rows are zeroed
    assert writing.bytes == 2 * (5 * 10 + 3 * 4) + 4 * 5 + writing.grad_bytes
    assert writing.flops == 2 * 5 * 4 * 6 + 2 * 5 * 4
    biases_alone = cost.wgrad(rows, 4, 0, 2, 0, accumulate=False, bias_grad=2)
    assert (biases_alone.flops, biases_alone.bytes) == (5 * 4, 2 * (5 * 4 + 3 * 4))


def test_gathered_rows_read_every_token_once():
    rows = [3, 0, 2]
    index = 4 * 5
    for tokens, read in ((2, 2), (9, 5)):  # no more than there are rows
        saved = 2 * (5 - read) * 4 - index
        for pass_, options in ((cost.fc1_act, {}), (cost.dgrad_act, {"gated": False, "probs": 0})):
            whole, gathered = (pass_(rows, 4, 6, 2, **options, tokens=t) for t in (None, tokens))
            assert gathered.flops == whole.flops
            assert gathered.bytes == whole.bytes - saved
        for name in ("dy_tokens", "x_tokens"):
            whole, gathered = (cost.wgrad(rows, 4, 4, 2, 4, accumulate=True, **{name: t}) for t in (None, tokens))
            assert (gathered.grad_bytes, gathered.bytes) == (whole.grad_bytes, whole.bytes - saved)
    passes = roofline.passes(BY_NAME["qwen3-30b-8k"], shapes.even(BY_NAME["qwen3-30b-8k"]))
    T, R, H = 8192, 65536, 2048
    assert passes["fc1_act"].bytes - passes["fc1_act, gathered"].bytes == 2 * (R - T) * H - 4 * R
    assert passes["combine"].bytes == 2 * (R + T) * H + 4 * R
    assert passes["order_rows"].bytes == 8 * R + 4 * (129 + 2 * R) + 2 * 4 * R  # and copies probabilities


@pytest.mark.parametrize("name", BY_NAME)
def test_loads_route_every_row(name):
    shape = BY_NAME[name]
    for load in shapes.LOADS.values():
        rows = load(shape)
        assert len(rows) == shape.E
        assert sum(rows) == shape.R
        assert all(0 <= n <= shape.most for n in rows)
    assert max(shapes.even(shape)) - min(shapes.even(shape)) <= 1
    assert max(shapes.zipf(shape)) > 4 * shape.R / shape.E or shape.E <= 8
    assert shapes.quarter_empty(shape).count(0) == shape.E // 4


def test_idle_share_of_schedules_done_by_hand():
    assert balance.idle_share([1, 1, 1, 1], 2) == 0
    assert balance.idle_share([1, 1, 1], 2) == pytest.approx(1 / 4)
    assert balance.idle_share([4, 2, 2], 2) == 0
    assert balance.idle_share([4, 3, 1, 1], 2) == pytest.approx(1 / 10)
    assert balance.idle_share([], 2) == 0
    assert balance.idle_share([5, 4, 3, 2, 1], 2) == pytest.approx(1 / 16)  # first free: 5 + 2 + 1 and 4 + 3
    assert balance.idle_share([5, 4, 3, 2, 1], 2, dealt_out=True) == pytest.approx(1 / 16)
    assert balance.idle_share([8, 4, 2, 1], 2, dealt_out=True) == pytest.approx(1 / 6)  # 8 + 1 and 4 + 2


@pytest.mark.slow
def test_every_schedule_keeps_the_multiprocessors_busy():
    rows = list(balance.rows())
    assert len(rows) == len(GPUS) * len(shapes.SHAPES) * len(shapes.LOADS) * 6
    long = [row for row in rows if row["tiles_per_processor"] >= 4]
    assert len(long) > len(rows) / 2
    assert [row for row in long if row["idle"] > 0.07] == []


def test_the_command_prints_every_pass_of_every_shape():
    rows = json.loads(forked.run("-m", "fusedmlp", "bench", "--roofline", "--json").stdout)
    with_tokens = len(shapes.SHAPES) - 1  # all but deepseek-ep
    assert len(rows) == len(shapes.LOADS) * (8 * len(shapes.SHAPES) + 6 * with_tokens)
    for row in rows:
        assert row["flops"] > 0 or row["pass"] == "order_rows"
        assert set(row["limit_ms"]) == {gpu.name for gpu in GPUS}
        by_hand = max(row["flops"] / H100.bf16_flops, row["bytes"] / H100.bandwidth) * 1e3
        assert row["limit_ms"][H100.name] == pytest.approx(by_hand)


class FakeEvent:
    """Reads a clock that every launch moves."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = FakeEvent.clock

    def elapsed_time(self, end):
        return end.time - self.time


def test_passes_are_timed_one_by_one(monkeypatch):
    from triton import knobs

    def launch(name, ms):
        """Call Triton's hooks as a launch does; metadata have a name only when they are asked for it."""
        metadata = SimpleNamespace(get=lambda: {"name": name})
        knobs.runtime.launch_enter_hook(metadata)
        FakeEvent.clock += ms
        knobs.runtime.launch_exit_hook(metadata)

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def step():
        launch("_plan_kernel", 0.5)
        for i in range(6):
            launch("grouped_gemm_warp_specialized_kernel" if i % 2 else "_grouped_gemm_kernel", i + 1.0)

    assert measure.pass_times(step, 3) == {name: i + 1.0 for i, name in enumerate(measure.STEP)}
    assert not knobs.runtime.launch_enter_hook.calls
    assert not knobs.runtime.launch_exit_hook.calls


LAYER = ("--experts", "16", "--hidden", "1024", "--ffn", "512", "--rows", "8192")


@pytest.mark.parametrize("report", ["--roofline", "--schedule"])
def test_ones_own_layer(report):
    done = forked.run("-m", "fusedmlp", "bench", report, *LAYER, "--target", "sm_90", "--json")
    rows = json.loads(done.stdout)
    assert {(row["shape"], row["load"]) for row in rows} == {("your layer", "even")}
    gpus = {gpu for row in rows for gpu in row.get("limit_ms", {row.get("gpu"): 0})}
    assert gpus == {"H100 SXM", "H200 SXM"}
    fc1 = next(row for row in rows if row["pass"] == "fc1_act")
    if report == "--roofline":
        assert fc1["flops"] == 2 * 8192 * 1024 * 2 * 512
    else:
        assert fc1["tiles"] == 8192 // 128 * 512 // 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "--eight-bit"), "--schedule: expected no --eight-bit"),
        (("--roofline", "--tiny"), "--roofline: expected no --tiny"),
        (("--report", "nowhere", "--experts", "4", "--target", "sm_90"), "--report: expected no --experts, --target"),
        (
            ("--schedule", "--target", "gfx950"),
            "--schedule: expected the architecture of a GPU whose ceilings are known (sm_90,",
        ),
        (
            ("--roofline", "--eight-bit", "--hidden", "2880", "--target", "sm_90"),
            "--roofline: expected a GPU with an 8-bit recipe, and sizes",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert f"bench {message}" in capsys.readouterr().err


RECIPES = {"sm_90": "fp8_block", "sm_100": "mxfp8"}


def test_architectures_with_recipes():
    found = {name: eight_bit.recipe_of(name) for name in TARGETS}
    assert found == {name: RECIPES.get(name) for name in TARGETS}


@pytest.mark.parametrize(("architecture", "recipe"), RECIPES.items())
def test_launches_of_a_recipe_are_those_of_a_layer(architecture, recipe):
    """Reports have the launches that plans have, with their costs."""
    calls = cases.Layer(recipe=f"{recipe}/{recipe}", sizes=(384, 256))(torch.bfloat16)
    launches = cases.launches(calls, TARGETS[architecture].planned_for("long"))
    costs = [launch.cost_of((40, 60, 0)) for launch in launches]
    shape = shapes.Shape("three experts", E=3, H=384, F=256, R=100, most=100)
    expected = eight_bit.passes(shape, [40, 60, 0], recipe).values()
    assert sorted(map(str, filter(None, costs))) == sorted(map(str, expected))


def test_limits_of_a_recipe():
    shape = BY_NAME["sonic-c"]
    found = [row for row in eight_bit.rows() if row["load"] == "even"]
    recipes = {(row["recipe"], row["shape"]) for row in found}
    assert ("mxfp8", "gpt-oss-20b") in recipes
    assert ("fp8_block", "gpt-oss-20b") not in recipes  # 2880 is no multiple of 128
    rows = {row["pass"]: row for row in found if (row["gpu"], row["shape"]) == (H100.name, shape.name)}
    fc1 = rows["fc1"]
    assert fc1["flops"] == 2 * shape.R * shape.H * 2 * shape.F
    assert fc1["limit_ms"] == pytest.approx(1e3 * fc1["flops"] / 1978.8e12)
    of_x = rows["quantize x"]
    assert of_x["flops"] == 0
    tiles = sum(-(-n // 128) for n in shapes.even(shape))
    assert of_x["bytes"] == 3 * shape.R * shape.H + 512 * tiles * shape.H // 128


def test_every_row_of_a_recipe_is_printed(capsys):
    assert main(["bench", "--roofline", "--eight-bit", "--target", "sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(list(eight_bit.rows(scope.of(None, "sm_90"))))
    assert "dgrad_act_quantize" in "".join(lines)
