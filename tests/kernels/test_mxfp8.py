"""Kernels of recipe mxfp8 in plain Triton, with the tiles of the GPUs that they are for: products by themselves, and
whole layers against the CPU's.

The interpreter multiplies dequantized operands, so these tests see all that a kernel loads, scales, adds and stores,
and the proof sees that compiled kernels multiply by instructions that take scales.
"""

import pytest
from cases import cases, tiles
from support.eight_bit import distances
from support.eight_bit_layer import COUNTS, LAYERS, Layer

import fusedmlp
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import select, table

TARGETS = ("sm_120", "gfx950")
CELLS = [
    pytest.param(name, case, id=f"{name}-{case.id}", marks=[] if case.quick else [pytest.mark.exhaustive])
    for name in TARGETS
    for case in cases.of_recipes(name)
]
KERNELS = {"grouped_gemm_mxfp8_triton", "grouped_wgrad_mxfp8_triton"}
# Norms of differences: sums are added in another order, and then few values of h, y, dx and dh are rounded another way.
ALLOWED = {"y": 1e-4, "dx": 1e-4, "dprobs": 1e-4, "dfc1": 1e-6, "dfc2": 1e-6}
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.sparse]


def planned_for(target):
    return tiles.planned_for(select.Target(target, 3, table.TABLES[target]))


@pytest.mark.parametrize(("target", "case"), CELLS)
def test_products(target, case):
    with planned_for(target):
        case.run()


def compare(got, want, allowed=ALLOWED):
    found = distances(got, want)
    assert all(distance <= allowed[name] for name, distance in found.items()), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_layer(target, wgrad, kind):
    layer = Layer(**LAYERS[kind])
    with planned_for(target), recording() as launches:
        got = layer.results(recipe="mxfp8", impl="triton", wgrad=wgrad)
    used = {launch.name for launch in launches} & KERNELS
    assert used == (KERNELS if wgrad == "recipe" else {"grouped_gemm_mxfp8_triton"})
    if layer.biases[0] is None:
        compare(got, layer.results(recipe="mxfp8", impl="torch", wgrad=wgrad))
    else:  # GEMMs add them before they round, so the CPU is no reference; float64 rounds more values of dh another way
        compare(got, layer.expected("mxfp8", wgrad, fused_bias=True), dict.fromkeys(got, 1e-4))
    assert not got["y"][sum(COUNTS) :].any()
    assert not got["dfc1"][1].any()  # no rows


@pytest.mark.slow
@pytest.mark.parametrize("wgrad", ["at once", "delayed", "fused"])
@pytest.mark.parametrize("target", TARGETS)
def test_two_microbatches(target, wgrad):
    """Rows of a second micro-batch belong to other experts."""

    def run(impl):
        layer = Layer()
        queue = None if wgrad == "at once" else fusedmlp.WgradQueue(fuse_microbatches=wgrad == "fused")
        weights = [group[0] for group in layer.params]
        buffer = fusedmlp.MainGradBuffer(weights)
        buffer.zero_grad()
        for counts in (COUNTS, COUNTS[::-1]):
            options = {"probs": layer.probs, "recipe": "mxfp8", "impl": impl, "wgrad_queue": queue}
            fusedmlp.grouped_mlp(layer.x, *weights, list(counts), **options).backward(layer.dy)
        if queue is not None:
            queue.run()
        found = {f"dfc{i + 1}": w.main_grad.double() for i, w in enumerate(weights)}
        buffer.detach()
        return found

    with planned_for(target), recording() as launches:
        got = run("triton")
    assert sum(launch.name.startswith("grouped_wgrad") for launch in launches) == (2 if wgrad == "fused" else 4)
    compare(got, run("torch"))


def test_needs_no_gluon():
    on = {name: select.Target(name, 3, table.TABLES[name]) for name in ("sm_100", "sm_120", "gfx942", "gfx950")}
    for kernel in ("gemm", "wgrad"):
        for name in TARGETS:
            assert select.eight_bit(kernel, "mxfp8", on[name], "no Gluon").path == "pointer"
        with pytest.raises(NotImplementedError, match="recipe='mxfp8': no Gluon"):
            select.eight_bit(kernel, "mxfp8", on["sm_100"], "no Gluon")
        with pytest.raises(NotImplementedError, match=r"recipe='mxfp8': expected a GPU with kernels .*; got gfx942"):
            select.eight_bit(kernel, "mxfp8", on["gfx942"], "")
        with pytest.raises(NotImplementedError, match=r"recipe='fp8_block': expected a GPU .*; got sm_120"):
            select.eight_bit(kernel, "fp8_block", on["sm_120"], "")


def test_refused_where_there_are_no_kernels():
    message = "recipe='mxfp8': expected a GPU with kernels .*; got gfx942"
    with planned_for("gfx942"), pytest.raises(NotImplementedError, match=message):
        Layer()(recipe="mxfp8", impl="triton")
