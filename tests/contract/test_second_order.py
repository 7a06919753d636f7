"""Guard 6: every way to a second derivative raises; first derivatives that `create_graph=True` records are right."""

import warnings
from functools import partial

import pytest
import torch
from torch.autograd import functional
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

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

    def gradients(self, *inputs, **options):
        """Gradients of the loss, recorded by `create_graph=True`."""
        return torch.autograd.grad(self(self.x), inputs, create_graph=True, **options)


# Ways to a second derivative


def of_dx_for_weights(use):
    (dx,) = use.gradients(use.x)
    torch.autograd.grad(dx.sum(), use.layer.params)


def of_dx_for_a_weight_perhaps_unused(use):
    (dx,) = use.gradients(use.x)
    torch.autograd.grad(dx, use.layer.params[-1], torch.ones_like(dx), allow_unused=True)


def of_dx_for_a_weight_or_zeros(use):
    (dx,) = use.gradients(use.x)
    torch.autograd.grad(dx.sum(), use.layer.params[0], materialize_grads=True)


def of_dx_for_x(use):
    (dx,) = use.gradients(use.x)
    torch.autograd.grad(dx.square().sum(), use.x)


def of_dw_for_x(use):
    dw = use.gradients(*use.layer.params)
    torch.autograd.grad(sum(g.sum() for g in dw), use.x)


def of_one_dw_for_x(use):
    (dw,) = use.gradients(use.layer.params[-1])
    torch.autograd.grad(dw.sum(), use.x)


def of_dw_for_weights(use):
    (dw,) = use.gradients(use.layer.params[0])
    torch.autograd.grad(dw.square().sum(), use.layer.params, allow_unused=True)


def of_both_for_both(use):
    grads = use.gradients(use.x, *use.layer.params)
    torch.autograd.grad([g.sum() for g in grads], [use.x, *use.layer.params])


def of_dx_for_what_x_comes_from(use):
    source = torch.ones_like(use.x, requires_grad=True)
    (gradient,) = torch.autograd.grad(use(use.x.detach() * source), source, create_graph=True)
    torch.autograd.grad(gradient.sum(), source)


def penalty(use):
    value = use(use.x)
    (dx,) = torch.autograd.grad(value, use.x, create_graph=True)
    (value + dx.norm()).backward()


def penalty_on_weights(use):
    value = use(use.x)
    dw = torch.autograd.grad(value, use.layer.params, create_graph=True)
    (value + sum(g.norm() for g in dw)).backward()


def penalty_into_one_weight(use):
    value = use(use.x)
    (dx,) = torch.autograd.grad(value, use.x, create_graph=True)
    (value + dx.norm()).backward(inputs=use.layer.params[:1])


def recorded_backward(use):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True", UserWarning)
        use(use.x).backward(create_graph=True)
    torch.autograd.grad(use.x.grad.sum(), use.layer.params)


def hvp(use):
    functional.hvp(use, use.x, torch.ones_like(use.x))


def vhp(use):
    functional.vhp(use, use.x, torch.ones_like(use.x))


def hessian(use):
    functional.hessian(use, use.x)


def gradient_of_jacobian(use):
    jacobian = functional.jacobian(use, use.x, create_graph=True)
    torch.autograd.grad(jacobian.sum(), use.x)


def in_checkpoint(use):
    (dx,) = torch.autograd.grad(checkpoint(use, use.x, use_reentrant=False), use.x, create_graph=True)
    torch.autograd.grad(dx.sum(), use.layer.params)


def with_tensors_kept_elsewhere(use):
    with save_on_cpu():
        value = use(use.x)
    (dx,) = torch.autograd.grad(value, use.x, create_graph=True)
    torch.autograd.grad(dx.sum(), use.layer.params)


WAYS = [
    of_dx_for_weights,
    of_dx_for_a_weight_perhaps_unused,
    of_dx_for_a_weight_or_zeros,
    of_dx_for_x,
    of_dw_for_x,
    of_one_dw_for_x,
    of_dw_for_weights,
    of_both_for_both,
    of_dx_for_what_x_comes_from,
    penalty,
    penalty_on_weights,
    penalty_into_one_weight,
    recorded_backward,
    hvp,
    vhp,
    hessian,
    gradient_of_jacobian,
    in_checkpoint,
    with_tensors_kept_elsewhere,
]


@KINDS
@MODES
@EACH_LOSS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_second_derivatives_are_refused(way, loss, mode, kind, make_layer):
    use = Use(make_layer(kind, bias=True), mode, loss)
    with REFUSED:
        way(use)


