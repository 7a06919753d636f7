"""A fused layer inside a reentrant checkpoint, while plain PyTorch uses the same weights outside of it.

The checkpoint runs a backward of its own inside the other, so that owners see every weight accumulated twice.
"""

from functools import partial

import pytest
import torch
from support.contract_helpers import of_plain, plain, plus
from support.world import launch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

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


def backward(layer, seed, *, plain_first):
    """Run one backward through both uses; the use that forward calls last comes first."""
    x, dy = layer.batch(seed)
    checkpointed = partial(checkpoint, layer, use_reentrant=True)
    if plain_first:
        fused = (checkpointed(x.requires_grad_()) * dy).nansum()
        loss = fused + plain(layer, seed)
    else:
        loss = plain(layer, seed)
        loss = loss + (checkpointed(x.requires_grad_()) * dy).nansum()
    loss.backward()


@PLAIN_FIRST
@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("how", ["hook of the node", "post-accumulate hook"])
def test_an_owner_that_takes_what_arrives_gets_both(how, zero_out_wgrad, plain_first, make_layer, assert_close):
    layer = make_layer()
    layer.attach(False)
    owner = Owner(layer.params, how)
    for param in layer.params:
        param.zero_out_wgrad = zero_out_wgrad
    for step in range(2):
        before = layer.attach(False)
        for seed in SEEDS:
            backward(layer, seed + step, plain_first=plain_first)
        seeds = [seed + step for seed in SEEDS]
        assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds), of_plain(layer, *seeds)))
        assert layer.grads() == [None] * len(layer.params)
    assert owner.arrived == 2 * 2 * len(SEEDS) * len(layer.params)


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
