"""The model beside published measurements: the bounds that it must meet, and the table."""

import json
import statistics

import pytest
from support import forked

from bench.limits import layer, model, rates, roofline, shapes
from bench.limits.gpus import GPUS, limit_ms
from bench.limits.published import fit, layers, points, table

ARCHITECTURES = {"H100": "sm_90", "GB200": "sm_100"}
BOUNDS = {"sm_90": (0.05, 0.16), "sm_100": (0.08, 0.16)}  # median and ninth decile of errors


@pytest.fixture(scope="module")
def held_out():
    return {architecture: table.held_out(architecture) for architecture in ARCHITECTURES.values()}


@pytest.fixture(scope="module")
def steps():
    return list(table.step_rows(list(table.point_rows())))


@pytest.mark.parametrize("architecture", BOUNDS)
def test_points_that_were_held_out(architecture, held_out):
    """Each point by constants that are fitted to the other half."""
    median, ninety = BOUNDS[architecture]
    both = held_out[architecture]["both"]
    assert both.points == len(table.fitted(architecture))
    assert both.median <= median
    assert both.ninety <= ninety
    assert both.ninety <= rates.WITHIN[architecture] <= both.ninety + 0.01


def test_halves():
    """All sizes of a kernel are in one half, and the halves alternate."""
    for architecture in BOUNDS:
        halves = {}
        for each in table.fitted(architecture):
            halves.setdefault(each.family, set()).add(each.half)
        assert list(halves.values()) == [{"ab"[i % 2]} for i in range(len(halves))]
    assert all((each.use == "fit") == (each.half != "") for each in points.points())
    assert all(each.source and each.tflops > 0 for each in points.points())
    assert {each.loop for each in points.points()} <= set(points.loops())


def _of(steps, title, gpu):
    found = [row["predicted"] for row in steps if row["title"].startswith(title) and row["gpu"] == gpu]
    assert found
    return found


def test_steps_of_a_design(steps):
    for gpu in ARCHITECTURES:
        assert min(_of(steps, "2 -> 3 stages", gpu)) >= 0.20
    assert all(abs(each) <= 0.01 for each in _of(steps, "3 -> 4 stages", "H100"))
    assert all(0.05 <= each <= 0.15 for each in _of(steps, "3 -> 4 stages", "GB200"))
    assert max(_of(steps, "multicast", "H100")) < 0.03
    assert {(step.title, step.gpu) for step in table.STEPS} == {(row["title"], row["gpu"]) for row in steps}


def test_a_step_is_what_was_measured(steps):
    (row,) = (row for row in steps if row["title"] == "2 -> 3 stages" and row["gpu"] == "H100")
    assert row["measured"] == pytest.approx(673.67 / 489.26 - 1)


@pytest.mark.parametrize("gpu", ["H100 SXM", "B200"])
def test_a_fit_to_the_other_half_moves_no_figure_far(gpu):
    """Figures of kernels as they are shipped: each pass of each shape, default and warp-specialized, by either half."""
    (about,) = (each for each in GPUS if each.name == gpu)
    by = model.facts(about.architecture)
    a, b = (fit.fit(table.fitted(about.architecture, half)) for half in "ab")
    for shape in shapes.SHAPES:
        rows = shapes.even(shape)
        for warp_specialized in (False, True):
            times = [model.passes(about, shape, rows, by, rate, warp_specialized) for rate in (a, b)]
            for name in times[0]:
                assert times[0][name].us == pytest.approx(times[1][name].us, rel=0.05), (shape.name, name)


@pytest.mark.parametrize(("gpu", "architecture"), ARCHITECTURES.items())
def test_constants_are_those_of_the_fit(gpu, architecture):
    found, shipped = fit.fit(table.fitted(architecture)), rates.of(architecture)
    for name in fit.START[architecture]:
        assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=0.005), name
    assert {name for name, each in rates.RATES[architecture].items() if each.source.startswith("fitted")} == set(
        fit.START[architecture]
    )
    cublas = [each for each in points.points() if each[:3] == (gpu, "Gluon", "anchor") and each.K == 8192]
    assert rates.CUBLAS[architecture] == statistics.median(each.tflops for each in cublas)


def test_known_machines():
    """The factors by which machines differ: by cuBLAS of other machines on sm_90, of three runs on sm_100."""
    others = dict.fromkeys(each.machine for each in points.points() if each.gpu == "H100" and each.use == "other")
    clock = rates.of("sm_90").clock
    found = [points.anchored("H100", machine).clock / clock for machine in others]
    slowest, fastest = rates.MACHINES["sm_90"]
    assert slowest - 0.01 <= min(found) <= 1 <= max(found) <= fastest
    runs = [each.tflops for each in points.points() if each[:3] == ("GB200", "Gluon", "anchor") and each.K == 8192]
    slowest, fastest = rates.MACHINES["sm_100"]
    assert slowest == pytest.approx(min(runs) / rates.CUBLAS["sm_100"], abs=0.006)
    assert fastest == pytest.approx(max(runs) / rates.CUBLAS["sm_100"], abs=0.006)