@pytest.mark.parametrize("kind", ["mlp", "moe"])
@EACH_LOSS
def test_a_second_derivative_by_way_of_probabilities_is_refused(loss, kind, make_layer):
    use = Use(make_layer(kind), "auto", loss)
    for wanted in (use.x, use.layer.probs, *use.layer.params):
        (dprobs,) = use.gradients(use.layer.probs)
        with REFUSED:
            torch.autograd.grad(dprobs.sum(), wanted)


@KINDS
@EACH_LOSS
def test_a_second_derivative_by_way_of_biases_is_refused(loss, kind, make_layer):
    use = Use(make_layer(kind, bias=True), "auto", loss)
    for wanted in (use.x, *use.layer.params):
        (db,) = use.gradients(use.layer.biases[0])
        with REFUSED:
            torch.autograd.grad(db.sum(), wanted, allow_unused=True)


@KINDS
def test_a_second_derivative_for_the_gradient_of_y_is_refused(kind, make_layer):
    layer = make_layer(kind)
    x, dy = layer.batch(1)
    (dx,) = torch.autograd.grad(layer(x.requires_grad_()), x, dy.requires_grad_(), create_graph=True)
    with REFUSED:
        torch.autograd.grad(dx[:5].sum(), dy)


@KINDS
@pytest.mark.parametrize("frozen", ["weights", "x"])
def test_a_second_derivative_with_one_side_frozen_is_refused(frozen, kind, make_layer):
    use = Use(make_layer(kind), "auto", "square")
    for tensor in use.layer.params if frozen == "weights" else [use.x]:
        tensor.requires_grad_(False)
    wanted = use.x if frozen == "weights" else use.layer.params[0]
    (gradient,) = use.gradients(wanted)
    with REFUSED:
        torch.autograd.grad(gradient.sum(), wanted)


# First derivatives


@KINDS
@MODES
@EACH_LOSS
def test_first_derivatives_that_are_recorded_are_right(loss, mode, kind, make_layer, assert_close):
    use = Use(make_layer(kind), mode, loss)
    params, x = use.layer.params, use.x
    wide = [t.detach().double().requires_grad_() for t in (x, *params)]
    expected = torch.autograd.grad(LOSSES[loss](use.layer.loop(wide[0], wide[1:])), wide)
    before = [[None if t is None else t.clone() for t in (p.grad, getattr(p, "main_grad", None))] for p in params]
    got = use.gradients(x, *params)
    assert_close(got, expected)
    assert all(g.requires_grad for g in got)
    for param, places in zip(params, before, strict=True):
        for place, held in zip((param.grad, getattr(param, "main_grad", None)), places, strict=True):
            assert (place is None) == (held is None)
            assert held is None or torch.equal(place, held)


@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")  # torch warns once per process
@KINDS
@MODES
@EACH_LOSS
def test_a_recorded_backward_is_right(loss, mode, kind, make_layer, assert_close):
    use = Use(make_layer(kind), mode, loss)
    params, attached = use.layer.params, hasattr(use.layer.params[0], "main_grad") and use.mode != "off"
    before = [
        p.main_grad.clone() if attached else torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params
    ]
    wide = [t.detach().double().requires_grad_() for t in (use.x, *params)]
    expected = torch.autograd.grad(LOSSES[loss](use.layer.loop(wide[0], wide[1:])), wide)
    use(use.x).backward(create_graph=True)
    assert_close([use.x.grad], expected[:1])
    places = [p.main_grad if attached else p.grad for p in params]
    assert_close(places, [b + g for b, g in zip(before, expected[1:], strict=True)])
    if attached:
        assert not any(place.requires_grad for place in places)
        assert not any(p.grad.any() for p in params)
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


@KINDS
def test_a_jacobian_is_right_with_and_without_a_record(kind, make_layer, assert_close):
    layer = make_layer(kind)
    x = layer.batch(1)[0].nan_to_num()
    exact = functional.jacobian(lambda x: layer.loop(x, [p.detach().double() for p in layer.params]), x.double())
    run = partial(layer, accumulate_wgrad="auto")
    for create_graph in (False, True):
        got = functional.jacobian(lambda x: run(x)[:5], x, create_graph=create_graph)
        assert_close([got], [exact])


def test_vjp_is_right(make_layer, assert_close):
    layer = make_layer()
    fusedmlp.MainGradBuffer(layer.params)
    x, dy = layer.batch(1)
    x = x.nan_to_num()
    wide = x.double().requires_grad_()
    layer.loop(wide, [p.detach().double() for p in layer.params]).backward(dy[:5].double())
    _, got = functional.vjp(layer, x, dy)
    assert_close([got], [wide.grad])
    assert not any(main.any() for main in layer.main_grads())
