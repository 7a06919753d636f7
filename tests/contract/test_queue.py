"""WgradQueue: order, numbers, and what it refuses."""

import pytest
import torch
from support.contract_helpers import plus
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract.destinations.main_grad import MainGrad
from fusedmlp.contract.engine import EngineUse
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.contract.route import Route
from fusedmlp.doctor import reference
from fusedmlp.operators import ops

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"),
    [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", True), ("moe", False)],
)
FUSE = pytest.mark.parametrize("fuse", [False, True])


def names(layers, recorder):
    """The GEMMs that ran, as (layer, weight) indices found by where they wrote."""
    owners = {
        group[0].main_grad.data_ptr(): (i, j) for i, layer in enumerate(layers) for j, group in enumerate(layer.groups)
    }
    return [owners[pointers[0]] for _, pointers, _ in recorder.calls]


def two_layers(make_layer, packed):
    layers = [make_layer("mlp", packed), make_layer("mlp", packed)]
    for layer in layers:
        layer.attach()
    return layers


@pytest.mark.parametrize("packed", [True, False])
def test_first_in_first_out_and_fc2_before_fc1(packed, wgrad_gemms, make_layer):
    layers, queue = two_layers(make_layer, packed), fusedmlp.WgradQueue()
    for layer, seed in ((layers[1], 1), (layers[0], 2), (layers[1], 3)):
        layer.backward(seed, wgrad_queue=queue)
    assert wgrad_gemms.calls == []
    queue.run()
    assert names(layers, wgrad_gemms) == [(1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0)]


def test_fused_micro_batches_keep_the_order_of_their_first(wgrad_gemms, make_layer):
    layers, queue = two_layers(make_layer, True), fusedmlp.WgradQueue(fuse_microbatches=True)
    for layer, seed in ((layers[1], 1), (layers[0], 2), (layers[1], 3)):
        layer.backward(seed, wgrad_queue=queue)
    queue.run()
    assert names(layers, wgrad_gemms) == [(1, 1), (1, 0), (0, 1), (0, 0)]


@LAYERS
def test_length(kind, packed, make_layer):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue()
    assert len(queue) == 0
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue)
    assert len(queue) == 0
    y.backward(dy)
    assert len(queue) == len(layer.groups)
    layer.backward(2, wgrad_queue=queue)
    assert len(queue) == 2 * len(layer.groups)
    queue.run()
    assert len(queue) == 0


@FUSE
def test_an_empty_run_is_a_no_op(fuse, wgrad_gemms, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach(False)
    queue.run()
    layer.backward(wgrad_queue=queue)
    queue.run()
    ran = len(wgrad_gemms.calls)
    queue.run()
    assert len(wgrad_gemms.calls) == ran == 2
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


@LAYERS
@FUSE
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("case", ["grad", "grad, existing", "main_grad", "main_grad, first"])
def test_micro_batches_equal_plain_autograd(case, layout, fuse, kind, packed, wgrad_gemms, make_layer, assert_close):
    layer, queue = make_layer(kind, packed, layout=layout), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = [torch.zeros_like(p) for p in layer.params]
    if case == "grad, existing":
        before = [torch.full_like(p, 2.0) for p in layer.params]
        for param, grad in zip(layer.params, before, strict=True):
            param.grad = grad.clone()
    elif "main_grad" in case:
        initial = layer.attach(False)
        before = before if "first" in case else initial
    for seed in (1, 2, 3):
        layer.backward(seed, wgrad_queue=queue, overwrites="first" in case and seed == 1)
    queue.run()
    assert_close(layer.main_grads() if "main_grad" in case else layer.grads(), plus(before, layer.wgrads(1, 2, 3)))
    assert len(wgrad_gemms.calls) == len(layer.groups) * (1 if fuse else 3)


@FUSE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights(dtype, fuse, make_layer, assert_close):
    layer, queue = make_layer(dtype=torch.bfloat16), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach(dtype=dtype)
    layer.backward(1, 2, wgrad_queue=queue)
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)), dtype=torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True])
@LAYERS
def test_run_oldest_computes_what_one_backward_of_one_layer_queued(kind, packed, tied, make_layer, assert_close):
    layers, queue = [make_layer(kind, packed), make_layer(kind, packed)], fusedmlp.WgradQueue()
    if tied:
        layers[1].groups, layers[1].params = layers[0].groups, layers[0].params
    for layer in layers:
        layer.attach()
    order = [(0, 1), (1, 2), (1, 3), (0, 4)]
    for i, seed in order:
        layers[i].backward(seed, wgrad_queue=queue)
    for left, (i, seed) in zip((3, 2, 1, 0), order, strict=True):
        expected = plus(layers[i].main_grads(), layers[i].wgrads(seed))
        others = [main.clone() for main in layers[1 - i].main_grads()]
        queue.run_oldest()
        assert len(queue) == left * len(layers[i].groups)
        assert_close(layers[i].main_grads(), expected)
        assert tied or all(map(torch.equal, layers[1 - i].main_grads(), others))
    queue.run_oldest()  # a no-op when empty


