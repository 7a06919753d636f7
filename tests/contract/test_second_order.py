"""Guard 6: every way to a second derivative raises; first derivatives that `create_graph=True` records are right."""

import warnings
from functools import partial

import pytest
import torch
from support.contract_helpers import unchanged
from torch.autograd import functional
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

KINDS = pytest.mark.parametrize("kind", ["mlp", "linear", "moe"])
MODES = pytest.mark.parametrize("mode", ["off", "main_grad", "grad", "grad, existing", "auto", "auto, attached"])
LOSSES = {"sum": lambda y: y.sum(), "square": lambda y: y.square().sum()}
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
REFUSED = pytest.raises(RuntimeError, match="double backward")


class Use:
    """A layer in a mode, an x that wants a gradient, and a loss of y."""

    def __init__(self, layer, mode, loss):
        self.layer, self.loss, self.mode = layer, LOSSES[loss], mode.split(",")[0]
        if "main_grad" in mode or "attached" in mode:
            layer.attach(False)
        for param in layer.params if "existing" in mode else []:
            param.grad = torch.ones_like(param)
        layer.probs.requires_grad_()
        self.x = layer.batch(1)[0].nan_to_num().requires_grad_()

    def __call__(self, x):
        return self.loss(self.layer(x, accumulate_wgrad=self.mode))

    def __getitem__(self, names):
        """Tensors by names such as "x, weights"."""
        layer = self.layer
        known = {"x": [self.x], "weights": layer.params, "first": layer.params[:1], "last": layer.params[-1:]}
        known |= {"probs": [layer.probs], "bias": layer.biases[:1]}
        return [tensor for name in names.split(", ") for tensor in known[name]]

    def gradients(self, names):
        """Gradients of the loss, recorded by `create_graph=True`."""
        return torch.autograd.grad(self(self.x), self[names], create_graph=True)


WANTED = [("x", "weights"), ("x", "last"), ("x", "x"), ("weights", "x"), ("last", "x"), ("first", "weights")]
WANTED += [("x, weights", "x, weights"), ("bias", "x"), ("bias", "weights")]
OF_PROBS = [("probs", "x"), ("probs", "probs"), ("probs", "weights")]


@MODES
@EACH_LOSS
@pytest.mark.parametrize(
    ("kind", "of", "wanted"),
    [(kind, *pair) for kind in ("mlp", "linear", "moe") for pair in WANTED + OF_PROBS * (kind != "linear")],
)
def test_the_derivative_of_a_gradient_is_refused(of, wanted, kind, loss, mode, make_layer):
    use = Use(make_layer(kind, bias=True), mode, loss)
    sums = [gradient.sum() for gradient in use.gradients(of)]
    with REFUSED:
        torch.autograd.grad(sums, use[wanted], allow_unused=True)


# Other ways to a second derivative


def penalty(use, *, on="x", into=None):
    """A term of the loss that has gradients in it."""
    value = use(use.x)
    grads = torch.autograd.grad(value, use[on], create_graph=True)
    (value + sum(g.norm() for g in grads)).backward(inputs=None if into is None else use[into])


def recorded_backward(use):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True", UserWarning)
        use(use.x).backward(create_graph=True)
    torch.autograd.grad(use.x.grad.sum(), use.layer.params)


def through(use, forward):
    (dx,) = torch.autograd.grad(forward(use, use.x), use.x, create_graph=True)
    torch.autograd.grad(dx.sum(), use.layer.params)


def kept_elsewhere(use, x):
    with save_on_cpu():
        return use(x)


WAYS = {
    "penalty": penalty,
    "penalty on weights": partial(penalty, on="weights"),
    "penalty into one weight": partial(penalty, into="first"),
    "recorded backward": recorded_backward,
    "hessian": lambda use: functional.hessian(use, use.x),
    "in a checkpoint": partial(through, forward=partial(checkpoint, use_reentrant=False)),
    "with tensors kept elsewhere": partial(through, forward=kept_elsewhere),
}


@KINDS
@MODES
@EACH_LOSS
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_are_refused(way, loss, mode, kind, make_layer):
    use = Use(make_layer(kind, bias=True), mode, loss)
    with REFUSED:
        WAYS[way](use)


@KINDS
def test_a_second_derivative_for_the_gradient_of_y_is_refused(kind, make_layer):
    layer = make_layer(kind)
    x, dy = layer.batch(1)
    (dx,) = torch.autograd.grad(layer(x.requires_grad_()), x, dy.requires_grad_(), create_graph=True)
    with REFUSED:
        torch.autograd.grad(dx[:5].sum(), dy)


@KINDS
@pytest.mark.parametrize(("frozen", "wanted"), [("weights", "x"), ("x", "first")])
def test_a_second_derivative_with_one_side_frozen_is_refused(frozen, wanted, kind, make_layer):
    use = Use(make_layer(kind), "auto", "square")
    for tensor in use[frozen]:
        tensor.requires_grad_(False)
    (gradient,) = use.gradients(wanted)
    with REFUSED:
        torch.autograd.grad(gradient.sum(), use[wanted])


# First derivatives


@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")  # torch warns once per process
@KINDS
@MODES
@EACH_LOSS
@pytest.mark.parametrize("how", ["autograd.grad", "backward"])
def test_first_derivatives_that_are_recorded_are_right(how, loss, mode, kind, make_layer, assert_close):
    use = Use(make_layer(kind), mode, loss)
    params, fused = use.layer.params, "attached" in mode or mode == "main_grad"
    wide = [t.detach().double().requires_grad_() for t in use["x, weights"]]
    dx, *wgrads = torch.autograd.grad(LOSSES[loss](use.layer.loop(wide[0], wide[1:])), wide)
    before = [p.main_grad.clone() if fused else None if p.grad is None else p.grad.clone() for p in params]
    grads = use.layer.grads()
    if how == "backward":
        use(use.x).backward(create_graph=True)
        assert_close([use.x.grad], [dx])
        wgrads = [w if b is None else b + w for b, w in zip(before, wgrads, strict=True)]
    else:
        got = use.gradients("x, weights")
        assert_close(got, [dx, *wgrads])
        assert all(g.requires_grad for g in got)
        wgrads = before
    if mode == "grad, existing":  # PyTorch, too, makes the sum a new tensor
        assert unchanged(grads, before)
    for param, expected in zip(params, wgrads, strict=True):
        place = param.main_grad if fused else param.grad
        assert (place is None) == (expected is None)
        assert_close([] if expected is None else [place], [] if expected is None else [expected])
        assert not fused or not place.requires_grad
        assert not fused or param.grad is None or not param.grad.any()
    for param in (*params, use.x):
        param.grad = None  # breaks the cycle of the graph and its tensor


@KINDS
def test_what_lies_beside_the_layer_can_be_differentiated_twice(kind, make_layer, assert_close):
    """The plain part of the loss, and what plain PyTorch computes from recorded gradients that are detached."""
    use, z = Use(make_layer(kind), "auto", "square"), torch.tensor([2.0, 3.0], requires_grad=True)
    value = use(use.x) + z.pow(3).sum()
    dz, dx = torch.autograd.grad(value, [z, use.x], create_graph=True)
    (second,) = torch.autograd.grad(dz.sum(), z, retain_graph=True)
    assert_close([second], [6 * z.detach()])
    (third,) = torch.autograd.grad((dx.detach() * z.sum()).sum(), z)
    assert_close([third], [dx.detach().sum().expand(2)])
