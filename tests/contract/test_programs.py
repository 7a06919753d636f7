"""Random training programs, each with fusedmlp and with plain PyTorch in float64: `programs.py` writes them."""

import random

import pytest
import torch
from contract import program_worlds, programs

from fusedmlp.operators import ops

FIXED = 100


def run_all(seeds, *, compiled=False):
    for seed in seeds:
        programs.run(programs.write(seed, compiled=compiled))


@pytest.mark.parametrize("first", range(0, FIXED, 20))
def test_fixed_programs(first):
    run_all(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_fresh_programs(part):
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds from {first}")
    run_all(range(first, first + 150))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("fresh", [False, True])
def test_compiled_programs(fresh):
    first = random.SystemRandom().randrange(10**9) if fresh else 0
    print(f"seeds from {first}")
    for seed in range(first, first + 5):
        torch.compiler.reset()
        run_all([seed], compiled=True)


def test_fixed_programs_have_every_feature():
    few, many = (set().union(*(programs.write(seed).features for seed in range(n))) for n in (FIXED, 1000))
    assert few == many


def test_a_wrong_gradient_fails_with_a_program_that_fails_when_pasted(monkeypatch):
    wgrad = ops.grouped_wgrad_

    def stores(outs, probs, dy, x, offsets, dy_row_ids, x_row_ids, accumulate, recipe, impl):
        return wgrad(outs, probs, dy, x, offsets, dy_row_ids, x_row_ids, False, recipe, impl)

    monkeypatch.setattr(ops, "grouped_wgrad_", stores)
    with pytest.raises(AssertionError, match=r"# Program \d+\.") as failure:
        run_all(range(FIXED))
    source = failure.value.args[0].partition("\n\n# Program")[2]
    with pytest.raises(AssertionError, match="differs by"):
        exec("# Program" + source, {})


def test_none_is_not_zeros():
    worlds = program_worlds.Plain(torch.float64), program_worlds.Plain(torch.float64)
    worlds[0].see("grad", None)
    worlds[1].see("grad", torch.zeros(2))
    with pytest.raises(AssertionError, match="grad: expected tensor"):
        program_worlds.errors(*worlds)