def test_a_fit_finds_the_constants_that_made_its_points():
    """Points made by the model with other constants."""
    start = rates.of("sm_90")._replace(**fit.START["sm_90"])
    true = start._replace(clock=1.1 * start.clock, tile=1.2 * start.tile)
    made = [each._replace(tflops=points.predicted(each, true)) for each in table.fitted("sm_90")]
    found = fit.fit(made)
    assert found.clock == pytest.approx(true.clock, rel=0.02)
    assert start.tile < found.tile
    before, after = (statistics.mean(table.errors(made, rate)) for rate in (start, found))
    assert after < 0.2 * before


def test_layers_of_others():
    """SonicMoE's, by a clock that is fitted to the other half of its layers."""
    errors = [abs(each) for each in layers.held_out()]
    found = table.summary(errors)
    assert found.points == len(layers.published()) == 24
    assert found.median <= 0.08
    assert found.ninety <= 0.16
    a, b = ([each for each in layers.published() if each.half == half] for half in "ab")
    assert layers.fit(a) != layers.fit(b)
    assert layers.held_out() == layers.errors(a, layers.fit(b)) + layers.errors(b, layers.fit(a))
    by_key = {(each.shape.F, each.top_k, each.shape.H, each.half) for each in layers.published()}
    assert len(by_key) == 12  # a layer's forward and backward are in the same half


def test_a_layer_is_its_passes_and_what_is_beside_them():
    gpu, rate = GPUS[0], rates.of("sm_90")
    (shape,) = (each for each in shapes.SHAPES if each.name == "sonic-c")
    by, rows = model.facts("sm_90"), shapes.even(shape)
    found = layer.times(gpu, shape, rows, by, rate, layer.OURS)
    passes = model.passes(gpu, shape, rows, by, rate, warp_specialized=True)
    least = roofline.passes(shape, rows)
    combine, ordering = (
        1e3 * limit_ms(0, least[name].bytes, 1, gpu.bandwidth * rate.memory) for name in ("combine", "order_rows")
    )
    forward, backward = (sum(passes[name].us for name in model.TOTALS[way]) for way in ("forward", "backward"))
    assert found.forward == pytest.approx(forward + combine + ordering + 4 * layer.LAUNCH_US)
    assert found.backward == pytest.approx(backward + combine + 5 * layer.LAUNCH_US)
    assert found.backward_gemms == pytest.approx(backward)
    # Gradients of half the size, written once, are faster, in backward alone.
    written = layer.times(gpu, shape, rows, by, rate, layer.WRITES)
    assert written.forward == found.forward
    assert written.backward < found.backward
    assert layer.flops(shape, "backward") == 2 * layer.flops(shape, "forward")
    assert layer.flops(shape, "forward") == sum(least[name].flops for name in roofline.FORWARD)
    assert layer.add_us(shape, gpu) == pytest.approx(1e6 * 10 * 3 * 64 * 4096 * 1024 / 3.35e12)


def test_layers_are_compared_with_what_a_user_of_main_grad_runs():
    rows = {row["shape"]: row for row in layers.compared()}
    assert tuple(rows) == layers.COMPARED
    row = rows["sonic-c"]
    (shape,) = (each for each in shapes.SHAPES if each.name == "sonic-c")
    flops = layer.flops(shape, "backward")
    add = flops / row["published_and_added"] - flops / row["published"]
    assert add == pytest.approx(1e6 * layer.add_us(shape, GPUS[0]))
    for row in rows.values():
        assert row["published_and_added"] < row["layer"] < row["published"]
        assert row["gemms"] < row["gemms_writing"] < row["gemms_hidden"]


def test_the_command_prints_the_table():
    done = forked.run("-m", "fusedmlp", "bench", "--model", "--published")
    assert done.returncode == 0, done.stderr
    families, steps, of_layers, backward, errors = done.stdout.split("\n\n")
    known = {(each.gpu, each.machine, each.family) for each in points.points() if each.use != "anchor"}
    assert len(families.splitlines()) == 1 + len(known)
    assert any(line.startswith("2 -> 3 stages ") and " 1.377 " in line for line in steps.splitlines())
    assert len(of_layers.splitlines()) == 1 + 24
    assert [line.split()[0] for line in backward.splitlines()[3:]] == list(layers.COMPARED)
    assert [line.split()[:3] for line in errors.splitlines()[1:]] == [
        ["H100", "a", "24"],
        ["H100", "b", "18"],
        ["H100", "both", "42"],
        ["GB200", "a", "38"],
        ["GB200", "b", "27"],
        ["GB200", "both", "65"],
    ]


def test_rows_as_json(capsys):
    from bench.limits import command

    command.run_published(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["row"] for row in rows} == {"point", "family", "step", "layer", "backward", "held out"}
    row = next(row for row in rows if row["row"] == "point")
    assert row["error"] == pytest.approx(row["predicted"] / row["tflops"] - 1)
    family = next(row for row in rows if row["row"] == "family" and row["points"] > 1)
    own = [row["error"] for row in rows if row["row"] == "point" and row["family"] == family["family"]]
    assert family["largest"] in own
