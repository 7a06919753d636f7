"""Guard 8, wherever a layer runs and whenever `main_grad` is attached: DDP, FSDP2 and DeepSpeed reduce `.grad`."""

import copy
import subprocess
import sys
import types
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
    """`.grad` holds one micro-batch; the graph of the other is older than main_grad, too."""
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
    """The module's own forward runs, and the DDP that managed its parameters is gone."""
    layer = make_layer()
    wrapped, (x, dy) = Wrapped(layer), layer.batch(1)
    ddp(wrapped)  # gone at once
    y = wrapped(x)
    before = layer.attach(attribute)
    y.backward(dy)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1), strict=True)])


def refused_in_forward(layer, delayed, reducer, forward):
    """Assert that forward refuses main_grad or a delayed gradient, but not under no_grad."""
    before = [] if delayed else layer.attach(False)
    options = {"wgrad_queue": fusedmlp.WgradQueue(), "accumulate_wgrad": "off"} if delayed else {}
    with torch.no_grad():
        forward(**options)
    what = "a delayed gradient" if delayed else "one in main_grad"
    with pytest.raises(RuntimeError, match=rf"weight.*: {reducer} reduces .*would miss {what}; use accumulate_wgrad="):
        forward(**options)
    assert layer.grads() == [None] * len(layer.params)
    assert all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=False))


DELAYED = pytest.mark.parametrize("delayed", [False, True])


class Dense(Wrapped):
    """A module that registers the weights of a layer, but does not call it."""

    def forward(self, x):
        return 2 * x


@DELAYED
@LAYERS
def test_a_layer_that_is_called_after_ddp_has_returned(kind, packed, delayed, ddp, make_layer):
    layer = make_layer(kind, packed)
    model, (x, _) = ddp(Dense(layer)), layer.batch(1)
    refused_in_forward(layer, delayed, "DistributedDataParallel", lambda **options: layer(model(x), **options))


def test_a_layer_that_is_called_after_ddp_has_returned_has_the_other_modes(ddp, make_layer, assert_close):
    layer = make_layer()
    model = ddp(Dense(layer))
    for seed in (1, 2):
        x, dy = layer.batch(seed)
        layer(model(x) / 2, accumulate_wgrad="grad").backward(dy)
    assert_close(layer.grads(), layer.wgrads(1, 2))


@pytest.mark.slow
@DELAYED
def test_ddp_that_is_made_after_the_first_step(delayed, ddp, make_layer, assert_close):
    """A parameter without a reducer gets one, and loses it again."""
    layer = make_layer()
    before, (x, dy) = layer.attach(False), layer.batch(1)
    wrapped = Wrapped(layer)
    wrapped(x).backward(dy)
    model = ddp(wrapped)
    model.itself = [model]  # a cycle, which only the garbage collector frees
    for module in (model, wrapped):
        with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
            module(x, wgrad_queue=fusedmlp.WgradQueue() if delayed else None)
    del model, module
    wrapped(x).backward(dy)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1, 1), strict=True)])


@DELAYED
def test_ddp_that_is_made_between_forward_and_backward(delayed, ddp, make_layer):
    layer = make_layer()
    before, (x, dy) = layer.attach(False), layer.batch(1)
    y = layer(x, wgrad_queue=fusedmlp.WgradQueue() if delayed else None)
    model = ddp(Wrapped(layer), init_sync=False)  # init_sync would write to the weights
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        y.backward(dy)
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    del model


@DELAYED
def test_ddp_with_the_python_reducer(delayed, ddp, make_layer):
    """PyTorch reports no active DDP in forward if the Python reducer is used."""
    layer = make_layer()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model, (x, _) = ddp(Wrapped(layer)), layer.batch(1)
        refused_in_forward(layer, delayed, "DistributedDataParallel", partial(model, x))


