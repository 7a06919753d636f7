"""A fused layer inside a reentrant checkpoint, while plain PyTorch uses the same weights outside of it.

The checkpoint runs a backward of its own inside the other, so that owners see every weight accumulated twice.
"""

from functools import partial

import pytest
import torch
from support.contract_helpers import plus
from support.world import launch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = [
    pytest.mark.usefixtures("nan_in_empty"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per expert"])
FIRST = pytest.mark.parametrize("first", [False, True], ids=["adding", "is_first_microbatch"])
PLAIN_FIRST = pytest.mark.parametrize("plain_first", [False, True], ids=["fused comes first", "plain comes first"])
SEEDS = (1, 2, 3)


class Owner:
    """Takes every gradient once it is accumulated, as Megatron's DDP does; `arrived` counts them."""

    def __init__(self, params, how):
        self.arrived, self.nodes = 0, []  # nodes are kept: their hooks die with them
        for param in params:
            if how == "post-accumulate hook":
                param.register_post_accumulate_grad_hook(self.take)
            else:
                self.nodes.append(get_gradient_edge(param).node)
                self.nodes[-1].register_hook(partial(self.take, param))

    def take(self, param, *_):
        self.arrived += 1
        if param.grad is not None and (not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False)):
            param.main_grad.add_(param.grad)
        param.grad = None


def plain(layer, seed):
    return sum((seed * p.square()).sum() for p in layer.params)


def backward(layer, seed, *, plain_first, first):
    """Run one backward through both uses; the use that forward calls last comes first."""
    x, dy = layer.batch(seed)
    checkpointed = partial(checkpoint, partial(layer, is_first_microbatch=first), use_reentrant=True)
    if plain_first:
        fused = (checkpointed(x.requires_grad_()) * dy).nansum()
        loss = fused + plain(layer, seed)
    else:
        loss = plain(layer, seed)
        loss = loss + (checkpointed(x.requires_grad_()) * dy).nansum()
    loss.backward()


def of_plain(layer, *seeds):
    return [sum(2 * seed * p.detach().double() for seed in seeds) for p in layer.params]


def start_of_step(layer, first):
    """Attach main_grads; return what the step adds to: zeros where it overwrites NaN."""
    before = layer.attach(False)
    if first:
        for param in layer.params:
            param.main_grad.fill_(float("nan"))
        before = [torch.zeros_like(b) for b in before]
    return before


@PACKED
@FIRST
@PLAIN_FIRST
@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("how", ["hook of the node", "post-accumulate hook"])
def test_an_owner_that_takes_what_arrives_gets_both(
    how, zero_out_wgrad, plain_first, first, packed, make_layer, assert_close
):
    layer = make_layer(packed=packed)
    layer.attach(False)
    owner = Owner(layer.params, how)
    for param in layer.params:
        param.zero_out_wgrad = zero_out_wgrad
    for step in range(2):
        before = start_of_step(layer, first)
        for i, seed in enumerate(SEEDS):
            backward(layer, seed + step, plain_first=plain_first, first=first and i == 0)
        seeds = [seed + step for seed in SEEDS]
        assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds), of_plain(layer, *seeds)))
        assert layer.grads() == [None] * len(layer.params)
    assert owner.arrived == 2 * 2 * len(SEEDS) * len(layer.params)


@PACKED
@FIRST
@PLAIN_FIRST
def test_a_buffer_steps_with_both(plain_first, first, packed, make_layer, assert_close):
    layer = make_layer(packed=packed)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    for step in range(2):
        buffer.zero_()
        for param in layer.params if first else []:
            param.main_grad.fill_(float("nan"))
        for i, seed in enumerate(SEEDS):
            backward(layer, seed + step, plain_first=plain_first, first=first and i == 0)
        seeds = [seed + step for seed in SEEDS]
        with buffer.as_grad():
            assert_close(layer.grads(), plus(layer.wgrads(*seeds), of_plain(layer, *seeds)))


@PACKED
@PLAIN_FIRST
@pytest.mark.parametrize("by", ["is_first_microbatch", "overwrite_main_grad"])
@pytest.mark.parametrize("inside", [False, True], ids=["plain use outside", "plain use in its own checkpoint"])
def test_the_first_gradient_overwrites_once_wherever_the_plain_use_is(
    inside, by, plain_first, packed, make_layer, assert_close
):
    """Or it is refused: nothing tells which backward a checkpoint without a fused layer is part of."""
    layer = make_layer(packed=packed)
    start_of_step(layer, first=True)
    for param in layer.params:
        param.overwrite_main_grad = by == "overwrite_main_grad"
    one, (x, dy) = torch.ones((), requires_grad=True), layer.batch(1)

    def fused(x):
        return (layer(x, is_first_microbatch=by == "is_first_microbatch") * dy).nansum()

    def scaled(scale):
        return plain(layer, 1) * scale

    uses = [
        partial(checkpoint, fused, x.requires_grad_(), use_reentrant=True),
        partial(checkpoint, scaled, one, use_reentrant=True) if inside else partial(scaled, one),
    ]
    loss = sum([use() for use in (uses if plain_first else reversed(uses))])
    if inside and plain_first and by == "overwrite_main_grad":
        with pytest.raises(RuntimeError, match="is used by plain PyTorch in a reentrant checkpoint"):
            loss.backward()
        return
    loss.backward()
    assert_close(layer.main_grads(), plus(layer.wgrads(1), of_plain(layer, 1)))


