"""Treatment of gradients by PyTorch itself: it takes their memory, copies and adds nothing, and keeps their dtype."""

import pytest
import torch
from support.contract_helpers import operators_under_accumulate_grad
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)
LAYOUTS = pytest.mark.parametrize("layout", ["out_in", "in_out"])


HOOKS = {  # on a parameter or its AccumulateGrad node
    "no hook": lambda param, node: None,
    "tensor hook": lambda param, node: param.register_hook(lambda grad: None),
    "post-accumulate hook": lambda param, node: param.register_post_accumulate_grad_hook(lambda p: None),
    "node pre-hook": lambda param, node: node.register_prehook(lambda grads: None),
    "node post-hook": lambda param, node: node.register_hook(lambda inputs, outputs: None),
}


def large_allocations(run, size):
    """How many CPU allocations of at least `size` bytes happened."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sizes
    return sum(s >= size for s in sizes)


@LAYERS
@LAYOUTS
@pytest.mark.parametrize("mode", ["off", "grad"])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_memory_that_the_kernel_wrote_becomes_grad(
    kind, packed, layout, mode, hook, wgrad_gemms, make_layer, assert_close
):
    layer = make_layer(kind, packed, layout=layout)
    nodes = [get_gradient_edge(param).node for param in layer.params]  # kept alive, with their hooks
    for param, node in zip(layer.params, nodes, strict=True):
        HOOKS[hook](param, node)
    layer.backward(accumulate_wgrad=mode)
    assert [g.data_ptr() for g in layer.grads()] == wgrad_gemms.pointers
    assert all(g.stride() == p.stride() for g, p in zip(layer.grads(), layer.params, strict=True))
    assert not any(accumulate for *_, accumulate in wgrad_gemms.calls)
    assert_close(layer.grads(), layer.wgrads())


def test_a_strided_parameter_gets_a_grad_of_its_strides(wgrad_gemms, make_layer, assert_close):
    layer = make_layer("linear")
    layer.params[0].data = layer.params[0].detach().transpose(1, 2).contiguous().transpose(1, 2)
    layer.backward()
    assert layer.params[0].grad.stride() == layer.params[0].stride() != (20, 4, 1)
    assert layer.grads()[0].data_ptr() == wgrad_gemms.pointers[0]
    assert_close(layer.grads(), layer.wgrads())


@LAYERS
@pytest.mark.parametrize(
    "case", ["off", "grad", "grad, existing", "main_grad", "main_grad, attribute", "off, existing"]
)
def test_accumulate_grad_runs_no_operator(case, kind, packed, make_layer):
    """In mode "off" it adds to an existing .grad, which shows that the profiler would show an addition."""
    layer = make_layer(kind, packed)
    if "main_grad" in case:
        layer.attach(False if "attribute" in case else None)
    for param in layer.params if "existing" in case else []:
        param.grad = torch.zeros_like(param)
    nodes, below = operators_under_accumulate_grad(lambda: layer.backward(accumulate_wgrad=case.split(",")[0]))
    assert nodes == len(layer.params)
    changes = [name for name in below if name in ("aten::clone", "aten::copy_", "aten::add_", "aten::add")]
    assert changes == ["aten::add_"] * nodes * (case == "off, existing")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("case", "expected"), [("grad", 0), ("main_grad", 0), ("off", 2), ("grad, none yet", 2)])
def test_no_allocation_of_a_weights_size(case, expected, packed, make_layer):
    layer = make_layer("mlp", packed, hidden=128, ffn=128)
    if case == "main_grad":
        layer.attach(False)
    elif case != "grad, none yet":
        layer.backward()
    x, dy = layer.batch(1)
    y = layer(x, accumulate_wgrad=case.split(",")[0])
    smallest = min(p.nbytes for p in layer.params)
    count = large_allocations(lambda: y.backward(dy), smallest)
    assert count == expected * (1 if packed else 3)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", ["off", "grad"])
def test_grad_dtype_fp32_on_a_bf16_parameter(mode, packed, wgrad_gemms, make_layer, assert_close):
    layer = make_layer("mlp", packed, dtype=torch.bfloat16)
    for param in layer.params:
        param.grad_dtype = torch.float32
    layer.backward(1, accumulate_wgrad=mode)
    assert all(g.dtype == torch.float32 for g in layer.grads())
    assert [g.data_ptr() for g in layer.grads()] == wgrad_gemms.pointers
    layer.backward(2, accumulate_wgrad=mode)
    assert all(g.dtype == torch.float32 for g in layer.grads())
    assert_close(layer.grads(), layer.wgrads(1, 2), dtype=torch.bfloat16)


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_with_either_main_grad(kind, packed, dtype, make_layer, assert_close):
    layer = make_layer(kind, packed, dtype=torch.bfloat16)
    before = layer.attach(dtype=dtype)
    layer.backward()
    assert all(m.dtype == dtype for m in layer.main_grads())
    expected = [b.double() + w for b, w in zip(before, layer.wgrads(), strict=True)]
    assert_close(layer.main_grads(), expected, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["mlp", "linear", "moe"])
def test_bf16_micro_batches_are_summed_in_fp32(kind, make_layer, assert_close):
    """A main_grad of 1000 keeps additions of 1e-4; in bf16 they would all be lost."""
    layer = make_layer(kind, dtype=torch.bfloat16)
    layer.attach()
    for main in layer.main_grads():
        main.fill_(1000.0)
    x, dy = layer.batch(1)
    for _ in range(20):
        layer(x).backward(dy / 64)
    expected = [20 * w / 64 for w in layer.wgrads()[: len(layer.params)]]
    assert_close([m - 1000 for m in layer.main_grads()], expected, dtype=torch.bfloat16)
