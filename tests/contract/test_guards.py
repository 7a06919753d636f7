"""The guards of the gradient contract: each is an error, or a gradient that stays right. Here are 1, 3, 4 and 5.

1. No view of `main_grad` or of a reused buffer is returned. 2. A dummy holds zeros: test_dummy.py. 3. `main_grad` is
written only if the engine accumulates. 4. A `main_grad` of the wrong shape, device or dtype, or that requires grad, is
refused. 5. So is fusion that is asked for and impossible. 6. So is a second derivative: test_second_order.py.
In test_guards_of_use.py: 7. `torch.func` transforms. 9. A tensor hook on a fused weight. 12. `detect_anomaly` stays
quiet. In test_guards_of_reducers.py: 8. DDP with a parameter that it reduces. In test_guards_of_reuse.py: 10. Both uses
of a tied weight count. 11. A backward that runs twice (`retain_graph`) adds twice.
"""

from functools import partial

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, unchanged

import fusedmlp


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@PACKED
@pytest.mark.parametrize("way", ["off", "grad", "main_grad", "delayed", "autograd.grad"])
def test_guard_1_no_view_is_left_in_grad_or_handed_over(way, packed, make_layer):
    layer, seen = make_layer("mlp", packed), []
    options = {"accumulate_wgrad": {"delayed": "off", "autograd.grad": "auto"}.get(way, way)}
    for seed in range(3):
        layer.attach(False)
        for param in layer.params:
            param.grad = None
        if way == "autograd.grad":
            x, dy = layer.batch(seed)
            grads = torch.autograd.grad(layer(x), layer.params, dy)
        else:
            layer.backward(seed, delayed=way == "delayed", **options)
            grads = layer.grads()
        assert not {storage(g) for g in grads} & {storage(m) for m in layer.main_grads()}
        if way != "main_grad":  # in which .grad is a dummy
            assert all(g._base is None and g.untyped_storage().nbytes() == g.nbytes for g in grads)
            seen += grads
    assert len({storage(g) for g in seen}) == len(seen)  # memory is not reused while an earlier gradient is alive


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,), ()], ids=["both", "fc1", "fc2", "x"])
@pytest.mark.parametrize("way", ["autograd.grad", "backward(inputs=...)"])
def test_guard_3_only_what_the_engine_accumulates_is_written(way, wanted, wgrad_gemms, make_layer, assert_close):
    layer = make_layer()
    before, wgrads, (x, dy) = layer.attach(False), layer.wgrads(), layer.batch(1)
    y = layer(x.requires_grad_())
    inputs = [layer.params[i] for i in wanted] or [x]
    if way == "autograd.grad":
        handed, added = torch.autograd.grad(y, inputs, dy), ()
        assert_close(handed[: len(wanted)], [wgrads[i] for i in wanted])
    else:
        y.backward(dy, inputs=inputs)
        added = wanted
        assert (x.grad is None) == bool(wanted)
    for i, (param, main, wgrad) in enumerate(zip(layer.params, before, wgrads, strict=True)):
        if i in added:
            assert_close([param.main_grad], [main + wgrad])
        else:
            assert torch.equal(param.main_grad, main)
        assert param.grad_added_to_main_grad is (i in added)
        assert (param.grad is None) == (i not in added)
    assert sorted(name for name, *_ in wgrad_gemms.calls) == [("fc1", "fc2")[i] for i in wanted]