@pytest.mark.parametrize("checkpointed", [False, True])
@LAYERS
def test_run_oldest_takes_both_uses_of_a_layer_in_a_micro_batch(kind, packed, checkpointed, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue()
    before = layer.attach()

    def use(x):
        return layer(x, wgrad_queue=queue)

    for seeds in ((1, 2), (3, 4)):
        batches = [layer.batch(seed) for seed in seeds]
        ys = [checkpoint(use, x.requires_grad_(), use_reentrant=True) if checkpointed else use(x) for x, _ in batches]
        torch.autograd.backward(ys, [dy for _, dy in batches])
    for left, seeds in ((1, (1, 2)), (0, (1, 2, 3, 4))):
        queue.run_oldest()
        assert len(queue) == left * 2 * len(layer.groups)
        assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds)))


@pytest.mark.parametrize("delayed", [True, False])
@LAYERS
def test_a_gradient_that_a_second_queue_kept_from_an_earlier_step_is_refused(
    kind, packed, delayed, make_layer, assert_close
):
    layer, first, second = make_layer(kind, packed), fusedmlp.WgradQueue(), fusedmlp.WgradQueue()
    layer.attach()
    layer.backward(1, wgrad_queue=first, overwrites=True)
    layer.backward(2, wgrad_queue=second)
    first.run()  # the step forgets the second queue
    layer.backward(3, wgrad_queue=first if delayed else None, overwrites=True)
    first.run()
    with pytest.raises(RuntimeError, match="expected gradients of the backward that overwrote main_grad, or"):
        second.run()
    second.clear()
    layer.backward(4, wgrad_queue=second)
    second.run()
    assert_close(layer.main_grads(), layer.wgrads(3, 4))


