"""The model of compiled kernels against arithmetic done by hand, and against the estimates that it is fitted to."""

import json

import pytest
from support import forked

from bench.limits import balance, model, rates, roofline, shapes
from bench.limits.gpus import GPU, GPUS
from bench.proof import budgets
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.tiles.table import Tile

H100 = GPUS[0]
TILE = Tile(128, 256, 64, 8, 4, PER_SM=1)
RATE = rates.Rates(
    clock=1e6,  # a cycle is a microsecond
    tensor=4096,
    l2=32,
    memory=0.5,
    issue=0.8,
    barrier=10,
    wait=5,
    store=20,
    store_wait=100,
    trip=500,
    first_load=900,
)
FACT = MainLoop(
    instructions=100,
    mma=4,
    waits=2,
    barriers=3,
    mma_in_flight=1,
    loads_in_flight=None,
    tile_instructions=400,
    tile_stores=2,
    tile_waits=3,
    tile_barriers=4,
    joined=1,
)


def test_a_step_takes_as_long_as_what_takes_longest():
    # Tensor cores 2 * 128 * 256 * 64 / 4096 = 1024; L2 2 * (128 + 256) * 64 / 32 = 1536;
    # 100 instructions of 8 warps on 4 schedulers at 0.8: 250, and 2 * 5 + 3 * 10 for waits and barriers: 290;
    # three loads on their way: 900 / 3 = 300.
    assert model.tile_cost("gemm", FACT, TILE, RATE)[:2] == (1536, "L2")
    fast = RATE._replace(l2=64)  # 768
    assert model.tile_cost("gemm", FACT, TILE, fast)[:2] == (1024, "tensor")
    assert model.tile_cost("gemm", FACT._replace(instructions=500), TILE, fast)[:2] == (1250 + 40, "issue")
    assert model.tile_cost("gemm", FACT._replace(mma_in_flight=0), TILE, fast)[:2] == (1024 + 290, "issue")
    late = fast._replace(first_load=4500)
    assert model.tile_cost("gemm", FACT, TILE, late)[:2] == (1500, "arrival")
    assert model.tile_cost("gemm", FACT._replace(loads_in_flight=1), TILE, late)[:2] == (4500, "arrival")
    assert model.tile_cost("gemm", FACT._replace(loads_in_flight=0), TILE, late)[:2] == (4500 + 290 + 1024, "arrival")
    # fc1: twice as wide as its tile. wgrad: 256 x 64 of dw, 128 rows a step: 2 * (256 + 64) * 128 / 32.
    assert model.tile_cost("fc1_act", FACT, TILE, RATE).step == 2 * (128 + 512) * 64 / 32
    assert model.tile_cost("wgrad", FACT, TILE, RATE).step == 2560


def test_a_tile_beside_its_steps():
    # 400 instructions: 1000. 128 * 256 * 2 bytes, of which the first of two stores is waited for: 32768 / 32 = 1024.
    # 2 stores, 3 waits, 4 barriers: 40 + 300 + 40. Before the first step 500 + 900; of wgrad 2 * 500 + 900.
    cost = model.tile_cost("gemm", FACT, TILE, RATE)
    assert (cost.bubble, cost.start) == (1000 + 1024 + 380, 1400)
    cost = model.tile_cost("gemm", FACT._replace(joined=0), TILE, RATE)
    assert (cost.bubble, cost.start) == (2404 + 1400, 0)
    # Bytes an element of the tile: gate, linear part and activation in bf16; two gradients and activation; fp32.
    one = FACT._replace(tile_stores=1)
    for kernel, elements, size in (
        ("fc1_act", 128 * 256, 6),
        ("gemm", 128 * 256, 2),
        ("dgrad_act", 128 * 256, 6),
        ("wgrad", 256 * 64, 4),
    ):
        left = model.tile_cost(kernel, FACT, TILE, RATE).bubble - model.tile_cost(kernel, one, TILE, RATE).bubble
        assert left == elements * size / 2 / 32 + 20, kernel
    assert model.tile_cost("wgrad", FACT, TILE, RATE).start == 1900


