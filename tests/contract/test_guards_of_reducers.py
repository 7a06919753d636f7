"""Guard 8, wherever a layer runs and whenever `main_grad` is attached: DDP, FSDP2 and DeepSpeed reduce `.grad`."""

import copy
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, plus, unchanged
from support.systems import one_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Wrapped(torch.nn.Module):
    """A layer with its weights registered, perhaps under a checkpoint."""

    def __init__(self, layer, use_reentrant=None):
        super().__init__()
        self.layer, self.weights, self.use_reentrant = layer, torch.nn.ParameterList(layer.params), use_reentrant

    def forward(self, x, **options):
        self.layer.use([*self.weights])  # FSDP2 gives each forward others
        run = partial(self.layer, **options)
        return run(x) if self.use_reentrant is None else checkpoint(run, x, use_reentrant=self.use_reentrant)


class Dense(Wrapped):
    """A module that registers the weights of a layer, but does not call it."""

    def forward(self, x):
        return 1 * x


def no_sync(ddp, layer):
    model = ddp(Wrapped(layer))

    def forward(x, **options):
        with model.no_sync():
            return model(x, **options)

    return forward


def reentrant_checkpoint(ddp, layer):
    """Return a forward and backward: the forward of such a checkpoint does not know that a gradient will be wanted."""
    model = ddp(Wrapped(layer, True))

    def forward(x, **options):
        y = model(x.requires_grad_(), **options)
        if torch.is_grad_enabled():
            y.sum().backward()

    return forward


def delayed_all_reduce(ddp, layer):
    module = Wrapped(layer)
    module.head = torch.nn.Linear(4, 4)
    named = [(name, param) for name, param in module.named_parameters() if "head" not in name]
    return ddp(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module.head.weight)


def called_afterwards(ddp, layer):
    model = ddp(Dense(layer))
    return lambda x, **options: layer(model(x), **options)


def python_reducer(ddp, layer):
    """Make PyTorch report no active DDP in forward."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return ddp(Wrapped(layer))


def copied(ddp, layer):
    """Make a DDP that PyTorch's hook for registered submodules does not see."""
    model = copy.deepcopy(ddp(Wrapped(layer)))
    model.module.layer = layer
    layer.use([*model.module.weights])
    return model


WAYS = {  # to run a layer with DDP: each gives a forward of x and the layer's options
    "inside": lambda ddp, layer: ddp(Wrapped(layer)),
    "no_sync": no_sync,
    "checkpoint": lambda ddp, layer: ddp(Wrapped(layer, False)),
    "reentrant checkpoint": reentrant_checkpoint,
    "delayed all-reduce": delayed_all_reduce,
    "called afterwards": called_afterwards,
    "Python reducer": python_reducer,
    "copy": copied,
}
CASES = {  # accumulate_wgrad, whether weights have main_grad, whether gradients are delayed
    "main_grad": ("main_grad", True, False),
    "auto": ("auto", True, False),
    "delayed": ("off", False, True),
    "delayed grad": ("grad", False, True),
    "delayed main_grad": ("main_grad", True, True),
}
EACH_CASE = pytest.mark.parametrize("case", CASES)


def refused(layer, case, reducer, forward):
    """Assert that forward refuses main_grad or a delayed gradient, but not under no_grad, and touches nothing."""
    mode, attached, delayed = CASES[case]
    before, (x, _) = layer.attach(False) if attached else [], layer.batch(1)
    options = {"accumulate_wgrad": mode, "wgrad_queue": fusedmlp.WgradQueue() if delayed else None}
    with torch.no_grad():
        forward(x, **options)
    grads = layer.grads()  # None, or zeros of DDP
    what = "a delayed gradient" if delayed else "one in main_grad"
    with pytest.raises(RuntimeError, match=rf"weight.*: {reducer} reduces .*would miss {what}; use accumulate_wgrad="):
        forward(x, **options)
    assert all(param.grad is grad for param, grad in zip(layer.params, grads, strict=True))
    untouched(layer, before, False)


def untouched(layer, before, attribute):
    assert not any(grad.any() for grad in layer.grads() if grad is not None)
    assert all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=False))
    assert all(getattr(p, "grad_added_to_main_grad", attribute) is attribute for p in layer.params)


@EACH_CASE
@pytest.mark.parametrize("way", WAYS)
def test_ddp_refuses_main_grad_and_delay_wherever_the_layer_is(way, case, ddp, make_layer):
    layer = make_layer("mlp", packed=False)
    refused(layer, case, "DistributedDataParallel", WAYS[way](ddp, layer))


def sharded(layer, *, reshard):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Wrapped(layer), reshard_after_forward=reshard)


