"""Treatment of gradients by PyTorch itself: it takes their memory, fires hooks, recomputes, copies and adds nothing."""

from functools import partial

import pytest
import torch
from support.contract_helpers import operators_under_accumulate_grad
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fusedmlp

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)
LAYOUTS = pytest.mark.parametrize("layout", ["out_in", "in_out"])


def accumulate_node(param):
    return param.view_as(param).grad_fn.next_functions[0][0]


def hook(kind, param, alive):
    """Register a hook of some kind on a parameter; what must stay alive is appended to `alive`."""
    if kind == "tensor hook":
        param.register_hook(lambda grad: None)
    elif kind == "post-accumulate hook":
        param.register_post_accumulate_grad_hook(lambda p: None)
    elif kind == "node pre-hook":
        alive.append(accumulate_node(param))
        alive[-1].register_prehook(lambda grads: None)
    elif kind == "node post-hook":
        alive.append(accumulate_node(param))
        alive[-1].register_hook(lambda inputs, outputs: None)


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
@pytest.mark.parametrize("hooks", ["no hook", "tensor hook", "post-accumulate hook", "node pre-hook", "node post-hook"])
def test_the_memory_that_the_kernel_wrote_becomes_grad(
    kind, packed, layout, mode, hooks, wgrad_gemms, make_layer, assert_close
):
    layer, alive = make_layer(kind, packed, layout=layout), []
    for param in layer.params:
        hook(hooks, param, alive)
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
@LAYOUTS
@pytest.mark.parametrize("case", ["off", "grad", "grad, existing", "main_grad", "main_grad, attribute"])
def test_accumulate_grad_runs_no_operator(kind, packed, layout, case, make_layer):
    layer = make_layer(kind, packed, layout=layout)
    if "main_grad" in case:
        layer.attach(False if "attribute" in case else None)
    for param in layer.params if "existing" in case else []:
        param.grad = torch.zeros_like(param)
    nodes, below = operators_under_accumulate_grad(lambda: layer.backward(accumulate_wgrad=case.split(",")[0]))
    assert nodes == len(layer.params)
    assert not {"aten::clone", "aten::copy_", "aten::add_", "aten::add"} & set(below)


def test_accumulate_grad_of_an_existing_grad_adds_when_off(make_layer):
    """The profiler does show the additions that mode "grad" saves."""
    layer = make_layer()
    layer.backward(1)
    nodes, below = operators_under_accumulate_grad(lambda: layer.backward(2, accumulate_wgrad="off"))
    assert nodes == below.count("aten::add_") == 2


@LAYERS
@LAYOUTS
def test_grad_adds_in_place(kind, packed, layout, wgrad_gemms, make_layer, assert_close):
    layer = make_layer(kind, packed, layout=layout)
    layer.backward(1, accumulate_wgrad="grad")
    held = layer.grads()
    layer.backward(2, 3, accumulate_wgrad="grad")
    assert all(g is h for g, h in zip(layer.grads(), held, strict=True))
    assert wgrad_gemms.pointers == 3 * [g.data_ptr() for g in held]
    assert_close(layer.grads(), layer.wgrads(1, 2, 3))


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


@LAYERS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("attribute", [None, False])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant checkpoint", "save_on_cpu", "checkpoint in save_on_cpu"])
def test_recomputed_and_offloaded_weights_still_reach_main_grad(kind, packed, how, attribute, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach(attribute)
    x, dy = layer.batch(1)
    x.requires_grad_()
    if how == "save_on_cpu":
        with save_on_cpu():
            y = layer(x)
    elif how == "checkpoint in save_on_cpu":
        with save_on_cpu():
            y = checkpoint(layer, x, use_reentrant=False)
    else:
        y = checkpoint(layer, x, use_reentrant=how == "reentrant checkpoint")
    y.backward(dy)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(), strict=True)])
    assert all((p.grad is None) == (attribute is None) for p in layer.params)


@LAYERS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_weights_add_to_grad(kind, packed, use_reentrant, make_layer, assert_close):
    layer = make_layer(kind, packed)
    layer.backward(1, accumulate_wgrad="grad")
    pointers = [g.data_ptr() for g in layer.grads()]
    x, dy = layer.batch(2)
    y = checkpoint(partial(layer, accumulate_wgrad="grad"), x.requires_grad_(), use_reentrant=use_reentrant)
    y.backward(dy)
    assert [g.data_ptr() for g in layer.grads()] == pointers
    assert_close(layer.grads(), layer.wgrads(1, 2))


@LAYERS
@LAYOUTS
@pytest.mark.parametrize("mode", ["main_grad", "grad", "off"])
def test_three_micro_batches_equal_plain_autograd(kind, packed, layout, mode, make_layer, assert_close):
    layer = make_layer(kind, packed, layout=layout)
    if mode == "main_grad":
        layer.attach(False)
    layer.backward(1, accumulate_wgrad=mode, overwrites=True)
    layer.backward(2, 3, accumulate_wgrad=mode)
    assert_close(layer.main_grads() if mode == "main_grad" else layer.grads(), layer.wgrads(1, 2, 3))


