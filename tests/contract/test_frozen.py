"""Weights that are frozen: before forward, between forward and backward, between a gradient and the optimizer."""

import pytest
import torch
from support.compiler import in_graphs

import fusedmlp

pytestmark = [
    pytest.mark.usefixtures("nan_in_empty"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LAYERS = pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", False), ("moe", True)])
# accumulate_wgrad, grad_added_to_main_grad ("-": no main_grad), whether .grad exists, whether delayed. "first" in the
# name: overwrite_main_grad.
MODES = {
    "off": ("off", "-", False, False),
    "off, existing": ("off", "-", True, False),
    "auto": ("auto", False, False, False),
    "main_grad": ("main_grad", False, False, False),
    "main_grad, no attribute": ("main_grad", None, False, False),
    "grad": ("grad", "-", False, False),
    "grad, existing": ("grad", "-", True, False),
    "main_grad, first": ("main_grad", False, False, False),
    "delayed main_grad": ("main_grad", False, False, True),
    "delayed main_grad, first": ("main_grad", False, False, True),
    "delayed": ("off", "-", False, True),
    "delayed, existing": ("auto", "-", True, True),
}
FROZEN = {  # which weights
    "all": lambda i, count: True,
    "the first": lambda i, count: i == 0,
    "every other": lambda i, count: i % 2 == 0,
}


class Setup:
    """A layer in a mode, with copies of the tensors that its gradients are added to."""

    def __init__(self, layer, mode):
        self.layer = layer
        self.accumulate, attribute, existing, delayed = MODES[mode]
        self.attached, self.flag = attribute != "-", attribute
        if self.attached:
            layer.attach(attribute)
        for param in layer.params if existing else []:
            param.grad = torch.full_like(param, 3.0)
        self.queue, self.first = fusedmlp.WgradQueue() if delayed else None, "first" in mode
        self.options = {"accumulate_wgrad": self.accumulate, "wgrad_queue": self.queue}
        self.before = [self.place(i) for i in range(len(layer.params))]
        self.before = [None if b is None else b.clone() for b in self.before]

    def place(self, i):
        param = self.layer.params[i]
        return param.main_grad if self.attached else param.grad

    def check(self, assert_close, arrived):
        """Assert that weight i got the gradient `arrived(i)`; None: that it was not touched."""
        for i, (param, before) in enumerate(zip(self.layer.params, self.before, strict=True)):
            grad = arrived(i)
            if grad is not None:
                assert_close([self.place(i)], [grad + (0 if before is None or self.first else before)])
            elif before is None:
                assert self.place(i) is None
            else:
                assert torch.equal(self.place(i), before)
            if self.attached:
                assert (param.grad is None) == (grad is None or self.flag is None)
                assert getattr(param, "grad_added_to_main_grad", None) == (
                    self.flag if grad is None or self.flag is None else True
                )


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("mode", MODES)
@LAYERS
def test_a_weight_frozen_between_forward_and_backward_gets_no_gradient(
    kind, packed, mode, frozen, make_layer, assert_close
):
    """Plain PyTorch drops the gradient, too; x gets its own."""
    layer = make_layer(kind, packed)
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    y = layer(x.requires_grad_(), **setup.options)
    for param in layer.params if setup.first else []:
        param.overwrite_main_grad = True
    gone = [FROZEN[frozen](i, len(layer.params)) for i in range(len(layer.params))]
    for param, freeze in zip(layer.params, gone, strict=True):
        param.requires_grad_(not freeze)
    y.backward(dy)
    assert setup.queue is None or (len(setup.queue) == 0) == all(gone)
    if setup.queue is not None:
        setup.queue.run()
    wgrads = layer.wgrads(1)
    setup.check(assert_close, lambda i: None if gone[i] else wgrads[i])
    wide = x.detach().double().requires_grad_()
    layer.loop(wide, [p.detach().double() for p in layer.params]).backward(dy[:5].double())
    assert_close([x.grad[:5]], [wide.grad[:5]])


@pytest.mark.parametrize("mode", [mode for mode in MODES if "first" not in mode])
def test_a_weight_thawed_again_gets_the_next_gradient(mode, make_layer, assert_close):
    layer = make_layer()
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    y = layer(x, **setup.options)
    layer.params[0].requires_grad_(False)
    y.backward(dy)
    layer.params[0].requires_grad_(True)
    layer.backward(2, **setup.options)
    if setup.queue is not None:
        setup.queue.run()
    assert setup.before[0] is None or setup.place(0) is not None
    wgrads = layer.wgrads(2)[0], layer.wgrads(1, 2)[1]
    setup.check(assert_close, lambda i: wgrads[i])


@pytest.mark.parametrize("case", ["as it is", "after a fused one", "overwrite_main_grad"])
def test_a_plain_gradient_of_a_frozen_weight_is_dropped_too(case, make_layer):
    layer = make_layer()
    layer.attach(False)
    if case == "after a fused one":
        layer.backward(2)
        for param in layer.params:
            param.grad = None
    before, flag = [main.clone() for main in layer.main_grads()], case == "after a fused one"
    x, dy = layer.batch(1)
    y = layer(x)
    for param in layer.params:
        param.overwrite_main_grad = case == "overwrite_main_grad"
    loss = (y * dy).nansum() + sum(p.square().sum() for p in layer.params)
    for param in layer.params:
        param.requires_grad_(False)
    loss.backward()
    assert layer.grads() == [None, None]
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert [p.grad_added_to_main_grad for p in layer.params] == [flag, flag]


# In a graph of torch.compile


@pytest.mark.slow
@in_graphs
@pytest.mark.sparse
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
@LAYERS
def test_a_compiled_backward_refuses_a_weight_frozen_since_forward(
    kind, packed, frozen, first, make_layer, assert_close
):
    torch._dynamo.reset()
    layer = make_layer(kind, packed)
    before, (x, dy) = layer.attach(False), layer.batch(1)
    run = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")
    y = run(layer, x.requires_grad_())
    for param in layer.params:
        param.overwrite_main_grad = first
    for i, param in enumerate(layer.params):
        param.requires_grad_(not FROZEN[frozen](i, len(layer.params)))
    with pytest.raises(RuntimeError, match=r"weight.*a parameter frozen since forward"):
        y.backward(dy)
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert not any(p.grad_added_to_main_grad for p in layer.params)
    assert layer.grads() == [None] * len(layer.params)
    for param in layer.params:
        param.requires_grad_(True)
    run(layer, x).backward(dy)
    before = [torch.zeros_like(b) for b in before] if first else before
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1), strict=True)])


