"""Guards 10 and 11: weights and graphs that are used twice (list: test_guards.py).

Without `overwrite_main_grad`, `tied` and `retain_graph` of support/systems.py hold them, in every mode.
"""

import pytest
import torch

import fusedmlp
from bench.oracle import reference

pytestmark = pytest.mark.usefixtures("nan_in_empty")

DELAYED = pytest.mark.parametrize("delayed", [False, True])


def overwriting(layer):
    layer.attach(False)
    for param in layer.params:
        param.overwrite_main_grad = True
        param.main_grad.fill_(float("nan"))
    return layer


@DELAYED
@pytest.mark.parametrize("packed", [True, False])
def test_guard_10_two_calls_overwrite_once(packed, delayed, make_layer, assert_close):
    layer, queue = overwriting(make_layer("mlp", packed)), fusedmlp.WgradQueue()
    for seeds in ((1, 2), (3, 4)):  # a second step overwrites again
        batches = [layer.batch(seed) for seed in seeds]
        outputs = [layer(x, wgrad_queue=queue if delayed else None) for x, _ in batches]
        torch.autograd.backward(outputs, [dy for _, dy in batches])
        queue.run()
        assert_close(layer.main_grads(), layer.wgrads(*seeds))


@DELAYED
def test_guard_11_a_second_backward_overwrites_again(delayed, make_layer, assert_close):
    layer, queue = overwriting(make_layer()), fusedmlp.WgradQueue()
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue if delayed else None)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    queue.run()
    assert_close(layer.main_grads(), layer.wgrads(1))


def fc1_is_fc2(weight, x, **options):
    return fusedmlp.grouped_mlp(x, weight, weight, [3, 2], activation="relu", **options)


def two_experts_share_a_weight(weight, x, **options):
    return fusedmlp.grouped_linear(x, [weight, weight], [3, 2], **options)


USES = {  # of one weight twice in one call: its shape, and the same in plain PyTorch
    fc1_is_fc2: ((2, 4, 4), lambda w, x: reference.rows(x, w, w, [3, 2], activation="relu")),
    two_experts_share_a_weight: ((4, 4), lambda w, x: x @ w.T),
}


@DELAYED
@pytest.mark.parametrize("case", ["main_grad", "main_grad, first", "grad", "grad, existing", "off", "off, existing"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_guard_10_one_weight_twice_in_one_call(use, case, delayed, assert_close):
    generator, mode = torch.Generator().manual_seed(0), case.split(",")[0]
    shape, plain = USES[use]
    weight, x, dy = (torch.randn(size, generator=generator) for size in (shape, (5, 4), (5, 4)))
    weight.requires_grad_()
    if mode == "main_grad":
        weight.main_grad, weight.overwrite_main_grad = (
            torch.full_like(weight, 2.0, requires_grad=False),
            "first" in case,
        )
    if "existing" in case:
        weight.grad = torch.full_like(weight, 2.0)
    queue = fusedmlp.WgradQueue()
    use(weight, x, accumulate_wgrad=mode, wgrad_queue=queue if delayed else None).backward(dy)
    queue.run()
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(wide, x.double()), [wide], dy.double())
    start = 2.0 if case == "main_grad" or "existing" in case else 0.0
    assert_close([weight.main_grad if mode == "main_grad" else weight.grad], [start + expected])