WRAPS = {  # and the name of the reducer
    "DDP": (lambda layer: DistributedDataParallel(Wrapped(layer)), "DistributedDataParallel"),
    "DDP, checkpoint": (lambda layer: DistributedDataParallel(Wrapped(layer, False)), "DistributedDataParallel"),
    "DDP, reentrant": (lambda layer: DistributedDataParallel(Wrapped(layer, True)), "DistributedDataParallel"),
    "FSDP2": (partial(sharded, reshard=False), r"FSDP2 \(fully_shard\)"),
    "FSDP2, resharding": (partial(sharded, reshard=True), r"FSDP2 \(fully_shard\)"),
}


@pytest.mark.parametrize("attribute", [None, False])
@PACKED
@pytest.mark.parametrize("wrap", WRAPS)
def test_main_grad_attached_after_the_forward(wrap, packed, attribute, ddp, make_layer):
    layer, (make, reducer) = make_layer("mlp", packed), WRAPS[wrap]
    model, (x, dy) = make(layer), layer.batch(1)
    y = model(x.requires_grad_())
    assert all(type(p) is torch.nn.Parameter for p in layer.params)  # not sharded
    before = layer.attach(attribute)
    with pytest.raises(RuntimeError, match=rf"weight.*: {reducer} reduces .*would miss one in main_grad"):
        y.backward(dy)
    untouched(layer, before, attribute)
    assert layer.grads() == [None] * len(layer.params)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("mode", ["grad", "off", "auto"])
@pytest.mark.parametrize("way", ["inside", "called afterwards"])
def test_ddp_accepts_the_other_modes(way, mode, bucket_view, ddp, make_layer, assert_close):
    """Modes without main_grad are accepted, also if one is attached after forward."""
    layer, before = make_layer(), None
    forward = WAYS[way](partial(ddp, gradient_as_bucket_view=bucket_view), layer)
    for seed in (1, 2, 3):
        x, dy = layer.batch(seed)
        y = forward(x, accumulate_wgrad=mode)
        if mode != "auto":
            before = layer.attach(False)
        y.backward(dy)
        assert_close(layer.grads(), layer.wgrads(*range(1, seed + 1)))
        assert before is None or all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=True))


@DELAYED
def test_ddp_leaves_ignored_parameters_to_main_grad(delayed, ddp, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    before, model = layer.attach(), Wrapped(layer)
    model.head = torch.nn.Linear(4, 4)
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["weights.0", "weights.1"])
    wrapped = ddp(model, find_unused_parameters=True)
    x, dy = layer.batch(1)
    wrapped(x, wgrad_queue=queue if delayed else None).backward(dy)
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


# DDP that comes or goes


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
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 1)))


@DELAYED
def test_ddp_that_is_made_between_forward_and_backward(delayed, ddp, make_layer):
    layer = make_layer()
    before, (x, dy) = layer.attach(False), layer.batch(1)
    y = layer(x, wgrad_queue=fusedmlp.WgradQueue() if delayed else None)
    model = ddp(Wrapped(layer), init_sync=False)  # init_sync would write to the weights
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        y.backward(dy)
    assert unchanged(layer.main_grads(), before)
    del model


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


def hook_of_deepspeed(param):
    take = types.FunctionType((lambda param: None).__code__, {"__name__": "deepspeed.runtime.zero.stage_1_and_2"})
    param.register_post_accumulate_grad_hook(take)


MARKS = {  # of DeepSpeed on parameters
    "a hook of ZeRO 1 and 2": hook_of_deepspeed,
    "ZeRO 1 and 2": lambda param: setattr(param, "_hp_mapping", None),
    "ZeRO 3": lambda param: setattr(param, "ds_id", 0),  # besides a hook of deepspeed.utils.nvtx
}


@EACH_CASE
@pytest.mark.parametrize("mark", MARKS)
def test_deepspeed(mark, case, make_layer, monkeypatch, assert_close):
    """DeepSpeed is recognised by its parameters; the other modes are right."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    layer = make_layer()
    layer.backward(1)  # before DeepSpeed comes
    assert_close(layer.grads(), layer.wgrads(1))
    for param in layer.params:
        param.grad = None
        MARKS[mark](param)
    refused(layer, case, "DeepSpeed", layer)
    layer.backward(1, accumulate_wgrad="off")
    assert_close(layer.grads(), layer.wgrads(1))


def test_a_buffer_made_between_forward_and_backward_is_added_to(make_layer, assert_close):
    """Nothing reduces `.grad` here, and mode "auto" decides in backward."""
    layer = make_layer()
    x, dy = layer.batch(1)
    y = layer(x)
    _kept = fusedmlp.MainGradBuffer(layer.params)
    y.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(1))
    assert_close(layer.grads(), layer.wgrads(1))
