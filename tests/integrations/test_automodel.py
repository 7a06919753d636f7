"""NeMo Automodel's own package, its experts converted; `automodel_experts.py` has the checks."""

import re

import pytest
from support.frameworks import LIBRARIES
from support.world import launch

MESSAGES = {
    "no experts": r"ValueError: model: expected a module that contains GroupedExperts; got a Linear without",
    "TransformerEngine": r'NotImplementedError: 1: .*; got GroupedExpertsTE, .*BackendConfig\(experts="torch_mm"\)',
    "MoK": r"NotImplementedError: 1: expected experts of class .*; got GroupedExpertsMoK",
    "LoRA": r"NotImplementedError: 1: expected experts of class .*; got GroupedExpertsLoRA",
    "mxfp8": r'NotImplementedError: 1: .*; got "torch_mm_mxfp8".*recipe="mxfp8"',
    "another activation": r"NotImplementedError: 1: expected the activation of its config, 'swiglu'; got <function",
    "other options": r"NotImplementedError: 1: expected the activation of its config, .*; got functools.partial",
    "another forward": r"NotImplementedError: 1: expected the forward of its class",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["experts", "parallel"])
def test_converted_experts_equal_automodels(part, tmp_path):
    assert LIBRARIES.is_dir(), "run: make .frameworks/.ready"
    for found in launch("integrations.automodel_experts:check", 1 if part == "experts" else 2, tmp_path, part):
        if part == "experts":
            names, refused = found
            assert {"experts.gate_and_up_projs", "experts.down_projs"} <= set(names)
            assert refused.keys() == MESSAGES.keys()
            for name, message in MESSAGES.items():
                assert re.match(message, refused[name]), refused[name]
