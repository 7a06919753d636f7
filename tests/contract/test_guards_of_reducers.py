"""Guard 8 where `main_grad` comes only after forward: DDP and FSDP2 reduce `.grad`, and would miss it."""

from functools import partial

import pytest
import torch
from support.systems import one_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = [
    pytest.mark.usefixtures("nan_in_empty"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

LAYERS = pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("moe", False)])
ATTRIBUTE = pytest.mark.parametrize("attribute", [None, False])


class Wrapped(torch.nn.Module):
    """A layer with its weights registered, perhaps under a checkpoint."""

    def __init__(self, layer, use_reentrant=None):
        super().__init__()
        self.layer, self.weights, self.use_reentrant = layer, torch.nn.ParameterList(layer.params), use_reentrant

    def forward(self, x, **options):
        run = partial(self.layer, **options)
        return run(x) if self.use_reentrant is None else checkpoint(run, x, use_reentrant=self.use_reentrant)


@pytest.fixture
def ddp():
    with one_rank():
        yield DistributedDataParallel


def refused_and_untouched(layer, before, attribute, reducer, backward):
    with pytest.raises(RuntimeError, match=rf"weight.*: {reducer} reduces .*would miss one in main_grad"):
        backward()
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert layer.grads() == [None] * len(layer.params)
    assert all(getattr(p, "grad_added_to_main_grad", None) is attribute for p in layer.params)


@ATTRIBUTE
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@LAYERS
def test_main_grad_attached_after_the_forward_of_ddp(kind, packed, use_reentrant, attribute, ddp, make_layer):
    layer = make_layer(kind, packed)
    model, (x, dy) = ddp(Wrapped(layer, use_reentrant)), layer.batch(1)
    y = model(x.requires_grad_())
    before = layer.attach(attribute)
    refused_and_untouched(layer, before, attribute, "DistributedDataParallel", lambda: y.backward(dy))


@ATTRIBUTE
def test_main_grad_attached_after_the_forward_of_an_earlier_micro_batch(attribute, ddp, make_layer, assert_close):
    """One micro-batch has been reduced; the graph of the other is from before main_grad, too."""
    layer = make_layer()
    model, batches = ddp(Wrapped(layer)), [layer.batch(seed) for seed in (1, 2)]
    with model.no_sync():
        outputs = [model(x) for x, _ in batches]
        outputs[0].backward(batches[0][1])
        assert_close(layer.grads(), layer.wgrads(1))
        layer.attach(attribute)
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel .*would miss one in main_grad"):
            outputs[1].backward(batches[1][1])
    assert_close(layer.grads(), layer.wgrads(1))


@pytest.mark.parametrize("mode", ["off", "grad"])
def test_main_grad_attached_after_the_forward_of_ddp_is_no_concern_of_other_modes(mode, ddp, make_layer, assert_close):
    layer = make_layer()
    model, (x, dy) = ddp(Wrapped(layer)), layer.batch(1)
    y = model(x, accumulate_wgrad=mode)
    before = layer.attach(False)
    y.backward(dy)
    assert_close(layer.grads(), layer.wgrads(1))
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))


@ATTRIBUTE
def test_main_grad_attached_after_a_forward_that_ddp_was_not_around(attribute, ddp, make_layer, assert_close):
    """The module's own forward, of parameters that a DDP manages, and a parameter that none does."""
    layer = make_layer()
    wrapped, (x, dy) = Wrapped(layer), layer.batch(1)
    ddp(wrapped)  # gone at once
    y = wrapped(x)
    before = layer.attach(attribute)
    y.backward(dy)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1), strict=True)])


class Sharded(torch.nn.Module):
    """A layer over parameters that FSDP2 gathers; `seen` are those of the last forward."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, []
        self.register_parameter("fc1", layer.params[0])
        self.register_parameter("fc2", layer.params[1])

    def forward(self, x, **options):
        self.seen = [self.fc1, self.fc2]
        self.layer.params = self.seen
        self.layer.groups = [[p] for p in self.seen]
        return self.layer(x, **options)


@ATTRIBUTE
@pytest.mark.parametrize("reshard", [False, True])
def test_main_grad_attached_after_the_forward_of_fsdp2(reshard, attribute, make_layer):
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        layer = make_layer()
        model, (x, dy) = fully_shard(Sharded(layer), mesh=mesh, reshard_after_forward=reshard), layer.batch(1)
        y = model(x)
        assert all(type(p) is torch.nn.Parameter for p in layer.params)  # not sharded
        before = layer.attach(attribute)
        refused_and_untouched(layer, before, attribute, r"FSDP2 \(fully_shard\)", lambda: y.backward(dy))


def test_what_fsdp2_reduces_without_main_grad(make_layer, assert_close):
    """So that the test above is about main_grad."""
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        layer = make_layer()
        wgrads = layer.wgrads(1)
        model, (x, dy) = fully_shard(Sharded(layer), mesh=mesh), layer.batch(1)
        model(x).backward(dy)
        assert_close([p.grad.to_local() for p in model.parameters()], wgrads)


@pytest.mark.parametrize("packed", [True, False])
def test_main_grad_attached_between_forward_and_backward_is_added_to(packed, make_layer, assert_close):
    """Where nothing reduces `.grad`; in "auto", which decides in backward."""
    layer = make_layer(packed=packed)
    x, dy = layer.batch(1)
    y = layer(x)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    y.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(1))
    with buffer.as_grad():
        assert_close(layer.grads(), layer.wgrads(1))
