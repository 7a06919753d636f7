"""Kernels of recipe mxfp8 in plain Triton, as compiled for sm_120, in three orders; and for sm_100, with the same
tiles: there Triton makes `tcgen05` of `tl.dot_scaled`, by other passes of the compiler.
"""

import pytest
from cases import cases, tiles
from emulation.layers import emulated
from emulation.test_eight_bit import ALLOWED, EACH, compare, names
from ptx_emulator import driver
from support.eight_bit_layer import LAYERS, Layer

from fusedmlp.kernels.tiles import select, table

CASES = [
    pytest.param(target, case, id=f"{target}-{case.id}", marks=[] if case.quick else [pytest.mark.exhaustive])
    for target in ("sm_120", "sm_100")
    for case in cases.of_recipes("sm_120")
]
pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(("target", "case"), CASES)
def test_case(target, case):
    with_tiles = select.Target(target, driver.MULTIPROCESSORS, table.TABLES["sm_120"])
    with emulated(target) as launched, tiles.planned_for(with_tiles):
        case.run()
    assert any(launch.kernel.endswith("_mxfp8_triton_kernel") for launch in launched)


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
def test_layer(wgrad, kind):
    layer = Layer(**LAYERS[kind])
    with emulated("sm_120") as launched:
        got = layer.results(recipe="mxfp8", impl="triton", wgrad=wgrad)
    assert "grouped_gemm_mxfp8_triton" in names(launched)
    assert ("grouped_wgrad_mxfp8_triton" in names(launched)) == (wgrad == "recipe")
    if layer.biases[0] is None:
        compare(got, layer.results(recipe="mxfp8", impl="torch", wgrad=wgrad))
    else:
        compare(got, layer.expected("mxfp8", wgrad, fused_bias=True), dict.fromkeys(ALLOWED, 1e-4))
