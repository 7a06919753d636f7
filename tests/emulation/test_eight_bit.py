"""Whole layers of 8-bit recipes, forward and backward into float32 main_grads: compiled kernels against the CPU."""

import pytest
from emulation.layers import emulated

from api.test_eight_bit import Layer, distances
import fusedmlp


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("wgrad", ["recipe"])
def test_layer(wgrad):
    layer = Layer()
    want = layer.results(recipe="fp8_block", impl="torch", wgrad=wgrad)
    with emulated("sm_90") as launched:
        got = layer.results(recipe="fp8_block", impl="triton", wgrad=wgrad)
    print(sorted({x.kernel for x in launched}))
    print(distances(got, want))
    assert 0