@LAYERS
def test_run_oldest_after_two_backwards_through_one_graph(kind, packed, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue()
    before = layer.attach()
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    for times in (1, 2):
        queue.run_oldest()
        assert len(queue) == (2 - times) * len(layer.groups)
        assert_close(layer.main_grads(), [b + times * w for b, w in zip(before, layer.wgrads(), strict=True)])


@FUSE
@pytest.mark.parametrize("packed", [True, False])
def test_run_oldest_where_fc1_is_fc2(packed, fuse, assert_close):
    queue, generator = fusedmlp.WgradQueue(fuse_microbatches=fuse), torch.Generator().manual_seed(3)
    weights = [torch.nn.Parameter(w) for w in torch.randn(*((1, 2) if packed else (2,)), 4, 4, generator=generator)]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    expected = [weight.main_grad.double() for weight in weights]
    argument, by_batch = weights[0] if packed else weights, []
    for _ in range(2):
        x, dy = torch.randn(2, 5, 4, generator=generator)
        y = fusedmlp.grouped_mlp(x, argument, argument, [3, 2], activation="relu", wgrad_queue=queue)
        y.backward(dy)
        wide = [weight.detach().double().requires_grad_() for weight in weights]
        experts = wide[0] if packed else wide
        reference.rows(x.double(), experts, experts, [3, 2], activation="relu").backward(dy.double())
        by_batch.append([w.grad for w in wide])
    while by_batch:
        for grads in by_batch if fuse else by_batch[:1]:
            expected = plus(expected, grads)
        by_batch = [] if fuse else by_batch[1:]
        queue.run_oldest()
        assert len(queue) == 2 * len(by_batch)
        assert_close([weight.main_grad for weight in weights], expected)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_run_oldest_of_fused_micro_batches_takes_those_of_its_layer_along(kind, make_layer, assert_close):
    layers, queue = [make_layer(kind), make_layer(kind)], fusedmlp.WgradQueue(fuse_microbatches=True)
    before = [layer.attach() for layer in layers]
    for i, seed in ((0, 1), (1, 2), (0, 3)):
        layers[i].backward(seed, wgrad_queue=queue)
    queue.run_oldest()
    assert len(queue) == len(layers[1].groups)
    assert_close(layers[0].main_grads(), plus(before[0], layers[0].wgrads(1, 3)))
    assert all(map(torch.equal, layers[1].main_grads(), before[1]))
    queue.clear()


@FUSE
@pytest.mark.parametrize("target", ["grad", "main_grad"])
@LAYERS
def test_a_module_moved_to_bf16_between_micro_batches(kind, packed, target, fuse, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = [torch.zeros_like(p) for p in layer.params]
    if target == "main_grad":
        before = layer.attach()
    layer.backward(1, wgrad_queue=queue)
    first = layer.wgrads(1)
    torch.nn.ParameterList(layer.params).to(torch.bfloat16)
    layer.dtype, layer.probs = torch.bfloat16, layer.probs.bfloat16()
    layer.backward(2, wgrad_queue=queue)
    queue.run()
    got = layer.main_grads() if target == "main_grad" else layer.grads()
    assert {t.dtype for t in got} == {torch.float32 if target == "main_grad" else torch.bfloat16}
    assert_close(got, plus(before, plus(first, layer.wgrads(2))), dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("linear", False), ("moe", True)])
@FUSE
@pytest.mark.parametrize(("overwriting", "left"), [((1, 3), (3, 4)), ((1, 2), (2, 3, 4)), ((3,), (3, 4)), ((4,), (4,))])
def test_an_overwrite_amid_a_queue_erases_what_came_before(
    overwriting, left, fuse, kind, packed, make_layer, assert_close
):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    layer.attach()
    for main in layer.main_grads():
        main.fill_(float("nan"))
    for seed in (1, 2, 3, 4):
        layer.backward(seed, wgrad_queue=queue, overwrites=seed in overwriting)
    queue.run()
    assert_close(layer.main_grads(), layer.wgrads(*left))


@FUSE
def test_some_experts_overwrite_amid_a_queue(fuse, make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach()
    layer.backward(1, wgrad_queue=queue)
    layer.params[2].overwrite_main_grad = True
    layer.backward(2, wgrad_queue=queue)
    layer.params[2].overwrite_main_grad = False
    layer.backward(3, wgrad_queue=queue)
    queue.run()
    expected = plus(before, layer.wgrads(1, 2, 3))
    expected[2] = layer.wgrads(2, 3)[2]
    assert_close(layer.main_grads(), expected)


@FUSE
def test_another_use_of_a_weight_that_overwrites_amid_a_queue(fuse, assert_close):
    """It has the other layout, so it is another launch; what comes after it is not added before it."""
    queue, generator = fusedmlp.WgradQueue(fuse_microbatches=fuse), torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(2, 4, 4, generator=generator))
    weight.main_grad, expected = torch.full_like(weight, float("nan")), 0
    for layout in ("out_in", "in_out", "out_in"):
        weight.overwrite_main_grad = layout == "in_out"
        x, dy = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
        fusedmlp.grouped_linear(x, weight, [3, 2], weight_layout=layout, wgrad_queue=queue).backward(dy)
        left, right = (x, dy) if layout == "in_out" else (dy, x)
        wgrad = torch.stack([left[:3].T @ right[:3], left[3:].T @ right[3:]])
        expected = wgrad if layout == "in_out" else expected + wgrad
    queue.run()
    assert_close([weight.main_grad], [expected.double()])


@FUSE
def test_one_weight_used_in_both_layouts(fuse, assert_close):
    """A tied encoder and decoder. The weight is square, so that no error of shape reveals a mix-up."""
    queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(2, 4, 4, generator=generator))
    weight.main_grad = torch.ones_like(weight)
    x, dy = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    h = fusedmlp.grouped_linear(x, weight, [3, 2], wgrad_queue=queue)
    fusedmlp.grouped_linear(h, weight, [3, 2], weight_layout="in_out", wgrad_queue=queue).backward(dy)
    queue.run()
    wide = weight.detach().double().requires_grad_()
    h = reference.gemm(x.double(), wide, [3, 2])
    reference.gemm(h, wide.mT, [3, 2]).backward(dy.double())
    assert_close([weight.main_grad], [1 + wide.grad])


@FUSE
@pytest.mark.parametrize("packed", [True, False])
def test_one_weight_in_micro_batches_of_rows_and_of_tokens(packed, fuse, wgrad_gemms, make_layer, assert_close):
    layers, queue = [make_layer("mlp", packed), make_layer("moe", packed)], fusedmlp.WgradQueue(fuse_microbatches=fuse)
    layers[1].groups, layers[1].params = layers[0].groups, layers[0].params
    before = layers[0].attach()
    for i, seed in ((0, 1), (1, 2), (0, 3), (1, 4)):
        layers[i].backward(seed, wgrad_queue=queue)
    queue.run()
    both = plus(layers[0].wgrads(1, 3), layers[1].wgrads(2, 4))
    assert_close(layers[0].main_grads(), plus(before, both))
    assert len(wgrad_gemms.calls) == 2 * (2 if fuse else 4)  # one launch gathers all of its segments, or none