@pytest.mark.slow
@in_graphs
@pytest.mark.parametrize("mode", ["off", "grad", "grad, existing"])
def test_a_compiled_backward_that_returns_gradients_drops_that_of_a_frozen_weight(mode, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer()
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    y = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")(layer, x, **setup.options)
    layer.params[0].requires_grad_(False)
    y.backward(dy)
    wgrads = layer.wgrads(1)
    setup.check(assert_close, lambda i: wgrads[i] if i else None)


# Frozen before forward


@pytest.mark.parametrize("kind", ["mlp", "moe"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("mode", ["delayed main_grad", "delayed", "delayed, existing"])
def test_the_other_gemm_of_a_frozen_weight_is_delayed(mode, frozen, when, packed, kind, make_layer, assert_close):
    """fc1 or fc2 is frozen; backward must still keep what the delayed gradient of the other needs."""
    layer = make_layer(kind, packed)
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)

    def freeze():
        for param in layer.groups[frozen]:
            param.requires_grad_(False)

    if when == "before forward":
        freeze()
    y = layer(x, **setup.options)
    freeze()
    y.backward(dy)
    assert len(setup.queue) == 1
    setup.queue.run()
    wgrads, gone = layer.wgrads(1), {id(param) for param in layer.groups[frozen]}
    setup.check(assert_close, lambda i: None if id(layer.params[i]) in gone else wgrads[i])


@pytest.mark.parametrize("when", ["before forward", "after forward"])
@pytest.mark.parametrize("mode", ["delayed main_grad", "delayed", "delayed, existing"])
@LAYERS
def test_nothing_is_queued_for_a_layer_that_is_frozen(kind, packed, mode, when, make_layer, assert_close):
    layer = make_layer(kind, packed)
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    if when == "before forward":
        for param in layer.params:
            param.requires_grad_(False)
    y = layer(x.requires_grad_(), **setup.options)
    for param in layer.params:
        param.requires_grad_(False)
    y.backward(dy)
    assert x.grad.count_nonzero() > 0
    assert len(setup.queue) == 0
    setup.check(assert_close, lambda i: None)


@LAYERS
def test_a_first_micro_batch_lets_only_trained_weights_overwrite(kind, packed, make_layer, assert_close):
    """A weight that is frozen in it, and thawed later in the step, adds to what main_grad holds."""
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    frozen = [i % 2 == 0 for i in range(len(layer.params))]
    for param, freeze in zip(layer.params, frozen, strict=True):
        param.requires_grad_(not freeze)
    x, dy = layer.batch(1)
    y = layer(x.requires_grad_())
    with layer.overwriting():
        y.backward(dy)
    for param in layer.params:
        param.requires_grad_(True)
    layer.backward(2)
    kept, overwritten = [b + w for b, w in zip(before, layer.wgrads(2), strict=True)], layer.wgrads(1, 2)
    assert_close(layer.main_grads(), [k if f else o for k, o, f in zip(kept, overwritten, frozen, strict=True)])


# Frozen before the optimizer's step


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("frozen", ["the first", "every other"])
@LAYERS
def test_an_optimizer_does_not_move_weights_frozen_since_the_buffer_was_made(
    kind, packed, frozen, make_layer, assert_close
):
    """Weight decay and momentum would move them if they had a gradient, even of zeros."""
    layer = make_layer(kind, packed, bias=True)
    tensors, twin = layer.params + layer.biases, make_layer(kind, packed, bias=True)
    buffer = fusedmlp.MainGradBuffer(tensors)
    optimizers = adamw(tensors), adamw(twin.params + twin.biases)
    for step in range(4):
        gone = [step in (1, 2) and FROZEN[frozen](i, len(tensors)) for i in range(len(tensors))]
        for each in (layer, twin):
            for param, freeze in zip(each.params + each.biases, gone, strict=True):
                param.requires_grad_(not freeze)
        buffer.zero_grad()
        optimizers[1].zero_grad()
        x, dy = layer.batch(step)
        layer(x.requires_grad_()).backward(dy)
        twin(x, accumulate_wgrad="off").backward(dy)
        held = [p.detach().clone() for p in tensors]
        assert [p.grad is None for p in tensors] == gone
        optimizers[0].step()
        optimizers[1].step()
        assert [torch.equal(p, h) for p, h in zip(tensors, held, strict=True)] == gone
        assert_close(tensors, twin.params + twin.biases, dtype=torch.bfloat16)


@pytest.mark.parametrize("what", ["weight", "weight, delayed", "bias", "weight, not fused"])
def test_a_weight_frozen_after_its_gradient_came_still_steps(what, make_layer, assert_close):
    layer, queue = make_layer(bias=True), fusedmlp.WgradQueue() if "delayed" in what else None
    tensors = layer.params + layer.biases
    fusedmlp.MainGradBuffer(tensors)
    layer.backward(1, wgrad_queue=queue, accumulate_wgrad="off" if "not fused" in what else "auto")
    if queue is not None:
        queue.run()
    index = len(layer.params) if what == "bias" else 0
    tensors[index].requires_grad_(False)
    wgrads, held = layer.wgrads(1), tensors[index].detach().clone()
    assert_close([p.grad for p in tensors], wgrads)
    adamw(tensors).step()
    assert not torch.equal(tensors[index], held)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_weight_frozen_after_a_gradient_of_zeros_came_still_steps(delayed, make_layer):
    """PyTorch steps it, too, with weight decay. A frozen weight that got none in this step has no gradient."""
    layer, queue = make_layer(), fusedmlp.WgradQueue() if delayed else None
    unused = torch.nn.Parameter(torch.ones(4))
    tensors = [*layer.params, unused]
    buffer = fusedmlp.MainGradBuffer(tensors)
    for step in range(2):
        buffer.zero_grad()
        x, dy = layer.batch(step)
        layer(x, wgrad_queue=queue).backward(0 * dy)
        if queue is not None:
            queue.run()
        for param in (layer.params[0], unused):
            param.requires_grad_(False)
        held = [p.detach().clone() for p in tensors]
        assert [p.grad is None for p in tensors] == [False, False, True]
        assert not any(g.any() for g in layer.grads())
        assert all(g.is_contiguous() for g in layer.grads())  # no dummy: fused optimizers would read past its end
        adamw(tensors).step()
        assert [torch.equal(p, h) for p, h in zip(tensors, held, strict=True)] == [False, False, True]
        for param in (layer.params[0], unused):
            param.requires_grad_()
