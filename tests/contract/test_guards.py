"""The guards of the gradient contract: each is an error, or a gradient that stays right. Here are 1 to 6.

1. No view of `main_grad` or of a reused buffer is returned. 2. A dummy holds zeros. 3. `main_grad` is written only if
the engine accumulates. 4. A `main_grad` of the wrong shape, device or dtype, or that requires grad, is refused. 5. So
is fusion that is asked for and impossible. 6. So is a second derivative.
In test_guards_of_use.py: 7. `torch.func` transforms. 8. DDP with a parameter that it reduces. 9. A tensor hook on a
fused weight. 12. `detect_anomaly` stays quiet. In test_guards_of_reuse.py: 10. Both uses of a tied weight count.
11. A backward that runs twice (`retain_graph`) adds twice.
"""

import pytest
import torch
from torch import Tensor

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unchanged(layer, before):
    return all(torch.equal(m, b) for m, b in zip(layer.main_grads(), before, strict=True))


@LAYERS
@pytest.mark.parametrize("mode", ["off", "grad", "main_grad"])
def test_guard_1_backward_never_leaves_a_view_in_grad(kind, packed, mode, make_layer):
    layer, seen = make_layer(kind, packed), []
    for seed in range(3):
        layer.attach(False)
        for param in layer.params:
            param.grad = None
        layer.backward(seed, accumulate_wgrad=mode)
        seen += layer.grads()
        assert not {storage(g) for g in layer.grads()} & {storage(m) for m in layer.main_grads()}
        if mode != "main_grad":
            assert all(g._base is None for g in layer.grads())
            assert all(g.untyped_storage().nbytes() == g.nbytes for g in layer.grads())
    if mode != "main_grad":  # memory is not reused while an earlier gradient is alive
        assert len({storage(g) for g in seen}) == len(seen)


@pytest.mark.parametrize("packed", [True, False])
def test_guard_1_autograd_grad_never_returns_a_view(packed, make_layer):
    layer, seen = make_layer("mlp", packed), []
    layer.attach(False)
    for seed in range(2):
        x, dy = layer.batch(seed)
        seen += torch.autograd.grad(layer(x), layer.params, dy)
    assert len({storage(g) for g in seen}) == len(seen)
    assert not {storage(g) for g in seen} & {storage(m) for m in layer.main_grads()}


def test_guard_1_delayed_grads_are_no_views(make_layer):
    layer, queue = make_layer("mlp", packed=False), fusedmlp.WgradQueue()
    layer.backward(wgrad_queue=queue)
    queue.run()
    assert len({storage(g) for g in layer.grads()}) == len(layer.params)
    assert all(g._base is None for g in layer.grads())
    assert all(g.untyped_storage().nbytes() == g.nbytes for g in layer.grads())


@LAYERS
@pytest.mark.parametrize("dense", ["0", "1"])
@pytest.mark.parametrize("delayed", [False, True])
def test_guard_2_a_dummy_is_never_uninitialised(kind, packed, dense, delayed, monkeypatch, make_layer):
    """`nan_in_empty` makes anything uninitialised NaN."""
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", dense)
    assert torch.empty(5).isnan().all()
    layer = make_layer(kind, packed, hidden=3, ffn=7)
    layer.attach(False)
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in layer.grads())
    if delayed:
        queue.clear()