def test_tiles_in_waves():
    cost = model.Cost(step=100, bound="L2", bubble=50, start=7)
    assert model.tile_steps("gemm", TILE, [128], 256, 640) == [(10, 1)]
    assert model.cycles(cost, [(10, 1)], TILE, 2) == 1000 + 50 + 7
    # 129 and 1 rows: three tiles of rows, none of 0; 257 columns: two of them; 65 along the reduction: two steps.
    assert model.tile_steps("gemm", TILE, [129, 0, 1], 257, 65) == [(2, 6)]
    assert model.tile_steps("fc1_act", TILE, [1], 1, 2 * 65) == [(2, 1)]
    assert model.cycles(cost, [(2, 3)], TILE, 2) == pytest.approx(2 * 250 + 7)
    # Two programs share a multiprocessor: one's bubble is hidden by the other's steps, if it is no longer than they.
    two = Tile(128, 256, 64, 8, 4, PER_SM=2)
    assert model.cycles(cost, [(10, 1)], two, 1) == 1000 + 7
    assert model.cycles(cost._replace(bubble=3000), [(10, 1)], two, 1) == (1000 + 3000) / 2 + 7


def test_uneven_loads_of_wgrad():
    tile = Tile(64, 128, 256, 8, 4, PER_SM=1)
    steps = model.tile_steps("wgrad", tile, [64, 300, 0, 65], 128, 512)
    assert steps == [(5, 2), (2, 2), (1, 2)]
    cost = model.Cost(step=100, bound="L2", bubble=50, start=0)
    # Tiles of 550, 550, 250, 250, 150, 150: two processors take 550 + 250 + 150 each, three 550 + 150, 550 + 150 and
    # 250 + 250; if the first free one takes the next, 550 + 150, 550 and 250 + 250 + 150.
    assert model.cycles(cost, steps, tile, 2) == pytest.approx(950)
    assert model.cycles(cost, steps, tile, 3) == pytest.approx(700)
    assert model.cycles(cost._replace(start=10), steps, tile, 3) == pytest.approx(710)
    assert model.cycles(cost._replace(start=10), steps, tile, 3, persistent=False) == pytest.approx(720)
    assert model.cycles(cost, [], tile, 3) == 0
    # If other warps do a tile's work beside its steps, it runs during the steps of the next tile, as far as those are
    # as long: 500 + 200 + 150.
    apart = cost._replace(apart=True, bubble=150)
    assert model.cycles(apart, steps, tile, 2) == pytest.approx(850)
    assert model.cycles(apart, steps, tile, 6, persistent=False) == pytest.approx(650)
    assert model.tile_cost("wgrad", FACT._replace(joined=2), TILE, RATE).apart


def test_a_pass_is_no_faster_than_its_bytes():
    shape = shapes.Shape("one expert", E=1, H=256, F=128, R=128, most=128)
    by = dict.fromkeys(model.KERNELS, FACT)
    gpu = GPU("slow memory", "sm_90", 1.0, bandwidth=1e6, processors=1, source="")
    times = model.passes(gpu, shape, [128], by, RATE)
    # fc2: x 128 * 128, w 256 * 128, y 128 * 256 in bf16, at half of a byte a microsecond.
    assert (times["fc2"].us, times["fc2"].bound) == (pytest.approx(163840 / 0.5), "memory")
    times = model.passes(GPU("fast memory", "sm_90", 1.0, 1e12, 1, ""), shape, [128], by, RATE)
    # One tile of two steps; 400 instructions, one of two stores waited for, and the rest as above.
    assert (times["fc2"].us, times["fc2"].bound) == (pytest.approx(2 * 1536 + 2404 + 1400), "L2")


NO_GLUON = {"MI300X": "gfx942"}
# Facts by which waits and instructions of a step count. MMAs do not: wider and narrower ones multiply as fast.
SERIAL = FACT._replace(mma_in_flight=0)
LATE = FACT._replace(loads_in_flight=2)
WORSE = [
    (SERIAL, "instructions", 101),
    (SERIAL, "waits", 3),
    (SERIAL, "barriers", 4),
    (FACT, "mma_in_flight", 0),
    (LATE, "loads_in_flight", 1),
    (FACT, "tile_instructions", 401),
    (FACT, "tile_stores", 3),
    (FACT, "tile_waits", 4),
    (FACT, "tile_barriers", 5),
    (FACT, "joined", 0),
]


@pytest.mark.parametrize(("fact", "name", "worse"), WORSE)
def test_a_worse_fact_is_slower(fact, name, worse):
    rate = RATE._replace(l2=64, first_load=3000)

    def time(fact):
        return model.cycles(model.tile_cost("gemm", fact, TILE, rate), [(10, 8)], TILE, 2)

    assert time(fact._replace(**{name: worse})) > time(fact)


def test_every_fact_counts():
    assert {name for _, name, _ in WORSE} == set(MainLoop._fields) - {"mma"}


