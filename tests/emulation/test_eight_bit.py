"""Whole layers of 8-bit recipes, forward and backward into float32 main_grads: compiled kernels against the CPU."""

import pytest
from api.test_eight_bit import COUNTS, GPT_OSS, Layer, distances
from emulation.layers import emulated

import fusedmlp

TARGETS = {"fp8_block": "sm_90", "mxfp8": "sm_100"}
# Sums in another order round a few values of h, y and dx to another bf16. No layer has biases: the CPU rounds before it
# adds one, and once more.
ALLOWED, ALLOWED_OF_WGRAD = 1e-4, 1e-6
LAYERS = {
    "swiglu": {},
    "gpt-oss, list of experts": {"activation": GPT_OSS, "packed": False},
    "wgrad in bf16": {},
    "two micro-batches": {},
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", TARGETS)
def test_layer(recipe, kind):
    layer = Layer(**LAYERS[kind])
    options = {"recipe": recipe, "wgrad": "bf16" if kind == "wgrad in bf16" else "recipe"}
    if kind == "two micro-batches":
        options |= {"wgrad_queue": fusedmlp.WgradQueue(fuse_microbatches=True), "microbatches": 2}
    want = layer.results(impl="torch", **options)
    with emulated(TARGETS[recipe]) as launched:
        got = layer.results(impl="triton", **options)
    for name, distance in distances(got, want).items():
        assert distance < (ALLOWED_OF_WGRAD if name in ("dfc1", "dfc2") else ALLOWED), (name, distance)
    assert not got["y"][sum(COUNTS) :].any()
    assert not got["dfc1"][1].any()  # no rows
    kernels = [launch.kernel for launch in launched]
    in_8_bits = [f"grouped_gemm_{recipe}_kernel"] * 4 * options.get("microbatches", 1)
    if kind != "wgrad in bf16":
        in_8_bits += [f"grouped_wgrad_{recipe}_kernel"] * 2
    assert sorted(kernel for kernel in kernels if recipe in kernel) == in_8_bits
