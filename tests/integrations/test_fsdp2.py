"""FSDP2 (`fully_shard`) over gloo: numbers against float64, and what is refused."""

import re

import pytest
from support.compiler import in_graphs
from support.grids import only_pairs
from support.systems import MODES, SYSTEMS
from support.world import launch

(ROW,) = [system for system in SYSTEMS if "fully_shard" in system.name]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_gradients_and_two_steps_in_every_cell(world_size, tmp_path):
    """`fsdp2_cells.py` defines the cells."""
    for names, failures in launch("integrations.fsdp2_cells:cells", world_size, tmp_path, only_pairs()):
        assert len(names) == len(set(names)) == (11 if only_pairs() else 38)
        assert failures == {}


@pytest.mark.slow
def test_copies_of_gathered_weights_serve_a_step(tmp_path):
    for found in launch("integrations.fsdp2_cells:kept_copies", 2, tmp_path):
        assert found["bf16"] != found["mxfp8"]
        for recipe, ways in found.items():
            assert len(ways) == 3
            for name, experts in ways.items():
                assert experts == ways["for every use, reshard=True"], (recipe, name)


@in_graphs
def test_compiled_experts_accumulate_in_fp32(tmp_path):
    (found,) = launch("integrations.fsdp2_cells:compiled", 1, tmp_path)
    assert len(found) == 3
    assert all(far < 2e-2 for far in found.values()), found


MESSAGES = {
    "main_grad": r"fc1_weight: FSDP2 .* would miss one in main_grad; use accumulate_wgrad='grad' without delay",
    "main_grad, attached to gathered parameters": r"fc1_weight: FSDP2 .* would miss one in main_grad",
    "auto, attached to gathered parameters": r"fc1_weight: FSDP2 .* would miss one in main_grad",
    "delayed, main_grad": r"fc1_weight: FSDP2 .* would miss a delayed gradient",
    "delayed, .grad": r"fc1_weight\[0\]: FSDP2 .* would miss a delayed gradient",
    "fc1 by itself, freed after its forward": r"^fc1: expected its weights to stay .* \(use reshard_after_forward",
    "buffer": r"params\[0\]: expected a plain tensor; got a DTensor \(FSDP2 reduces \.grad",
    "delayed, buffer": r"params\[0\]: expected a plain tensor; got a DTensor \(FSDP2 reduces \.grad",
    "accumulate_in without fully_shard": r"model: expected parts that went through fully_shard; got none",
    "accumulate_in of parameters": r"model: expected a torch\.nn\.Module; got generator",
    "accumulate_in, reduced in bf16": r"expected MixedPrecisionPolicy\(reduce_dtype=torch\.float32\)",
}


def test_what_fsdp2_would_miss_is_refused(tmp_path):
    (found,) = launch("integrations.fsdp2_cells:refusals", 1, tmp_path)
    assert found.pop("a copy is not gathered") is None
    assert found.keys() == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert re.search(message, found[name] or ""), (name, found[name])
    for mode in MODES:  # as the table says; the other modes are cells
        assert ROW.refused.get(mode, "nothing") in found.get(mode, "nothing")
    assert set(ROW.refused) == set(MODES) & set(MESSAGES)
