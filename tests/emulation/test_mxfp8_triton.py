"""Kernels of recipe mxfp8 in plain Triton, compiled for sm_100 with the tiles of sm_120.

The emulator has no scaled `mma.sync` and no MFMA. Triton compiles the same source to `tcgen05` as well, so these cases
execute all but those instructions as compiled, in three orders.
"""

import pytest
from emulation.layers import emulated
from ptx_emulator import driver

from bench.cases import cases, tiles
from fusedmlp.kernels.tiles import select, table

CASES = [
    pytest.param(case, id=case.id, marks=[] if case.quick else [pytest.mark.exhaustive])
    for case in cases.of_recipes("sm_120")
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES)
def test_case(case):
    with_tiles = select.Target("sm_100", driver.MULTIPROCESSORS, table.TABLES["sm_120"])
    with emulated("sm_100") as launched, tiles.planned_for(with_tiles):
        case.run()
    assert any(launch.kernel.endswith("_mxfp8_triton_kernel") for launch in launched)
