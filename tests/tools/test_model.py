"""The model of compiled kernels against arithmetic done by hand."""

import json

import pytest
from support import forked

from bench.limits import balance, model, rates, roofline, shapes
from bench.limits.gpus import GPU
from bench.proof import budgets
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.tiles.table import Tile

TILE = Tile(128, 256, 64, 8, 4, PER_SM=1)
RATE = rates.Rates(
    clock=1e6,  # a cycle is a microsecond
    clock_falls=0,
    clock_most=1e6,
    tensor=4096,
    tensor_rows=64,
    shared=256,
    l2=32,
    memory=0.5,
    latency=500,
    port=64,
    gap=50,
    issue=0.8,
    barrier=10,
    wait=5,
    store=20,
    store_wait=100,
    trip=500,
    tile=30,
    launch=70,
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
KERNEL = model.Kernel(FACT, rows=128, columns=256, depth=64, warps=8, buffers=4, stored=2)


def _cost(kernel=KERNEL, rate=RATE, **changes):
    return model.tile_cost(kernel._replace(loop=kernel.loop._replace(**changes)), rate)


def test_a_step_takes_as_long_as_what_takes_longest():
    # Tensor cores 2 * 128 * 256 * 64 / 4096 = 1024; L2 2 * (128 + 256) * 64 / 32 = 1536; shared memory: 49,152 bytes
    # written, 16,384 of the rows read once and 32,768 of the columns twice, by 256: 512. 100 instructions of 8 warps on
    # 4 schedulers at 0.8: 250, and 2 * 5 + 3 * 10 for waits and barriers: 290.
    cost = _cost()
    assert (cost.step, cost.busy, cost.bound) == (1536, 1536, "L2")
    fast = RATE._replace(l2=64)  # 768
    assert _cost(rate=fast)[:3] == (1024, 1024, "tensor")
    assert _cost(rate=fast._replace(shared=64))[:3] == (2048, 2048, "shared")
    assert _cost(rate=fast._replace(shared=64, tensor_rows=128))[:3] == (1536, 1536, "shared")
    assert _cost(rate=fast, instructions=500)[:3] == (1250 + 40, 1250 + 40, "issue")
    # Operands of half the size, multiplied twice as fast.
    assert _cost(KERNEL._replace(itemsize=1), RATE)[:3] == (768, 768, "L2")


def test_loads_and_products_wait_for_each_other():
    # A load takes 500 + 49,152 / 64 = 1268 cycles, a product 1024.
    fast = RATE._replace(l2=64)
    two = KERNEL._replace(buffers=2)
    assert _cost(two, fast)[:3] == ((1268 + 1024) / 2, 1024, "arrival")
    assert _cost(two._replace(order="drains"), fast)[:3] == (1268, 1024, "arrival")
    assert _cost(KERNEL._replace(order="drains"), fast)[:3] == (1024 + 50, 1024, "arrival")
    one = KERNEL._replace(buffers=1)
    for order in ("ring", "drains", "serial"):
        assert _cost(one._replace(order=order), fast)[:3] == (1268 + 1024 + 290, 1024, "arrival")
    # While a product is waited for once it is issued, nothing is issued.
    assert _cost(KERNEL._replace(order="serial"), fast)[:3] == (1024 + 290, 1024, "issue")
    # A product that waits for shared memory, which reads 81,920 bytes, and meanwhile loads nothing.
    slow = fast._replace(shared=64)
    assert _cost(one, slow).step == 1268 + 1280 + 290


def test_clusters():
    # With copies of the columns' operand, shared memory holds all of it, and L2 delivers half.
    copies = KERNEL._replace(loads=0.5)
    assert _cost(copies).step == 1024
    assert _cost(copies, RATE._replace(l2=16))[:3] == (2048, 2048, "L2")
    assert _cost(copies, RATE._replace(shared=64))[:3] == (2048, 2048, "shared")
    # Halves: 32,768 bytes written, 16,384 and twice 16,384 read.
    assert _cost(copies._replace(holds=0.5), RATE._replace(shared=64))[:3] == (1280, 1280, "shared")


def test_kernels_of_this_library():
    """fc1's accumulator is twice as wide as its tile; wgrad's is BLOCK_N x BLOCK_K, over BLOCK_M rows a step."""
    kernels = {name: model.kernel_of(name, FACT, TILE) for name in model.PASSES}
    assert kernels["gemm"] == KERNEL
    assert kernels["fc1_act"] == KERNEL._replace(columns=512, stored=3)
    assert kernels["dgrad_act"] == KERNEL._replace(stored=6)
    assert kernels["wgrad"] == KERNEL._replace(rows=256, columns=64, depth=128, stored=4, trips=2)
    assert model.kernel_of("gemm", FACT, TILE._replace(PER_SM=2, num_stages=3)) == KERNEL._replace(
        programs=2, buffers=3
    )
    assert model.kernel_of("gemm", FACT._replace(mma_in_flight=0), TILE).order == "serial"


def test_loads_by_pointers_get_no_figure():
    with pytest.raises(ValueError, match=r"expected a kernel that loads by TMA; got cp\.async"):
        _cost(loads_in_flight=2)


def test_a_tile_beside_its_steps():
    # 400 instructions: 1000. 128 * 256 * 2 bytes, of which the first of two stores is waited for: 32768 / 32 = 1024.
    # 2 stores, 3 waits, 4 barriers: 40 + 300 + 40. Before the first step 500 + 1268; of wgrad 500 more.
    cost = _cost()
    assert (cost.bubble, cost.start) == (30 + 1000 + 1024 + 380, 1768)
    cost = _cost(joined=0)
    assert (cost.bubble, cost.start) == (2434 + 1768, 0)
    assert _cost(KERNEL._replace(last_store_waits=True)).bubble == 2434 + 1024
    assert _cost(KERNEL._replace(stored=6)).bubble == 2434 + 2 * 1024
    assert _cost(tile_stores=1).bubble == 2434 - 1024 - 20
    assert _cost(KERNEL._replace(trips=2)).start == 2268


def test_tiles_in_waves():
    cost = model.Cost(step=100, busy=90, bound="arrival", bubble=50, start=7)
    assert model.tile_steps("gemm", TILE, [128], 256, 640) == [(10, 1)]
    assert model.cycles(cost, [(10, 1)], 2, 3, persistent=True) == 1000 + 50 + 7 + 3
    # 129 and 1 rows: three tiles of rows, none of 0; 257 columns: two of them; 65 along the reduction: two steps.
    assert model.tile_steps("gemm", TILE, [129, 0, 1], 257, 65) == [(2, 6)]
    assert model.tile_steps("fc1_act", TILE, [1], 1, 2 * 65) == [(2, 1)]
    assert model.cycles(cost, [(2, 3)], 2, 3, persistent=True) == pytest.approx(2 * 250 + 10)
    # Two programs share a multiprocessor: what one waits for is hidden by the other's steps, as far as those are long.
    assert model.cycles(cost, [(10, 1)], 1, 3, 2, persistent=True) == 900 + 10
    assert model.cycles(cost._replace(bubble=3000), [(10, 1)], 1, 3, 2, persistent=True) == (1000 + 3000) / 2 + 10
    assert model.cycles(cost._replace(bubble=3000), [(10, 1)], 1, 3, 2, persistent=False) == (1000 + 3000 + 10) / 2


def test_uneven_loads_of_wgrad():
    tile = Tile(64, 128, 256, 8, 4, PER_SM=1)
    steps = model.tile_steps("wgrad", tile, [64, 300, 0, 65], 128, 512)
    assert steps == [(5, 2), (2, 2), (1, 2)]
    cost = model.Cost(step=100, busy=100, bound="L2", bubble=50, start=0)
    # Tiles of 550, 550, 250, 250, 150, 150: two processors take 550 + 250 + 150 each, three 550 + 150, 550 + 150 and
    # 250 + 250; if the first free one takes the next, 550 + 150, 550 and 250 + 250 + 150.
    assert model.cycles(cost, steps, 2, 0, persistent=True) == pytest.approx(950)
    assert model.cycles(cost, steps, 3, 0, persistent=True) == pytest.approx(700)
    assert model.cycles(cost._replace(start=10), steps, 3, 5, persistent=True) == pytest.approx(715)
    assert model.cycles(cost._replace(start=10), steps, 3, 5, persistent=False) == pytest.approx(730)
    assert model.cycles(cost, [], 3, 0, persistent=True) == 0
    # If other warps do a tile's work beside its steps, it runs during the steps of the next tile, as far as those are
    # as long: 500 + 200 + 150.
    apart = cost._replace(apart=True, bubble=150)
    assert model.cycles(apart, steps, 2, 0, persistent=True) == pytest.approx(850)
    assert model.cycles(apart, steps, 6, 0, persistent=False) == pytest.approx(650)
    assert _cost(joined=2).apart


def test_the_clock_falls_with_the_use_of_tensor_cores():
    rate = RATE._replace(clock=1e6, clock_falls=0.5, clock_most=1.9e6)
    # 4096 FLOPs a cycle are all that one multiprocessor can: 1000 cycles at 1 MHz. A quarter of them doubles the clock.
    assert model.seconds(1000, 1000 * 4096, 1, rate) == 1e-3
    assert model.seconds(1000, 1000 * 4096 / 2, 1, rate) == pytest.approx(1e-3 / 2**0.5)
    assert model.seconds(1000, 1000 * 4096 / 4, 1, rate) == pytest.approx(1e-3 / 1.9)
    assert model.seconds(1000, 1000 * 4096 / 2, 2, rate) == pytest.approx(1e-3 / 1.9)
    assert model.seconds(1000, 1000 * 8192, 1, rate, itemsize=1) == 1e-3
    assert model.seconds(1000, 0, 1, rate) == pytest.approx(1e-3 / 1.9)


def test_a_pass_is_no_faster_than_its_bytes():
    shape = shapes.Shape("one expert", E=1, H=256, F=128, R=128, most=128)
    by = dict.fromkeys(model.PASSES, FACT)
    gpu = GPU("slow memory", "sm_90", 1.0, bandwidth=1e6, processors=1, source="")
    times = model.passes(gpu, shape, [128], by, RATE)
    # fc2: x 128 * 128, w 256 * 128, y 128 * 256 in bf16, at half of a byte a microsecond.
    assert (times["fc2"].us, times["fc2"].bound) == (pytest.approx(163840 / 0.5), "memory")
    times = model.passes(GPU("fast memory", "sm_90", 1.0, 1e12, 1, ""), shape, [128], by, RATE)
    # One tile of two steps; 400 instructions, one of two stores waited for, and the rest as above.
    assert (times["fc2"].us, times["fc2"].bound) == (pytest.approx(2 * 1536 + 2434 + 1768 + 70), "L2")


NO_GLUON = {"MI300X": "gfx942"}
# Facts by which waits and instructions of a step count. MMAs do not: wider and narrower ones multiply as fast.
SERIAL = FACT._replace(mma_in_flight=0)
WORSE = [
    (SERIAL, "instructions", 101),
    (SERIAL, "waits", 3),
    (SERIAL, "barriers", 4),
    (FACT, "mma_in_flight", 0),
    (FACT, "tile_instructions", 401),
    (FACT, "tile_stores", 3),
    (FACT, "tile_waits", 4),
    (FACT, "tile_barriers", 5),
    (FACT, "joined", 0),
]


@pytest.mark.parametrize(("fact", "name", "worse"), WORSE)
def test_a_worse_fact_is_slower(fact, name, worse):
    rate = RATE._replace(l2=64)

    def time(fact):
        cost = model.tile_cost(model.kernel_of("gemm", fact, TILE), rate)
        return model.cycles(cost, [(10, 8)], 2, 0, persistent=True)

    assert time(fact._replace(**{name: worse})) > time(fact)


def test_every_fact_counts():
    assert {name for _, name, _ in WORSE} == set(MainLoop._fields) - {"mma", "loads_in_flight"}


def test_another_machine():
    assert [rate.clock for rate in rates.anchored("sm_90", 661.11)] == [rates.of("sm_90").clock]
    (faster,) = rates.anchored("sm_90", 727.221)
    assert faster == rates.of("sm_90")._replace(clock=pytest.approx(1.1 * rates.of("sm_90").clock))
    rate, slowest, fastest = rates.anchored("sm_100", None)
    assert slowest.clock < rate.clock < fastest.clock
    assert rates.anchored("sm_90", 1400) == [] == rates.anchored("sm_100", 661)


def test_tiles_are_those_that_the_table_is_of():
    for gpu in model.modelled():
        for shape in shapes.SHAPES:
            for count in shapes.LOADS.values():
                for kernel in model.PASSES:
                    tile = balance.tile_of(kernel, count(shape), gpu.architecture)
                    assert tile == table.TABLES[gpu.architecture][table.Key(kernel, "tma", "bf16", "long")]
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
        **{f"{kernel}_warp_specialized": True for kernel in model.PASSES},
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
    assert model.kernel_of("gemm_warp_specialized", FACT, four) == KERNEL
    by_others = FACT._replace(joined=2)
    assert model.kernel_of("gemm_warp_specialized", by_others, four) == KERNEL._replace(loop=by_others, warps=4)
    rows = list(model.rows(warp_specialized=True))
    assert {row["gpu"] for row in rows} == {"H100 SXM", "H200 SXM", "B200"}
    plain = {(row["gpu"], row["shape"], row["load"], row["pass"]): row["us"] for row in model.rows()}
    for row in rows:
        assert row["us_before"] == plain[row["gpu"], row["shape"], row["load"], row["pass"]]
    assert any(row["us"] != row["us_before"] for row in rows)
    tiles = table.TABLES["sm_90"]
    for kernel in model.PASSES:
        regime = "mma_add" if kernel == "wgrad" else "any"
        own = tiles[table.Key(kernel, "warp_specialized", "bf16", "long", regime=regime)]
        assert balance.tile_of(kernel, [64], "sm_90", True) == own
        assert balance.tile_of(kernel, [63], "sm_90", True) == tiles[table.Key(kernel, "tma", "bf16", "short")]


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
        assert row["machines"][0] <= row["tflops"] <= row["machines"][1]
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
    assert "H100 SXM 13%, H200 SXM 13%, B200 15%" in model_line
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


def test_the_command_knows_the_machine():
    alone = _bench("--cublas", "727")
    title, *left_out, columns, line = alone.stdout.splitlines()[:5]
    assert left_out == [
        "B200 is left out: no cuBLAS of 727 TFLOP/s",
        "MI300X is left out: no facts of such kernels for gfx942",
    ], (title, columns)
    assert "known machine" not in columns
    (expected,) = (row for row in model.rows(cublas=727) if _name(row) == (*line.split()[:2], "fc1_act", "H100 SXM"))
    assert f"{expected['tflops']:.1f}" in line
    (plain,) = (row for row in model.rows() if _name(row) == _name(expected))
    assert plain["tflops"] < expected["tflops"] < plain["machines"][1]
    wrong = _bench("--cublas", "300")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("bench --model: expected TFLOP/s of cuBLAS, about 621 to 793 for sm_90 or about ")
    assert wrong.stderr.endswith("; got 300\n")


def _name(row):
    return row["shape"], row["load"], row["pass"], row["gpu"]