@FUSE
def test_one_weight_fused_into_grad_and_into_main_grad(fuse, make_layer, assert_close):
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach()
    layer.backward(1, wgrad_queue=queue, accumulate_wgrad="main_grad")
    layer.backward(2, wgrad_queue=queue, accumulate_wgrad="grad")
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1)))
    assert_close(layer.grads(), layer.wgrads(2))


@pytest.mark.parametrize("kind", ["mlp", "linear", "moe"])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_a_tensor_modified_in_place_before_the_run_is_refused(which, kind, make_layer):
    layer, queue = make_layer(kind), fusedmlp.WgradQueue()
    before = layer.attach()
    x, dy = layer.batch(1)
    layer(x, wgrad_queue=queue).backward(dy)
    (x if which == "x" else dy).mul_(2)
    with pytest.raises(RuntimeError, match=r"weight: .*modified in place before the queue ran"):
        queue.run()
    name = "weight" if kind == "linear" else "fc1" if which == "x" else "fc2"
    index = 0 if name in ("fc1", "weight") else 1
    assert torch.equal(layer.main_grads()[index], before[index])
    queue.clear()


@FUSE
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("target", ["grad", "main_grad"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_a_weight_whose_shape_changed_before_the_run_is_refused(layout, packed, target, impl, fuse, make_layer):
    """Kernels would write past the end of the smaller gradient."""
    layer, queue = make_layer("linear", packed, layout=layout), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    if target == "main_grad":
        layer.attach(False)
    layer.backward(1, 2, wgrad_queue=queue, impl=impl)
    memory = torch.ones(3, 100)
    for i, param in enumerate(layer.params):
        param.data = param.data[..., :3]
        if target == "main_grad":
            param.grad, param.main_grad = None, memory[i, : param.numel()].view(param.shape)
    with pytest.raises(RuntimeError, match=r"weight: expected the weight of \[.*\] on cpu that backward.*; got \[.*\]"):
        queue.run()
    assert (memory == 1).all()
    assert layer.grads() == [None] * len(layer.params)
    queue.clear()


def test_a_weight_that_moved_to_another_device_before_the_run_is_refused(monkeypatch, make_layer):
    """Without a GPU nothing can move there: the weight only reports that it did."""
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=queue)
    own, (param,) = torch.Tensor.device, layer.params
    device = property(lambda t: torch.device("cuda") if t is param else own.__get__(t))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "device", device, raising=False)
        with pytest.raises(RuntimeError, match=r"weight: expected the weight of \[5, 4\] on cpu .*; got .* on cuda"):
            queue.run()
    queue.clear()


@pytest.mark.parametrize("packed", [True, False])
def test_an_addition_that_a_queued_overwrite_would_erase_is_refused(packed, make_layer, assert_close):
    layer, queue = make_layer("mlp", packed), fusedmlp.WgradQueue()
    layer.attach()
    layer.backward(1, wgrad_queue=queue, overwrites=True)
    with pytest.raises(RuntimeError, match="a queued gradient is going to overwrite main_grad"):
        layer.backward(2)
    queue.run()
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


def test_the_second_of_two_queued_overwrites_is_still_guarded(make_layer):
    layer, queues = make_layer(), [fusedmlp.WgradQueue(), fusedmlp.WgradQueue()]
    layer.attach()
    for seed, queue in enumerate(queues):
        layer.backward(seed, wgrad_queue=queue, overwrites=True)
    queues[0].run()
    with pytest.raises(RuntimeError, match="a queued gradient is going to overwrite main_grad"):
        layer.backward(2)
    queues[1].run()


def test_a_dropped_queue_overwrites_nothing(make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    before = layer.attach()
    layer.backward(1, wgrad_queue=queue, overwrites=True)
    with pytest.warns(
        RuntimeWarning,
        match=r"wait in it, 2 of them, which are lost \(fc1_weight, fc2_weight\)",
    ):
        del queue
    layer.backward(2)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(2)))