@pytest.mark.parametrize("architecture", rates.RATES)
@pytest.mark.parametrize("name", rates.Rates._fields)
def test_a_rate_that_is_off_is_slower(architecture, name):
    rate, off = rates.of(architecture), rates.of(architecture, name)
    factor = getattr(off, name) / getattr(rate, name)
    assert off == rate._replace(**{name: getattr(off, name)})
    assert abs(factor - 1) == pytest.approx(rates.RATES[architecture][name].within)
    shape = shapes.Shape("one expert", E=1, H=256, F=128, R=128, most=128)
    by = dict.fromkeys(model.KERNELS, SERIAL._replace(joined=0))

    def time(rate):
        gpus = (GPU("", "sm_90", 1.0, bandwidth, 1, "") for bandwidth in (1e6, 1e12))
        return sum(model.passes(gpu, shape, [128], by, rate)["fc2"].us for gpu in gpus)

    fast = RATE._replace(l2=64)
    slower = time(fast._replace(**{name: factor * getattr(fast, name)})) > time(fast)
    assert slower == (factor != 1)


# Facts of sm_90 in the first table, and cycles of a tile beside its steps as estimated from its listings.
FIRST = {
    "fc1_act": (MainLoop(181, 8, 10, 4, 0, None, 2184, 24, 24, 48, 1), 13000),
    "gemm": (MainLoop(116, 4, 2, 3, 1, None, 461, 2, 3, 4, 1), 2200),
    "dgrad_act": (MainLoop(92, 4, 2, 3, 1, None, 3041, 25, 25, 67, 0), 17000),
    "wgrad": (MainLoop(97, 4, 2, 3, 1, None, 636, 4, 5, 19, 0), 8500),
}
FIRST_BACKWARD = {  # TFLOP/s on an H100, likewise estimated
    "sonic-a": 469,
    "sonic-b": 537,
    "sonic-c": 577,
    "sonic-d": 584,
    "mixtral": 584,
    "qwen3-30b-8k": 393,
    "qwen3-30b-32k": 545,
    "deepseek-ep": 616,
}


def test_constants_fit_the_estimates_of_older_kernels():
    rate = rates.of("sm_90")
    tiles = {kernel: table.TABLES["sm_90"][kernel, "tma", "bf16", "long"] for kernel in FIRST}
    for kernel, (fact, bubble) in FIRST.items():
        assert model.tile_cost(kernel, fact, tiles[kernel], rate).bubble == pytest.approx(bubble, rel=0.12), kernel
    joined = FIRST["wgrad"][0]._replace(joined=1)
    assert model.tile_cost("wgrad", joined, tiles["wgrad"], rate).bubble == pytest.approx(4600, rel=0.15)
    # ptxas made every wgmma wait: a step took 1.17 times what L2 did.
    step = model.tile_cost("fc1_act", FIRST["fc1_act"][0], tiles["fc1_act"], rate).step
    assert step == pytest.approx(1.17 * 2 * 384 * 64 / 38, rel=0.1)
    by = {kernel: fact for kernel, (fact, _) in FIRST.items()}
    for shape in shapes.SHAPES:
        if shape.name in FIRST_BACKWARD:
            rows = shapes.even(shape)
            least, times = roofline.passes(shape, rows), model.passes(H100, shape, rows, by, rate)
            flops = sum(least[name].flops for name in roofline.BACKWARD)
            us = sum(times[name].us for name in roofline.BACKWARD)
            assert flops / us / 1e6 == pytest.approx(FIRST_BACKWARD[shape.name], rel=0.03), shape.name


def test_tiles_are_those_that_the_table_is_of():
    for gpu in model.modelled():
        for shape in shapes.SHAPES:
            for count in shapes.LOADS.values():
                for kernel in model.KERNELS:
                    tile = balance.tile_of(kernel, count(shape), gpu.architecture)
                    assert tile == table.TABLES[gpu.architecture][kernel, "tma", "bf16", "long"]
                    assert tile.PER_SM > 0


def test_tables_before_the_column_that_says_what_is_joined(tmp_path):
    lines = budgets.TABLE.read_text().splitlines()
    assert lines[0].endswith(",joined")
    old = tmp_path / "old.csv"
    old.write_text("\n".join(line.rpartition(",")[0] for line in lines))
    facts = model.facts("sm_90", old)
    assert {kernel: fact.joined for kernel, fact in facts.items()} == {
        "fc1_act": True,
        "gemm": True,
        "dgrad_act": False,
        "wgrad": False,
        **{f"{kernel}_warp_specialized": True for kernel in model.KERNELS},
        "fc1_act_fp8_block": True,
        "gemm_fp8_block": True,
        "wgrad_fp8_block": True,
    }
    # If the table has the column, its values count.
    old.write_text("\n".join(line[:-1] + "0" if line.startswith("sm_90,gemm,") else line for line in lines))
    assert model.facts("sm_90", old)["gemm"].joined == 0
    assert facts["gemm"].tile_instructions == model.facts("sm_90")["gemm"].tile_instructions
    assert model.facts("gfx942", old) == {}


