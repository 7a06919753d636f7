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
FROZEN = {  # which weights, of fc1 and then of fc2
    "all": lambda i, count: True,
    "fc1": lambda i, count: i < count // 2,
    "fc2": lambda i, count: i >= count // 2,
    "every other": lambda i, count: i % 2 == 0,
}


def freeze(params, frozen, *, thaw=False):
    """Freeze, or thaw, some of the parameters; return which."""
    gone = [FROZEN[frozen](i, len(params)) for i in range(len(params))]
    for param, mine in zip(params, gone, strict=True):
        if mine:
            param.requires_grad_(thaw)
    return gone


class Setup:
    """A layer in a mode, with copies of the tensors that its gradients are added to."""

    def __init__(self, layer, mode):
        self.layer = layer
        accumulate, self.flag, existing, delayed = MODES[mode]
        self.attached, self.first = self.flag != "-", "first" in mode
        if self.attached:
            layer.attach(self.flag)
        for param in layer.params if existing else []:
            param.grad = torch.full_like(param, 3.0)
        self.queue = fusedmlp.WgradQueue() if delayed else None
        self.options = {"accumulate_wgrad": accumulate, "wgrad_queue": self.queue}
        self.before = [None if p is None else p.clone() for p in self.places()]

    def places(self):
        return self.layer.main_grads() if self.attached else self.layer.grads()

    def run_queue(self):
        if self.queue is not None:
            self.queue.run()

    def check(self, assert_close, *arrived, overwritten=()):
        """Assert that each weight got this gradient; None: that it was not touched."""
        for i, (param, place, before) in enumerate(zip(self.layer.params, self.places(), self.before, strict=True)):
            if arrived[i] is not None:
                assert_close([place], [arrived[i] + (0 if before is None or i in overwritten else before)])
            elif before is None:
                assert place is None
            else:
                assert torch.equal(place, before)
            if self.attached:
                flagged = arrived[i] is not None and self.flag is not None
                assert (param.grad is not None) == flagged
                assert getattr(param, "grad_added_to_main_grad", None) == (True if flagged else self.flag)


@pytest.mark.parametrize("when", ["before forward", "between forward and backward"])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("moe", True)])
def test_a_frozen_weight_gets_no_gradient_until_it_thaws(
    kind, packed, mode, frozen, when, wgrad_gemms, make_layer, assert_close
):
    """Others, and x, get theirs; a weight without one costs no GEMM; one that thaws adds to what main_grad holds."""
    layer = make_layer(kind, packed)
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    if when == "before forward":
        freeze(layer.params, frozen)
    y = layer(x.requires_grad_(), **setup.options)
    gone = freeze(layer.params, frozen)
    for param in layer.params:
        param.overwrite_main_grad = setup.first
    y.backward(dy)
    half = len(gone) // 2
    trained = [name for name, of in (("fc1", gone[:half]), ("fc2", gone[half:])) if not all(of)]
    assert [name for name, *_ in wgrad_gemms.calls] == ([] if setup.queue is not None else trained)
    assert setup.queue is None or len(setup.queue) == len(trained)
    setup.run_queue()
    overwritten = [i for i, none in enumerate(gone) if setup.first and not none]
    wgrads = layer.wgrads(1)
    setup.check(assert_close, *(None if g else w for g, w in zip(gone, wgrads, strict=True)), overwritten=overwritten)
    wide = x.detach().double().requires_grad_()
    layer.loop(wide, [p.detach().double() for p in layer.params]).backward(dy[:5].double())
    assert_close([x.grad[:5]], [wide.grad[:5]])

    freeze(layer.params, frozen, thaw=True)
    for param in layer.params:
        param.overwrite_main_grad = False
    layer.backward(2, **setup.options)
    setup.run_queue()
    both = zip(gone, layer.wgrads(2), layer.wgrads(1, 2), strict=True)
    setup.check(assert_close, *(second if g else total for g, second, total in both), overwritten=overwritten)


@pytest.mark.parametrize("case", ["as it is", "after a fused one", "overwrite_main_grad"])
def test_a_plain_gradient_of_a_frozen_weight_is_dropped_too(case, make_layer):
    layer, flag = make_layer(), case == "after a fused one"
    layer.attach(False)
    if flag:
        layer.backward(2)
    for param in layer.params:
        param.grad, param.overwrite_main_grad = None, case == "overwrite_main_grad"
    before, (x, dy) = [main.clone() for main in layer.main_grads()], layer.batch(1)
    loss = (layer(x) * dy).nansum() + sum(p.square().sum() for p in layer.params)
    freeze(layer.params, "all")
    loss.backward()
    assert layer.grads() == [None, None]
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert [p.grad_added_to_main_grad for p in layer.params] == [flag, flag]


@pytest.mark.slow
@in_graphs
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("frozen", ["all", "every other"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_compiled_backward_refuses_a_weight_frozen_since_forward(packed, frozen, first, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer("mlp", packed)
    before, (x, dy) = layer.attach(False), layer.batch(1)
    run = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")
    y = run(layer, x.requires_grad_())
    for param in layer.params:
        param.overwrite_main_grad = first
    freeze(layer.params, frozen)
    with pytest.raises(RuntimeError, match=r"weight.*a parameter frozen since forward"):
        y.backward(dy)
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert not any(p.grad_added_to_main_grad for p in layer.params)
    assert layer.grads() == [None] * len(layer.params)
    freeze(layer.params, frozen, thaw=True)
    run(layer, x).backward(dy)
    assert_close(layer.main_grads(), [w + (0 if first else b) for b, w in zip(before, layer.wgrads(1), strict=True)])


@pytest.mark.slow
@in_graphs
@pytest.mark.parametrize("mode", ["off", "grad", "grad, existing"])
def test_a_compiled_backward_that_returns_gradients_drops_that_of_a_frozen_weight(mode, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer()
    setup, (x, dy) = Setup(layer, mode), layer.batch(1)
    y = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")(layer, x, **setup.options)
    freeze(layer.params, "fc1")
    y.backward(dy)
    setup.check(assert_close, None, layer.wgrads(1)[1])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("what", ["weight", "weight, delayed", "bias", "weight, not fused"])
def test_a_weight_frozen_after_its_gradient_came_still_steps(what, zeros, make_layer, assert_close):
    """As in PyTorch: weight decay moves it, also where the gradient is zero. One that got none in this step stays."""
    layer, queue = make_layer(bias=True), fusedmlp.WgradQueue()
    unused = torch.nn.Parameter(torch.ones(4))
    tensors = [*layer.params, *layer.biases, unused]
    _kept = fusedmlp.MainGradBuffer(tensors)
    x, dy = layer.batch(1)
    options = {"wgrad_queue": queue} if "delayed" in what else {}
    layer(x, accumulate_wgrad="off" if "not fused" in what else "auto", **options).backward(dy * (not zeros))
    queue.run()
    for param in (layer.biases[0] if what == "bias" else layer.params[0], unused):
        param.requires_grad_(False)
    assert_close([p.grad for p in tensors[:-1]], [w * (not zeros) for w in layer.wgrads(1)])
    assert all(p.grad.is_contiguous() for p in tensors[:-1])  # no dummy: fused optimizers would read past its end
    held = [p.detach().clone() for p in tensors]
    torch.optim.AdamW(tensors, lr=0.1, weight_decay=0.5).step()
    assert [torch.equal(p, h) for p, h in zip(tensors, held, strict=True)] == [False] * 4 + [True]
