"""Costs of a step and a tile of each compiled pass equal the table's: worse ones are a mistake, better ones need a new
table.
"""

import json

import pytest
import triton
from support import forked

from bench.proof import budgets
from fusedmlp.kernels.tiles import table

GEMM = {"instructions": 121.0, "mma": 4.0, "mma_in_flight": 1.0, "loads_in_flight": None, "tile_stores": 2.0}


@pytest.mark.skipif(triton.__version__ != budgets.TRITON, reason=f"the table is of Triton {budgets.TRITON}")
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.exhaustive) for t in budgets.TARGET_NAMES]
)
def test_passes_cost_what_the_table_allows(target):
    code = f"import json; from bench.proof import budgets; print(json.dumps(budgets.measure({target!r})))"
    done = forked.run("-c", code)
    assert done.returncode == 0, done.stderr
    worse, different = budgets.changes(budgets.allowed(target), json.loads(done.stdout))
    assert worse == []
    assert different == [], "`python -m bench.proof.budgets` writes it into the table"


def test_every_pass_is_in_the_table():
    for target in budgets.TARGET_NAMES:
        names = [*table.PASSES]
        tiles = table.TABLES[target]
        warp_specialized = [
            f"{name}_warp_specialized"
            for name in names
            if any(key[:4] == (name, "warp_specialized", "bf16", "long") for key in tiles)
        ]
        eight_bit = [
            f"{key.kernel}_{key.format}" for key in tiles if key.format in table.RECIPES[target] and key.shape == "long"
        ]
        assert list(budgets.allowed(target)) == names + warp_specialized + eight_bit


@pytest.mark.parametrize(
    ("change", "worse", "different"),
    [
        ({}, [], []),
        ({"instructions": 122.0}, [], []),  # within the tolerance
        ({"instructions": 130.0}, ["gemm: instructions 121 -> 130"], []),
        ({"instructions": 100.0}, [], ["gemm: instructions 121 -> 100"]),
        ({"tile_stores": 3.0}, ["gemm: tile_stores 2 -> 3"], []),
        ({"mma_in_flight": 0.0}, ["gemm: mma_in_flight 1 -> 0"], []),
        ({"mma_in_flight": 2.0}, [], ["gemm: mma_in_flight 1 -> 2"]),
        ({"loads_in_flight": 2.0}, [], ["gemm: loads_in_flight - -> 2"]),
        ({"mma": 8.0}, [], ["gemm: mma 4 -> 8"]),
    ],
)
def test_what_is_worse(change, worse, different):
    assert budgets.changes({"gemm": GEMM}, {"gemm": GEMM | change}) == (worse, different)
