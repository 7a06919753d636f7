"""Compiled kernels of batch-invariant layers: bits of a row alone and among others. Without the mode, tiles for short
loads and paths for odd addresses give other bits.
"""

import pytest
import torch
from emulation.layers import emulated
from ptx_emulator.ptx import ORDERS
from support import invariance
from support.invariance import Layer

BF16 = {"H": 128, "F": 64, "dtype": torch.bfloat16, "impl": "triton"}
LAYERS = {
    "bf16": BF16,
    "geglu bias": {**BF16, "activation": "geglu", "bias": True},
    "fp8_block": {**BF16, "F": 128, "recipe": "fp8_block"},
}
# Target, layer, and whether kernels are warp-specialized.
CELLS = [
    ("sm_90", "bf16", True),
    ("sm_90", "geglu bias", True),
    ("sm_90", "fp8_block", True),
    ("sm_90", "bf16", False),
    ("sm_80", "bf16", False),
    ("sm_80", "geglu bias", False),
]


@pytest.mark.parametrize("function", ["grouped_mlp", "moe_experts", "grouped_linear"])
@pytest.mark.parametrize(("target", "layer", "warp_specialized"), CELLS)
def test_rows_alone_and_among_others(function, target, layer, warp_specialized):
    with emulated(target, warp_specialized=warp_specialized, orders=ORDERS[:1]) as launched:
        assert invariance.check(Layer(function, **LAYERS[layer])) == 54
    names = " ".join(launch.kernel for launch in launched)
    assert ("warp_specialized" in names or "fp8_block" in names) == warp_specialized


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_without_the_mode_bits_differ(target):
    with emulated(target, warp_specialized=True, orders=ORDERS[:1]):
        with pytest.raises(AssertionError, match="dprobs"):
            invariance.check(Layer("grouped_mlp", **BF16, batch_invariant=False), rows=(0, 77))