@PACKED
def test_a_plain_gradient_before_a_checkpoints_is_refused_also_after_an_earlier_backward(packed, make_layer):
    """The earlier backward, which overwrote, is over. The next one would erase a plain gradient that is added now."""
    layer = make_layer(packed=packed)
    layer.attach(False)
    for param in layer.params:
        param.overwrite_main_grad = True
    layer.backward(1)
    one, (x, dy) = torch.ones((), requires_grad=True), layer.batch(2)
    fused = checkpoint(lambda x: (layer(x) * dy).nansum(), x.requires_grad_(), use_reentrant=True)
    loss = fused + checkpoint(lambda scale: plain(layer, 2) * scale, one, use_reentrant=True)  # its gradient is first
    with pytest.raises(RuntimeError, match="is used by plain PyTorch in a reentrant checkpoint"):
        loss.backward()


def evaluate(layer):
    with torch.no_grad():
        layer(layer.batch(5)[0], is_first_microbatch=True)


@PACKED
@pytest.mark.parametrize("owned", [False, True], ids=["buffer", "owner"])
def test_a_plain_gradient_after_an_evaluation_is_kept_with_what_came_before(owned, packed, make_layer, assert_close):
    layer = make_layer(packed=packed)
    if owned:
        before = layer.attach(False)
        Owner(layer.params, "post-accumulate hook")
    else:
        buffer, before = fusedmlp.MainGradBuffer(layer.params), [torch.zeros_like(p) for p in layer.params]
    layer.backward(1)
    evaluate(layer)
    for seed in (2, 3):
        plain(layer, seed).backward()
    expected = plus(before, layer.wgrads(1), of_plain(layer, 2, 3))
    if owned:
        assert_close(layer.main_grads(), expected)
    else:
        with buffer.as_grad():
            assert_close(layer.grads(), expected)


@PACKED
def test_nothing_of_an_evaluation_is_left_in_the_next_step(packed, make_layer, assert_close):
    layer = make_layer(packed=packed)
    layer.attach(False)
    Owner(layer.params, "post-accumulate hook")
    evaluate(layer)
    plain(layer, 4).backward()
    start_of_step(layer, first=True)
    for seed in (1, 2):
        backward(layer, seed, plain_first=False, first=seed == 1)
    assert_close(layer.main_grads(), plus(layer.wgrads(1, 2), of_plain(layer, 1, 2)))


def run_in_megatron(overlap):
    """The largest relative error of a gradient in the buffers of Megatron's own DDP, in each order and step."""
    from support import megatron_experts as megatron

    class Model(megatron.Model):
        def forward(self, x, probs, plain_first):
            def experts(h):
                return self.experts(h, torch.tensor(self.counts), probs)[0]

            def plain():
                return sum(p.square().sum() for p in self.experts.parameters())

            early = None if plain_first else plain()
            y = checkpoint(experts, self.dense(x), use_reentrant=True)
            return y, plain() if plain_first else early

    megatron.megatron_world.model_parallel()
    cell = megatron.Cell(overlap_grad_reduce=overlap, microbatches=3)
    config, errors = megatron.config_of(cell), []
    for plain_first in (False, True):
        torch.manual_seed(0)
        model = Model(config, cell)
        ddp_config = megatron.DistributedDataParallelConfig(True, overlap_grad_reduce=overlap)
        ddp = megatron.DistributedDataParallel(config, ddp_config, model)
        weights = megatron.weights_of(model)
        want = megatron.expected_grads(weights, cell)
        for name, weight in weights.items():
            want[name] += 2 * cell.microbatches * weight if "experts" in name else 0
        for _ in range(2):
            ddp.zero_grad_buffer()
            for i in range(cell.microbatches):
                with megatron.nullcontext() if i == cell.microbatches - 1 else ddp.no_sync():
                    x, probs, dy = megatron.batch(cell, i, 0)
                    y, plain = ddp(x, probs, plain_first)
                    ((y * dy).sum() + plain).backward()
            ddp.finish_grad_sync()
            got = megatron.landed(ddp, model, want)
            errors.append(max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_megatrons_own_ddp_gets_both(overlap, tmp_path):
    pytest.importorskip("megatron.core")
    (errors,) = launch("contract.test_plain_beside_checkpoint:run_in_megatron", 1, tmp_path, overlap)
    assert len(errors) == 4
    assert max(errors) < 1e-5