@pytest.mark.parametrize("target", ["grad", "main_grad"])
def test_run_is_under_no_grad(target, make_layer):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    if target == "main_grad":
        layer.attach()
    layer.backward(wgrad_queue=queue)
    seen, gemm = [], ops.grouped_wgrad_
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.setattr(ops, "grouped_wgrad_", lambda *args: seen.append(torch.is_grad_enabled()) or gemm(*args))
        queue.run()
        assert torch.is_grad_enabled()
    assert seen == [False, False]
    found = layer.main_grads() if target == "main_grad" else layer.grads()
    assert not any(t.requires_grad or t.grad_fn for t in found)


@FUSE
@pytest.mark.parametrize("target", ["grad", "main_grad", "main_grad, first"])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_run_that_failed_before_a_gemm_can_be_repeated(failing, target, fuse, monkeypatch, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = [torch.zeros_like(p) for p in layer.params]
    if "main_grad" in target:
        before = before if "first" in target and layer.attach() else layer.attach()
    for seed in (1, 2):
        layer.backward(seed, wgrad_queue=queue, overwrites="first" in target and seed == 1)
    opens, calls = Route.open, []

    def breaks(route):
        calls.append(route)
        opens(route)
        if len(calls) == failing + 1:
            raise MemoryError("no room")

    monkeypatch.setattr(Route, "open", breaks)
    if failing < (2 if fuse else 4):
        with pytest.raises(MemoryError, match="no room"):
            queue.run()
        assert len(queue) == 4 - failing * (2 if fuse else 1)
    queue.run()
    assert len(queue) == 0
    found = layer.main_grads() if "main_grad" in target else layer.grads()
    assert_close(found, plus(before, layer.wgrads(1, 2)))


@pytest.mark.parametrize("owner", ["buffer", "overwrite_main_grad"])
def test_a_run_that_failed_before_a_gemm_and_was_cleared_has_written_nothing(
    owner, monkeypatch, make_layer, assert_close
):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    if owner == "buffer":
        buffer = fusedmlp.MainGradBuffer(layer.params)
        buffer.flat.fill_(torch.nan)
        buffer.zero_grad()
    else:
        layer.attach()
    layer.backward(1, wgrad_queue=queue, overwrites=owner != "buffer")
    opens = Route.open

    def breaks(route):
        opens(route)
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Route, "open", breaks)
        with pytest.raises(MemoryError, match="no room"):
            queue.run()
    queue.clear()
    layer.backward(2, overwrites=owner != "buffer")
    layer.backward(3)
    assert_close(layer.main_grads(), layer.wgrads(2, 3))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kind", ["GroupedMLP", "GroupedLinear"])
def test_backward_dw_of_the_modules(kind, attached, packed, assert_close):
    options = {"packed": packed, "bias": True}
    make = getattr(fusedmlp, kind)
    delayed, plain = make(3, 4, 5, delay_wgrad=True, **options), make(3, 4, 5, accumulate_wgrad="off", **options)
    plain.load_state_dict(delayed.state_dict())
    weights = {n: p for n, p in delayed.named_parameters() if "weight" in n}
    if attached:
        fusedmlp.MainGradBuffer(weights.values())
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        x = torch.randn(5, 4, generator=generator)
        for module in (delayed, plain):
            module(x, [3, 0, 2]).square().sum().backward()
    for name, weight in weights.items():
        assert weight.grad is None or (attached and not weight.grad.any()), name
        assert not attached or not weight.main_grad.any()
    delayed.backward_dw()
    for (name, got), want in zip(delayed.named_parameters(), plain.parameters(), strict=True):
        assert_close([got.main_grad if attached and name in weights else got.grad], [want.grad])
    assert len(delayed.wgrad_queue) == 0


@LAYERS
@pytest.mark.parametrize("attached", [False, True])
def test_autograd_grad_gets_a_delayed_gradient_at_once(kind, packed, attached, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue()
    before = layer.attach(False) if attached else []
    x, dy = layer.batch(1)
    grads = torch.autograd.grad(layer(x, wgrad_queue=queue), layer.params, dy)
    assert_close(grads, layer.wgrads())
    assert len(queue) == 0
    assert all(p.grad is None for p in layer.params)
    assert all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=False))


def test_a_queue_runs_outside_of_backward_on_a_gpu_too():
    """Outside of backward there are no streams to wait for. FakeTensorMode stands for the GPU."""
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(2, 3, 4, device="cuda"))
        param.main_grad = torch.zeros(2, 3, 4, device="cuda")
        leaf = 0, param, state_of(param)
        route = Route(
            name="weight",
            params=[param],
            uses=[EngineUse.ACCUMULATE],
            delayed=True,
            destination=MainGrad(),
            leaves=[leaf],
        )
        route.open()
    assert route.outs[0] is param.main_grad
    assert route.accumulate