WRONG = {  # of a weight [5, 4], or of all experts': what main_grad becomes, and the message
    "shape": (lambda t: t[..., :3, :], r"main_grad of shape \(.*5, 4\); got \(.*3, 4\)"),
    "transposed": (lambda t: t.mT.contiguous(), r"main_grad of shape \(.*5, 4\); got \(.*4, 5\)"),
    "viewed": (lambda t: t.view(*t.shape[:-2], 4, 5), r"main_grad of shape \(.*5, 4\); got \(.*4, 5\)"),
    "device": (lambda t: t.to("meta"), "main_grad on cpu; got meta"),
    "float64": (lambda t: t.double(), r"main_grad in torch\.float32; got torch\.float64"),
    "float16": (lambda t: t.half(), r"main_grad in torch\.float32; got torch\.float16"),
    "int32": (lambda t: t.view(torch.int32), r"main_grad in torch\.float32; got torch\.int32"),
    "requires grad": (lambda t: t.requires_grad_(), "main_grad with requires_grad=False; got True"),
    "expanded": (lambda t: t[..., :1, :].expand(t.shape), "a writable main_grad; got an expanded one"),
    "shared memory": (
        lambda t: t.as_strided(t.shape, (1,) * t.dim()),
        "main_grad whose elements each have memory of their own",
    ),
    "sparse": (lambda t: t.to_sparse(), r"main_grad to be dense; got one in torch\.sparse_coo"),
    "sparse CSR": (lambda t: t.to_sparse_csr(), r"main_grad to be dense; got one in torch\.sparse_csr"),
    "no tensor": (lambda t: "main", "main_grad to be a tensor; got str 'main'"),
    "None": (lambda t: None, 'accumulate_wgrad="main_grad" expects a main_grad attribute'),
}
FOUND = [(wrong, when) for wrong in WRONG for when in ("in forward", "later")]
FOUND += [(wrong, "in backward") for wrong in WRONG if wrong != "None"]  # None is no main_grad in mode "auto"
FOUND += [(wrong, "later, main_grad.data") for wrong in ("shape", "viewed", "int32", "shared memory")]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("expert", [None, 0, 2])
@DELAYED
@pytest.mark.parametrize(("wrong", "when"), FOUND)
def test_guard_4_a_wrong_main_grad_is_named(wrong, when, delayed, expert, make_layer):
    """Mode "main_grad" finds it in the first forward, mode "auto" and later steps in backward."""
    layer = make_layer("linear", packed=expert is None)
    queue, mode = fusedmlp.WgradQueue() if delayed else None, "auto" if when == "in backward" else "main_grad"
    layer.attach(False)
    if when.startswith("later"):
        layer.backward(1, accumulate_wgrad=mode)
        for each in layer.params:
            each.grad_added_to_main_grad = False
    held, param = [main.clone() for main in layer.main_grads()], layer.params[expert or 0]
    change, message = WRONG[wrong]
    whole = param.main_grad.detach()
    if when.endswith(".data"):
        param.main_grad.data = change(whole)
    else:
        param.main_grad = change(whole)
    place = "weight" if expert is None else rf"weight\[{expert}\]"
    run = partial(layer, layer.batch(2)[0]) if when == "in forward" else partial(layer.backward, 2)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"{place}: (expected )?{message}"):
        run(accumulate_wgrad=mode, wgrad_queue=queue)
    assert not queue
    param.main_grad = whole
    assert unchanged(layer.main_grads(), held)
    assert not any(each.grad_added_to_main_grad for each in layer.params)


UNLIKE = {  # the main_grad of expert 2, and the message
    "dtype": (torch.Tensor.bfloat16, "weight: expected all experts to accumulate in one dtype"),
    "strides": (
        lambda t: t.t().contiguous().t(),
        r"weight\[2\]: expected a gradient with the strides of expert 0's, \(4, 1\)",
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_guard_4_experts_whose_main_grads_no_gemm_writes_together(unlike, make_layer):
    layer = make_layer("linear", packed=False, dtype=torch.bfloat16)
    layer.attach()
    change, message = UNLIKE[unlike]
    layer.params[2].main_grad = change(layer.params[2].main_grad)
    before = [main.clone() for main in layer.main_grads()]
    with pytest.raises(ValueError, match=message):
        layer.backward()
    assert unchanged(layer.main_grads(), before)


@PACKED
@pytest.mark.parametrize("mode", ["main_grad", "auto"])
def test_guard_5_a_weight_that_is_no_leaf_is_refused(mode, packed, make_layer):
    layer = make_layer("mlp", packed)
    layer.groups[-1] = [p * 2 for p in layer.groups[-1]]
    for weight in (weight for group in layer.groups for weight in group):
        weight.main_grad = torch.zeros_like(weight)
    name = "fc2_weight" + ("" if packed else r"\[0\]")
    with pytest.raises(RuntimeError, match=f"{name}: accumulate_wgrad='{mode}' needs a leaf parameter"):
        layer.backward(accumulate_wgrad=mode)


@pytest.mark.parametrize("expert", [0, 1])
def test_guard_5_a_weight_that_is_no_leaf_any_more_is_refused(expert, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach()
    layer.backward(1, accumulate_wgrad="main_grad")
    layer.params[expert].requires_grad_(False).mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match=rf"weight\[{expert}\]: .* needs a leaf parameter"):
        layer(layer.batch(2)[0], accumulate_wgrad="main_grad")


@pytest.mark.parametrize(("frozen", "named"), [([], "1 and 0"), ([0], "1 and 2")])
def test_guard_5_auto_with_main_grad_on_some_experts_is_refused(frozen, named, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach()
    for i in frozen:
        layer.params[i].requires_grad_(False)
    layer.params[1].main_grad = None
    with pytest.raises(
        ValueError, match=rf"on all experts or on none; experts {named} differ \(after experts have been un"
    ):
        layer.backward()


def test_guard_5_a_frozen_weight_needs_no_main_grad(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach()
    layer.params[1].requires_grad_(False)
    del layer.params[1].main_grad
    layer.backward(accumulate_wgrad="main_grad")
    assert_close([layer.params[0].main_grad], [before[0] + layer.wgrads()[0]])
