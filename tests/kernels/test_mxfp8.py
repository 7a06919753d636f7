"""Kernels of recipe mxfp8 in plain Triton, with the tiles of the GPUs that they are for: products by themselves, and
whole layers. The interpreter multiplies dequantized operands, so it shows what is loaded, scaled and stored.
"""

from contextlib import contextmanager

import pytest
from emulation.test_eight_bit import ALLOWED

from bench.cases import cases, tiles
from fusedmlp.kernels.tiles import select, table

TARGETS = ("sm_120", "gfx950")
CELLS = [pytest.param(name, case, id=f"{name}-{case.id}") for name in TARGETS for case in cases.of_recipes(name)]


@pytest.mark.parametrize(("target", "case"), CELLS)
def test_products(target, case):
    with tiles.planned_for(select.Target(target, 3, table.TABLES[target])):
        case.run()