def test_warp_specialized_kernels():
    """Two warpgroups multiply: 100 instructions of 8 warps, twice `num_warps`. If other warps store,
    `num_warps` are all that do.
    """
    four = TILE._replace(num_warps=4)
    assert model.tile_cost("gemm_warp_specialized", FACT, four, RATE) == model.tile_cost("gemm", FACT, TILE, RATE)
    by_others = FACT._replace(joined=2)
    assert model.tile_cost("gemm_warp_specialized", by_others, TILE, RATE) == model.tile_cost(
        "gemm", by_others, TILE, RATE
    )
    rows = list(model.rows(warp_specialized=True))
    assert {row["gpu"] for row in rows} == {"H100 SXM", "H200 SXM", "B200"}
    plain = {(row["gpu"], row["shape"], row["load"], row["pass"]): row["us"] for row in model.rows()}
    for row in rows:
        assert row["us_before"] == plain[row["gpu"], row["shape"], row["load"], row["pass"]]
    assert any(row["us"] != row["us_before"] for row in rows)
    tiles = table.TABLES["sm_90"]
    for kernel in model.KERNELS:
        assert balance.tile_of(kernel, [64], "sm_90", True) == tiles[kernel, "warp_specialized", "bf16", "long"]
        assert balance.tile_of(kernel, [63], "sm_90", True) == tiles[kernel, "tma", "bf16", "short"]


def _bench(*arguments):
    return forked.run("-m", "fusedmlp", "bench", "--model", *map(str, arguments))


def test_the_command_prints_every_pass_and_their_sums():
    rows = json.loads(_bench("--json").stdout)
    gpus = ("H100 SXM", "H200 SXM", "B200")
    assert len(rows) == len(gpus) * len(shapes.SHAPES) * len(shapes.LOADS) * (6 + 3)
    limits = {(row["shape"], row["load"], row["pass"]): row["limit_ms"] for row in roofline.rows()}
    by_pass = {(row["gpu"], row["shape"], row["load"], row["pass"]): row for row in rows}
    for (gpu, shape, load, name), row in by_pass.items():
        assert row["of_limit"] == pytest.approx(row["limit_us"] / row["us"])
        assert 0.1 < row["of_limit"] < 1
        if name in model.TOTALS:
            parts = [by_pass[gpu, shape, load, part] for part in model.TOTALS[name]]
            assert row["us"] == pytest.approx(sum(part["us"] for part in parts))
            assert row["tflops"] * row["us"] == pytest.approx(sum(part["tflops"] * part["us"] for part in parts))
            assert row["limit_us"] == pytest.approx(sum(part["limit_us"] for part in parts))
        else:
            assert row["limit_us"] == pytest.approx(1e3 * limits[shape, load, name][gpu])


def test_the_command_compares_warp_specialized_kernels():
    _, *left_out, columns, line = _bench("--warp-specialized").stdout.splitlines()[:4]
    assert left_out == [f"{gpu} is left out: no facts of such kernels for {name}" for gpu, name in NO_GLUON.items()]
    assert "us by the default kernels" in columns
    assert float(line.split()[-1]) > 0


def test_the_command_compares_with_another_table(tmp_path):
    other = tmp_path / "other.csv"
    # A thousand instructions more.
    other.write_text(budgets.TABLE.read_text().replace("\nsm_90,gemm,", "\nsm_90,gemm,1"))
    model_line, left_out, columns, *lines = _bench("--budgets", other).stdout.splitlines()
    assert model_line.startswith("A model, not a measurement;")
    assert all(f"{gpu.name} {model.uncertainty(gpu):.0%}" in model_line for gpu in model.modelled())
    assert left_out == "MI300X is left out: no facts of such kernels for gfx942"
    assert str(other) in columns
    uses_gemm = (" fc2 ", " dx ", " forward ", " backward ", " both ")
    for line in lines:
        slower = any(name in line for name in uses_gemm) and "wgrad" not in line and "B200" not in line
        assert (float(line.split()[-1]) > 1) == slower, line


@pytest.mark.parametrize("content", [None, "pass,us\n"])
def test_what_is_no_table_is_refused(tmp_path, content):
    other = tmp_path / "other.csv"
    if content is not None:
        other.write_text(content)
    done = _bench("--budgets", other)
    assert done.returncode == 2
    assert f"expected a table like bench/proof/budgets.csv; got {other}" in done.stderr
