"""Weights that are DTensors (expert parallelism), alone and under FSDP2, over gloo: numbers against float64."""

import pytest
from support.world import launch


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "world_size", "count"), [(False, 2, 12), (True, 4, 24)])
def test_gradients_of_shards(fsdp, world_size, count, tmp_path):
    """`sharded_experts.py` defines the cells. With "off" PyTorch adds every micro-batch but the first."""
    for failures, number, operators in launch("integrations.sharded_experts:cells", world_size, tmp_path, fsdp):
        assert failures == {}
        assert number == count
        assert operators["off"] > 0
        assert operators["grad"] == operators["auto"] == 0