@LAYERS
@pytest.mark.parametrize("mode", ["auto", "main_grad"])
def test_guard_3_autograd_grad_of_weights_returns_the_gradient(kind, packed, mode, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    x, dy = layer.batch(1)
    grads = torch.autograd.grad(layer(x, accumulate_wgrad=mode), layer.params, dy)
    assert_close(grads, layer.wgrads())
    assert unchanged(layer, before)
    assert all(p.grad is None and p.grad_added_to_main_grad is False for p in layer.params)


def test_guard_3_autograd_grad_leaves_an_existing_grad_alone(make_layer, assert_close):
    layer = make_layer()
    for param in layer.params:
        param.grad = torch.ones_like(param)
    x, dy = layer.batch(1)
    grads = torch.autograd.grad(layer(x, accumulate_wgrad="grad"), layer.params, dy)
    assert_close(grads, layer.wgrads())
    assert all(torch.equal(g, torch.ones_like(g)) for g in layer.grads())


@pytest.mark.parametrize("i", [0, 1])
def test_guard_3_autograd_grad_of_one_weight(i, wgrad_gemms, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    x, dy = layer.batch(1)
    grads = torch.autograd.grad(layer(x), [layer.params[i]], dy)
    assert_close(grads, [layer.wgrads()[i]])
    assert unchanged(layer, before)
    assert [name for name, *_ in wgrad_gemms.calls] == [("fc1", "fc2")[i]]


@LAYERS
@pytest.mark.parametrize("how", ["autograd.grad", "backward"])
def test_guard_3_a_gradient_of_x_alone_touches_no_weight(kind, packed, how, wgrad_gemms, make_layer):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x.requires_grad_())
    if how == "backward":
        y.backward(dy, inputs=[x])
        assert x.grad.count_nonzero() > 0
    else:
        torch.autograd.grad(y, [x], dy)
    assert unchanged(layer, before)
    assert all(p.grad is None and p.grad_added_to_main_grad is False for p in layer.params)
    assert wgrad_gemms.calls == []


@pytest.mark.parametrize("i", [0, 1])
def test_guard_3_backward_into_one_weight_fuses_that_one_only(i, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    x, dy = layer.batch(1)
    layer(x).backward(dy, inputs=[layer.params[i]])
    expected = [b.double() for b in before]
    expected[i] += layer.wgrads()[i]
    assert_close(layer.main_grads(), expected)
    assert [p.grad_added_to_main_grad for p in layer.params] == [i == 0, i == 1]
    assert [p.grad is None for p in layer.params] == [i != 0, i != 1]


@LAYERS
@pytest.mark.parametrize("mode", ["auto", "grad", "off"])
def test_guard_3_non_leaf_weights_get_the_gradient_itself(kind, packed, mode, make_layer, assert_close):
    layer = make_layer(kind, packed)
    leaves = layer.params
    doubled = [p * 2 for p in leaves]
    size = len(layer.groups[0])
    layer.groups = [doubled[i : i + size] for i in range(0, len(doubled), size)]
    for weight in doubled if mode != "auto" else []:
        weight.main_grad = torch.ones_like(weight)  # these modes ignore it
    layer.backward(accumulate_wgrad=mode)
    layer.params = doubled
    assert_close([p.grad for p in leaves], [2 * w for w in layer.wgrads()])


# Guard 4

BAD_MAIN_GRADS = {
    "shape": (lambda p: torch.zeros(p.shape[::-1]), r"main_grad of shape \(3, 4, 5\); got \(5, 4, 3\)"),
    "device": (lambda p: torch.zeros_like(p, device="meta"), r"main_grad on cpu; got meta"),
    "dtype": (lambda p: torch.zeros_like(p, dtype=torch.float64), r"main_grad in torch\.float32; got torch\.float64"),
    "low dtype": (lambda p: torch.zeros_like(p, dtype=torch.float16), r"got torch\.float16"),
    "requires_grad": (
        lambda p: torch.zeros_like(p, requires_grad=True),
        r"main_grad with requires_grad=False; got True",
    ),
    "expanded": (lambda p: torch.zeros(()).expand(p.shape), r"writable main_grad; got an expanded one"),
}


@pytest.mark.parametrize("mode", ["auto", "main_grad"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("bad", BAD_MAIN_GRADS)
def test_guard_4_a_wrong_main_grad_is_refused(bad, delayed, mode, make_layer):
    layer = make_layer()
    layer.attach(False)
    make, message = BAD_MAIN_GRADS[bad]
    layer.params[1].main_grad = make(layer.params[1])
    queue = fusedmlp.WgradQueue() if delayed else None
    with pytest.raises(ValueError, match=f"fc2_weight: expected .*{message}"):
        layer.backward(accumulate_wgrad=mode, wgrad_queue=queue)


@pytest.mark.parametrize("mode", ["auto", "main_grad"])
def test_guard_4_the_expert_is_named(mode, make_layer):
    layer = make_layer("mlp", packed=False)
    layer.attach()
    layer.params[2].main_grad = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"fc1_weight\[2\]: expected main_grad of shape \(10, 4\); got \(3, 3\)"):
        layer.backward(accumulate_wgrad=mode)


def test_guard_4_one_dtype_for_all_experts(make_layer):
    layer = make_layer("linear", packed=False, dtype=torch.bfloat16)
    layer.attach()
    layer.params[1].main_grad = layer.params[1].main_grad.bfloat16()
    with pytest.raises(ValueError, match="weight: expected all experts to accumulate in one dtype"):
        layer.backward()


@LAYERS
@pytest.mark.parametrize("mode", ["main_grad", "auto"])
def test_guard_5_fusion_on_a_non_leaf_is_refused(kind, packed, mode, make_layer):
    layer = make_layer(kind, packed)
    layer.groups[-1] = [p * 2 for p in layer.groups[-1]]
    for group in layer.groups:
        for weight in group:
            weight.main_grad = torch.zeros_like(weight)
    name = ("weight" if kind == "linear" else "fc2_weight") + ("" if packed else r"\[0\]")
    with pytest.raises(RuntimeError, match=f"{name}: accumulate_wgrad='{mode}' needs a leaf parameter"):
        layer.backward(accumulate_wgrad=mode)


@pytest.mark.parametrize("packed", [True, False])
def test_guard_5_a_missing_main_grad_is_refused(packed, make_layer):
    layer = make_layer("mlp", packed)
    layer.attach()
    del layer.params[-1].main_grad
    with pytest.raises(RuntimeError, match="expects a main_grad attribute on the parameter; got none"):
        layer.backward(accumulate_wgrad="main_grad")


def test_guard_5_a_main_grad_taken_away_before_backward_is_refused(make_layer):
    layer = make_layer()
    layer.attach()
    x, dy = layer.batch(1)
    y = layer(x, accumulate_wgrad="main_grad")
    del layer.params[0].main_grad
    with pytest.raises(RuntimeError, match=r"fc1_weight: .*expects a main_grad attribute"):
        y.backward(dy)


def test_guard_5_main_grad_on_some_experts_is_refused(make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach()
    del layer.params[1].main_grad
    with pytest.raises(
        ValueError, match=r"on all experts or on none; experts 1 and 0 differ \(after experts have been un"
    ):
        layer.backward()


def test_guard_5_frozen_weights_need_no_main_grad(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach()
    layer.params[1].requires_grad_(False)
    del layer.params[1].main_grad
    layer.backward(accumulate_wgrad="main_grad")
    assert_close([layer.params[0].main_grad], [before[0] + layer.wgrads()[0]])


# Guard 6

CREATE_GRAPH = pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")  # torch warns once per process


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()], ids=["square", "sum"])
@pytest.mark.parametrize("mode", ["main_grad", "grad", "off"])
@pytest.mark.parametrize("kind", ["mlp", "linear", "moe"])
def test_guard_6_double_backward_raises(kind, mode, loss, make_layer):
    """A penalty on dx, as in WGAN-GP, would be lost silently if dx had no graph."""
    layer = make_layer(kind)
    layer.attach()
    x, _ = layer.batch(1)
    x = x.nan_to_num().requires_grad_()
    value = loss(layer(x, accumulate_wgrad=mode))
    (dx,) = torch.autograd.grad(value, [x], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        (value + dx.square().sum()).backward()


@CREATE_GRAPH
@LAYERS
@pytest.mark.parametrize("delayed", [False, True])
def test_guard_6_create_graph_leaves_main_grad_out_of_the_graph(kind, packed, delayed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    x, dy = layer.batch(1)
    queue = fusedmlp.WgradQueue() if delayed else None
    layer(x, wgrad_queue=queue).backward(dy.requires_grad_(), create_graph=True)
    if queue is not None:
        queue.run()
    assert not any(m.requires_grad or m.grad_fn for m in layer.main_grads())
    assert not any(g.requires_grad or g.grad_fn for g in layer.grads())
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(), strict=True)])


def test_experts_that_differ_are_named_by_their_places(make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    layer.params[0].requires_grad_(False)
    layer.params[1].main_grad = None
    x, dy = layer.batch(1)
    with pytest.raises(ValueError, match="experts 1 and 2 differ"):
        layer(x).backward(dy)