@DELAYED
def test_a_copy_of_ddp(delayed, ddp, make_layer):
    """PyTorch's hook for registered submodules does not see a copy."""
    model = copy.deepcopy(ddp(Wrapped(make_layer())))
    layer = model.module.layer
    layer.params = list(model.module.weights)
    layer.groups = [layer.params[:1], layer.params[1:]]
    refused_in_forward(layer, delayed, "DistributedDataParallel", partial(model, layer.batch(1)[0]))


@pytest.mark.slow
def test_ddp_that_is_older_than_fusedmlp():
    program = """
import tempfile, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 1), rank=0, world_size=1)
    module = torch.nn.ParameterList([torch.ones(1, 2, 2)])
    ddp = DistributedDataParallel(module)
    import fusedmlp
    module[0].main_grad = torch.zeros(1, 2, 2)
    try:
        fusedmlp.grouped_linear(torch.ones(3, 2), module[0], [3])
    except RuntimeError as error:
        print(error)
    dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "weight: DistributedDataParallel reduces" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["DistributedDataParallel", r"FSDP2 \(fully_shard\)"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_layer_that_the_compiler_gives_up_is_checked(where, reducer, make_layer):
    """A graph cannot hold a delayed layer: it runs uncompiled, and only its arguments are computed in a graph."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    with one_rank() as mesh:
        layer = make_layer("linear")
        module, x = Plain(layer.params[0]), layer.batch(1)[0]
        if where == "inside":
            module.compile(backend="eager")
        model = DistributedDataParallel(module) if reducer.startswith("D") else fully_shard(module, mesh=mesh)
        if where == "outside":
            model.compile(backend="eager")
        with pytest.raises(RuntimeError, match=rf"weight.*: {reducer} reduces .*would miss a delayed gradient"):
            model(x, [3, 0, 2])


class Plain(torch.nn.Module):
    """A delayed layer that Dynamo can trace into."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.queue = weight, fusedmlp.WgradQueue()

    def forward(self, x, counts):
        return fusedmlp.grouped_linear(x, self.weight, counts, wgrad_queue=self.queue)


def hp_mapping(param):
    """Mark a parameter as ZeRO 1 and 2 do, besides the hook."""
    param._hp_mapping = None


def ds_id(param):
    """Mark a parameter as ZeRO 3 does, besides a hook of deepspeed.utils.nvtx."""
    param.ds_id = 0


def hook(param):
    """Register a hook as ZeRO 1 and 2 do."""
    take = types.FunctionType((lambda param: None).__code__, {"__name__": "deepspeed.runtime.zero.stage_1_and_2"})
    param.register_post_accumulate_grad_hook(take)


@DELAYED
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mark", [hp_mapping, ds_id, hook])
def test_deepspeed(mark, packed, delayed, make_layer, monkeypatch, assert_close):
    """DeepSpeed is recognised by its parameters; the other modes are right."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    layer = make_layer(packed=packed)
    x, dy = layer.batch(1)
    layer(x).backward(dy)  # before DeepSpeed comes
    assert_close(layer.grads(), layer.wgrads(1))
    for param in layer.params:
        param.grad = None
        mark(param)
    refused_in_forward(layer, delayed, "DeepSpeed", partial(layer, x))
    layer(x, accumulate_wgrad="off").backward(dy)
    assert_close(layer.grads(), layer.wgrads(1))


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
    """The test above refuses because of main_grad alone."""
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        layer = make_layer()
        wgrads = layer.wgrads(1)
        model, (x, dy) = fully_shard(Sharded(layer), mesh=mesh), layer.batch(1)
        model(x).backward(dy)
        assert_close([p.grad.to_local() for p in model.parameters()], wgrads)


@pytest.mark.parametrize("packed", [True, False])
def test_main_grad_attached_between_forward_and_backward_is_added_to(packed, make_layer, assert_close):
    """Nothing reduces `.grad` here, and mode "auto" decides in backward."""
    layer = make_layer(packed=packed)
    x, dy = layer.batch(1)
    y = layer(x)
    fusedmlp.MainGradBuffer(layer.params)
    y.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(1))
    assert_close(layer.grads(), layer.wgrads(1))
