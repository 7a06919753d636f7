"""The model and the roofline of layers with 8-bit recipes."""

import pytest
import torch

from bench.limits import command, eight_bit, model, rates
from bench.limits.gpus import GPUS
from bench.limits.scope import Scope
from bench.limits.shapes import SHAPES, Shape, even
from bench.proof import cases
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels.tiles import table

ARCHITECTURES = {"sm_90": "fp8_block", "sm_100": "mxfp8"}


def test_architectures_with_recipes():
    found = {name: eight_bit.recipe_of(name) for name in TARGETS}
    assert found == {name: ARCHITECTURES.get(name) for name in TARGETS}


@pytest.mark.parametrize(("architecture", "recipe"), ARCHITECTURES.items())
def test_launches_are_those_of_a_layer(architecture, recipe):
    """The model has the launches that plans have, with their costs."""
    layer = cases.Layer(recipe=f"{recipe}/{recipe}", sizes=(384, 256))
    calls = layer(torch.bfloat16)
    launches = cases.launches(calls, TARGETS[architecture].planned_for("long"))
    costs = [launch.cost_of((40, 60, 0)) for launch in launches]
    shape = Shape("three experts", E=3, H=384, F=256, R=100, most=100)
    expected = [each.cost for each in eight_bit.passes(shape, [40, 60, 0], recipe).values()]
    assert sorted(map(str, filter(None, costs))) == sorted(map(str, expected))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gemm", "wgrad"])
def test_a_step_is_faster_than_two_of_16_bits(architecture, kernel):
    """The same products; but sums that are added in registers may keep tensor cores waiting."""
    by, rate = model.facts(architecture), rates.of(architecture)
    recipe, name = ARCHITECTURES[architecture], kernel + model.WARP_SPECIALIZED
    tiles = table.TABLES[architecture]
    tile = tiles[table.Key(kernel, "warp_specialized", recipe, "long")]
    regime = "mma_add" if (kernel, architecture) == ("wgrad", "sm_90") else "any"
    wide = tiles[table.Key(kernel, "warp_specialized", "bf16", "long", regime=regime)]
    as_many = tile.BLOCK_M // wide.BLOCK_M if kernel == "wgrad" else 2  # steps of 16 bits for one of 8 bits
    fact = by[f"{kernel}_{recipe}"]
    overlapped, apart = (eight_bit.tile_cost(kernel, fact, tile, rate, overlapped=on) for on in (True, False))
    of_bf16 = model.tile_cost(model.kernel_of(name, by[name], wide), rate)
    assert 0.45 < overlapped.step / (as_many * of_bf16.step) < 0.75
    assert (overlapped.step < apart.step) == (architecture == "sm_90")


def test_rows_of_the_model_add_up():
    rows = [row for row in eight_bit.model_rows() if row["load"] == "even"]
    assert {row["gpu"] for row in rows} == {"H100 SXM", "H200 SXM", "B200"}
    shapes = {(row["recipe"], row["shape"]) for row in rows}
    assert ("mxfp8", "gpt-oss-20b") in shapes
    assert ("fp8_block", "gpt-oss-20b") not in shapes  # 2880 is no multiple of 128
    own = {row["pass"]: row for row in rows if (row["gpu"], row["shape"]) == ("H100 SXM", "sonic-c")}
    launches = [name for name in own if name not in (*model.TOTALS, eight_bit.KEPT)]
    for column in ("us", "us_apart"):
        assert sum(own[name][column] for name in launches) == pytest.approx(own["both"][column])
        assert own["forward"][column] + own["backward"][column] == pytest.approx(own["both"][column])
    of_weights = [name for name in launches if name.startswith("quantize fc")]
    assert len(of_weights) == 4
    spared = sum(own[name]["us"] for name in of_weights)
    assert own[eight_bit.KEPT]["us"] + spared == pytest.approx(own["both"]["us"])
    assert own["both"]["us"] < own["both"]["us_apart"]
    assert own["both"]["tflops"] == pytest.approx(own["both"]["faster"] * own["both"]["bf16_tflops"])


def test_limits():
    (gpu,) = (gpu for gpu in GPUS if gpu.name == "H100 SXM")
    (shape,) = (shape for shape in SHAPES if shape.name == "sonic-c")
    rows = {
        row["pass"]: row
        for row in eight_bit.roofline_rows(Scope(gpus=(gpu,)))
        if (row["shape"], row["load"]) == (shape.name, "even")
    }
    fc1 = rows["fc1"]
    assert fc1["flops"] == 2 * shape.R * shape.H * 2 * shape.F
    assert fc1["limit_ms"] == pytest.approx(1e3 * fc1["flops"] / 1978.8e12)
    of_x = rows["quantize x"]
    assert of_x["flops"] == 0
    tiles = sum(-(-n // 128) for n in even(shape))
    assert of_x["bytes"] == 3 * shape.R * shape.H + 512 * tiles * shape.H // 128


@pytest.mark.parametrize("what", ["model", "roofline"])
def test_every_row_is_printed(what, capsys):
    command.run(what, False, command.Options(eight_bit=True))
    printed = capsys.readouterr().out
    assert "dgrad_act_quantize" in printed
    if what == "model":
        assert "A model, not a measurement" in printed
        assert "MI300X is left out" in printed