@LAYERS
def test_an_unused_output_leaves_everything_alone(kind, packed, make_layer):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    x, _ = layer.batch(1)
    x.requires_grad_()
    layer(x)
    layer(x)
    (x[:3].sum() * 2).backward()
    assert all(torch.equal(m, b) for m, b in zip(layer.main_grads(), before, strict=True))
    assert all(p.grad is None and p.grad_added_to_main_grad is False for p in layer.params)


@LAYERS
@pytest.mark.parametrize("attached", [False, True])
def test_frozen_weights_cost_no_gemm(kind, packed, attached, wgrad_gemms, make_layer, assert_close):
    layer = make_layer(kind, packed, bias=True)
    before = layer.attach(False) if attached else []
    for param in layer.params:
        param.requires_grad_(False)
    x, dy = layer.batch(1)
    layer(x.requires_grad_()).backward(dy)
    assert wgrad_gemms.calls == []
    assert x.grad.count_nonzero() > 0
    assert_close([b.grad for b in layer.biases], layer.wgrads()[len(layer.params) :])
    assert all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=False))
    assert all(p.grad is None for p in layer.params)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("frozen", [0, 1])
def test_one_frozen_weight_of_two_costs_no_gemm(frozen, packed, wgrad_gemms, make_layer, assert_close):
    layer = make_layer("mlp", packed)
    for param in layer.groups[frozen]:
        param.requires_grad_(False)
    layer.backward()
    assert [name for name, *_ in wgrad_gemms.calls] == [("fc2", "fc1")[frozen]]
    for param, wgrad in zip(layer.params, layer.wgrads(), strict=True):
        if param.requires_grad:
            assert_close([param.grad], [wgrad])
        else:
            assert param.grad is None


@pytest.mark.parametrize("mode", ["main_grad", "grad", "off"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_one_frozen_expert_is_left_alone(frozen, mode, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    before = layer.attach(False) if mode == "main_grad" else [torch.ones_like(p) for p in layer.params]
    for param, grad in zip(layer.params, before if mode == "grad" else [], strict=False):
        param.grad = grad.clone()
    layer.params[frozen].requires_grad_(False)
    layer.backward(accumulate_wgrad=mode)
    for i, (param, wgrad) in enumerate(zip(layer.params, layer.wgrads(), strict=True)):
        start = 0 if mode == "off" else before[i]
        found = param.main_grad if mode == "main_grad" else param.grad
        if i != frozen:
            assert_close([found], [start + wgrad])
        else:
            assert found is None if mode == "off" else torch.equal(found, before[i])


@pytest.mark.parametrize("queue", [None, fusedmlp.WgradQueue()], ids=["at once", "delayed"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_grad_on_some_experts_only(missing, queue, nan_in_empty, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    for param in layer.params:
        param.grad = torch.ones_like(param)
    layer.params[missing].grad = None
    layer.backward(accumulate_wgrad="grad", wgrad_queue=queue)
    if queue is not None:
        queue.run()
    assert_close(layer.grads(), [w + (i != missing) for i, w in enumerate(layer.wgrads())])


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


# Why a GEMM adds to `.grad` under a lock and returns None, and does not clear it and return the sum: AccumulateGrad
# would take the tensor back without a lock, but the following differs. In threads, moreover, AccumulateGrad may be
# adding to the `.grad` that is being cleared, and raises.


class Returned(torch.autograd.Function):
    """`x @ w.T`, whose backward adds to an existing `.grad`, clears it, and returns the sum."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(x)
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        (x,), param = ctx.saved_tensors, ctx.next_functions[0][0].variable
        grad, param.grad = param.grad, None
        return grad.addmm_(dy.T, x), None


def returned_sum(before=10.0):
    w = torch.nn.Parameter(torch.zeros(4, 3))
    w.grad = torch.full_like(w, before)
    return w, lambda: Returned.apply(w, torch.ones(5, 3)).sum().backward()


def test_a_returned_sum_is_taken_back_and_tensor_hooks_change_all_of_it():
    w, backward = returned_sum()
    address = w.grad.data_ptr()
    backward()
    assert w.grad.data_ptr() == address
    assert (w.grad == 15).all()
    w.register_hook(lambda grad: 3 * grad)
    backward()
    assert (w.grad == 3 * (15 + 5)).all()  # 15 + 3 * 5 would be right


def test_a_returned_sum_is_copied_if_something_else_refers_to_it():
    """As a bucket of DDP does, and a MainGradBuffer."""
    w, backward = returned_sum()
    view = w.grad
    backward()
    assert w.grad.data_ptr() != view.data_ptr()
