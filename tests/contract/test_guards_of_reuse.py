"""Guards 10 and 11: weights and graphs that are used twice (list: test_guards.py).

Without `overwrite_main_grad`, `tied` and `retain_graph` of support/systems.py hold them, in every mode. Where one use
is plain PyTorch's: test_plain_and_fused.py.
"""

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, stale

import fusedmlp
from bench.oracle import reference


@DELAYED
@PACKED
@pytest.mark.parametrize("use", ["guard 10, two calls", "guard 11, two backwards"])
def test_the_second_use_overwrites_only_in_another_backward(use, packed, delayed, make_layer, assert_close):
    layer, queue = stale(make_layer("mlp", packed), overwrites=True), fusedmlp.WgradQueue()
    for seeds in ((1, 2), (3, 4)):  # a second step overwrites again
        batches = [layer.batch(seed) for seed in seeds]
        outputs = [layer(x, wgrad_queue=queue if delayed else None) for x, _ in batches]
        if "10" in use:
            torch.autograd.backward(outputs, [dy for _, dy in batches])
        else:
            for _ in range(2):
                outputs[0].backward(batches[0][1], retain_graph=True)
        queue.run()
        assert_close(layer.main_grads(), layer.wgrads(*seeds if "10" in use else seeds[:1]))


def fc1_is_fc2(weight, x, **options):
    return fusedmlp.grouped_mlp(x, weight, weight, [3, 2], activation="relu", **options)


def two_experts_share_a_weight(weight, x, **options):
    return fusedmlp.grouped_linear(x, [weight, weight], [3, 2], **options)


def both_layouts(weight, x, **options):
    """A tied encoder and decoder. The weight is square, so that no error of shape reveals a mix-up."""
    h = fusedmlp.grouped_linear(x, weight, [3, 2], **options)
    return fusedmlp.grouped_linear(h, weight, [3, 2], weight_layout="in_out", **options)


USES = {  # of one weight twice in one graph: its shape, and the same in plain PyTorch
    fc1_is_fc2: ((2, 4, 4), lambda w, x: reference.rows(x, w, w, [3, 2], activation="relu")),
    two_experts_share_a_weight: ((4, 4), lambda w, x: x @ w.T),
    both_layouts: ((2, 4, 4), lambda w, x: reference.gemm(reference.gemm(x, w, [3, 2]), w.mT, [3, 2])),
}


@pytest.mark.parametrize("queue", ["no queue", "queue", "queue that fuses"])
@pytest.mark.parametrize("case", ["main_grad", "main_grad, first", "grad", "grad, existing", "off", "off, existing"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_guard_10_one_weight_twice_in_one_graph(use, case, queue, assert_close):
    generator, mode = torch.Generator().manual_seed(0), case.split(",")[0]
    shape, plain = USES[use]
    weight, x, dy = (torch.randn(size, generator=generator) for size in (shape, (5, 4), (5, 4)))
    weight.requires_grad_()
    if mode == "main_grad":
        weight.main_grad = torch.full_like(weight, 2.0, requires_grad=False)
        weight.overwrite_main_grad = "first" in case
    if "existing" in case:
        weight.grad = torch.full_like(weight, 2.0)
    waiting = fusedmlp.WgradQueue(fuse_microbatches="fuses" in queue)
    use(weight, x, accumulate_wgrad=mode, wgrad_queue=None if queue == "no queue" else waiting).backward(dy)
    waiting.run()
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(wide, x.double()), [wide], dy.double())
    start = 2.0 if case == "main_grad" or "existing" in case else 0.0
    assert_close([weight.main_grad if mode == "main_grad" else weight.grad], [start + expected])
