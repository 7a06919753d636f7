"""Guards 7, 8, 9 and 12: refusals that depend on what a layer is used with (list: test_guards.py)."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import pytest
import torch
from support.contract_helpers import plus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jvp", "functional_call in grad"])
def test_guard_7_torch_func_is_refused(transform, make_layer):
    layer = make_layer("linear")
    before = layer.attach(False)
    x = layer.batch(1)[0].nan_to_num()
    module = fusedmlp.GroupedLinear(3, 4, 5)
    call = torch.func.functional_call
    transforms = {
        "grad": lambda: torch.func.grad(lambda t: layer(t).sum())(x),
        "vjp": lambda: torch.func.vjp(layer, x),
        "vmap": lambda: torch.func.vmap(layer)(torch.stack([x, x])),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "functional_call in grad": lambda: torch.func.grad(lambda p: call(module, p, (x, [3, 0, 2])).sum())(
            dict(module.named_parameters())
        ),
    }
    with pytest.raises(RuntimeError, match=r"torch\.func transform"):
        transforms[transform]()
    assert torch.equal(layer.main_grads()[0], before[0])


class Wrapped(torch.nn.Module):
    """A layer with its weights registered, so that DDP manages them."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weights = layer, torch.nn.ParameterList(layer.params)

    def forward(self, x, **options):
        return self.layer(x, **options)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", ["main_grad", "auto", "delayed", "delayed grad", "delayed main_grad"])
def test_guard_8_ddp_refuses_main_grad_and_delay(case, packed, ddp, make_layer):
    layer = make_layer("mlp", packed)
    if case in ("main_grad", "auto", "delayed main_grad"):
        layer.attach()
    queue = fusedmlp.WgradQueue() if "delayed" in case else None
    mode = {"delayed": "off"}.get(case, case.split()[-1])
    model = ddp(Wrapped(layer))
    what = "a delayed gradient" if queue is not None else "one in main_grad"
    with pytest.raises(RuntimeError, match=rf"fc1_weight.*: DistributedDataParallel .*would miss {what}"):
        model(layer.batch(1)[0], accumulate_wgrad=mode, wgrad_queue=queue)


class Recomputed(torch.nn.Module):
    """`Wrapped`, under a checkpoint."""

    def __init__(self, layer, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = Wrapped(layer), use_reentrant

    def forward(self, x, **options):
        return checkpoint(partial(self.inner, **options), x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("where", ["no_sync", "checkpoint", "reentrant checkpoint", "delayed all-reduce"])
def test_guard_8_ddp_refuses_wherever_the_layer_is(where, delayed, ddp, make_layer):
    layer, options = make_layer(), {}
    before = [] if delayed else layer.attach()
    model = Recomputed(layer, where.startswith("reentrant")) if "checkpoint" in where else Wrapped(layer)
    if where == "delayed all-reduce":
        model.head = torch.nn.Linear(4, 4)
        options["delay_all_reduce_named_params"] = [(n, p) for n, p in model.named_parameters() if "head" not in n]
        options["param_to_hook_all_reduce"] = model.head.weight
    wrapped = ddp(model, **options)
    x, dy = layer.batch(1)
    with pytest.raises(RuntimeError, match=r"fc1_weight.*: DistributedDataParallel .*would miss"):
        with wrapped.no_sync() if where == "no_sync" else nullcontext():
            wrapped(x.requires_grad_(), wgrad_queue=fusedmlp.WgradQueue() if delayed else None).backward(dy)
    assert all(p.grad is None for p in layer.params)
    assert all(torch.equal(p.main_grad, b) for p, b in zip(layer.params, before, strict=False))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_guard_8_ddp_lets_evaluation_and_the_module_itself_through(use_reentrant, ddp, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach()
    model = Recomputed(layer, use_reentrant)
    x, dy = layer.batch(1)
    with torch.no_grad():
        y = ddp(model)(x.requires_grad_())  # this DDP is gone afterwards
    assert_close([y[:5]], [layer.loop(x.double()[:5], [p.double() for p in layer.params])])
    model(x).backward(dy)
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("mode", ["grad", "off", "auto"])
def test_guard_8_ddp_accepts_the_other_modes(mode, bucket_view, ddp, make_layer, assert_close):
    layer = make_layer()
    if mode == "off":
        before = layer.attach()
    model = ddp(Wrapped(layer), gradient_as_bucket_view=bucket_view)
    for seed in (1, 2, 3):
        x, dy = layer.batch(seed)
        model(x, accumulate_wgrad=mode).backward(dy)
        assert_close(layer.grads(), layer.wgrads(*range(1, seed + 1)))
    if mode == "off":
        assert all(torch.equal(m, b) for m, b in zip(layer.main_grads(), before, strict=True))


@pytest.mark.parametrize("delayed", [False, True])
def test_guard_8_ddp_leaves_ignored_parameters_to_main_grad(delayed, ddp, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach()
    model = Wrapped(layer)
    model.head = torch.nn.Linear(4, 4)
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["weights.0", "weights.1"])
    wrapped = ddp(model, find_unused_parameters=True)
    queue = fusedmlp.WgradQueue() if delayed else None
    x, dy = layer.batch(1)
    wrapped(x, wgrad_queue=queue).backward(dy)
    if queue is not None:
        queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


@LAYERS
@pytest.mark.parametrize("case", ["main_grad", "auto", "delayed"])
def test_guard_9_a_tensor_hook_on_a_fused_weight_is_refused(case, kind, packed, make_layer):
    layer = make_layer(kind, packed)
    queue = fusedmlp.WgradQueue() if case == "delayed" else None
    if case in ("main_grad", "auto"):
        layer.attach()
    layer.params[-1].register_hook(lambda grad: grad * 2)
    with pytest.raises(RuntimeError, match="the parameter has a tensor hook"):
        layer.backward(accumulate_wgrad="auto" if case == "delayed" else case, wgrad_queue=queue)


@pytest.mark.parametrize("mode", ["off", "grad"])
def test_guard_9_a_tensor_hook_on_a_returned_gradient_works(mode, make_layer, assert_close):
    layer = make_layer()
    for param in layer.params:
        param.register_hook(lambda grad: grad * 2)
    layer.backward(accumulate_wgrad=mode)
    assert_close(layer.grads(), [2 * w for w in layer.wgrads()])


@pytest.mark.parametrize("attribute", [None, False])
def test_guard_9_other_hooks_fire_on_a_fused_weight(attribute, make_layer):
    layer, seen = make_layer(), []
    layer.attach(attribute)
    nodes = []  # kept alive: their hooks die with them
    for i, param in enumerate(layer.params):
        param.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(("post-accumulate", i, p.grad is None)))
        nodes.append(param.view_as(param).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, i=i, p=param: seen.append(("node", i, p.grad is None)))
    layer.backward()
    none = attribute is None
    assert sorted(seen) == [(name, i, none) for name in ("node", "post-accumulate") for i in (0, 1)]


@LAYERS
@pytest.mark.parametrize("case", ["main_grad", "grad", "off", "delayed", "delayed main_grad"])
def test_guard_12_detect_anomaly_stays_clean(case, kind, packed, make_layer, assert_close):
    """Overwritten NaN, NaN in padding, NaN in whatever is not initialised: none of it may reach autograd."""
    layer = make_layer(kind, packed, bias=True)
    if "main_grad" in case:
        layer.attach(False)
        for param in layer.params:
            param.main_grad.fill_(float("nan"))
            param.overwrite_main_grad = True
    queue = fusedmlp.WgradQueue() if "delayed" in case else None
    x, dy = layer.batch(1)
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled", UserWarning)
        detect = torch.autograd.detect_anomaly(check_nan=True)
    with detect:
        mode = "auto" if queue is not None else case
        layer(x, accumulate_wgrad=mode, wgrad_queue=queue).backward(dy)
    if queue is not None:
        queue.run()
    landed = layer.main_grads() if "main_grad" in case else layer.grads()
    assert_close(landed, layer.wgrads()[: len(layer.params)])
    assert x.grad.isfinite().all()


def test_guard_12_detect_anomaly_names_the_layer_of_a_nan(make_layer):
    layer = make_layer("linear")
    x, dy = layer.batch(1)
    dy[0, 0] = float("nan")
    y = layer(x)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        detect = torch.autograd.detect_anomaly()
    message = r"GroupedLinearBackward.* returned nan values"
    with detect, pytest.warns(UserWarning, match="No forward pass"), pytest.raises(RuntimeError, match=message):
        y.backward(dy)


class Probe(torch.autograd.Function):
    """y = 2x; asks the engine, in backward, about the node of its input."""

    answers: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (node, _), *_ = ctx.next_functions
        try:
            answer = torch._C._will_engine_execute_node(node)
        except RuntimeError as error:
            answer = str(error)
        Probe.answers.append((type(node), answer, torch._C._current_graph_task_id()))
        return 2 * dy


def test_private_functions_of_torch_behave_as_the_guards_need(ddp):
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Probe.answers.clear()
    assert torch._C._current_graph_task_id() == -1
    Probe.apply(leaf).sum().backward()
    (Probe.apply(leaf) + other).sum().backward(inputs=[leaf])
    both = Probe.apply(leaf) + other
    torch.autograd.grad(both.sum(), [leaf])
    y = leaf * 3  # a node that will run, and is no leaf
    Probe.apply(y).sum().backward()
    types, answers, tasks = zip(*Probe.answers, strict=True)
    assert types[:3] == (torch._C._functions.AccumulateGrad,) * 3
    assert types[3] is not torch._C._functions.AccumulateGrad
    assert answers[:2] == (True, True)
    assert "called with a leaf" in answers[2] or "autograd.grad" in answers[2]
    assert answers[3] is True
    assert len(set(tasks)) == len(tasks)
    assert min(tasks) >= 0

    seen = []
    hooked = Probe.apply(leaf)
    total = (hooked + other).sum()
    hooked.register_hook(lambda _: seen.append(torch._C._will_engine_execute_node(leaf_node)))
    leaf_node = hooked.grad_fn.next_functions[0][0]
    assert leaf_node.variable is leaf
    Probe.answers.clear()
    total.backward(inputs=[hooked, other])
    assert seen == [False]

    assert not torch._C._are_functorch_transforms_active()
    torch.func.vmap(lambda t: seen.append(torch._C._are_functorch_transforms_active()) or t)(leaf.detach())
    assert seen[-1] is True

    class Inside(torch.nn.Linear):
        def forward(self, x):
            seen.append(DistributedDataParallel._get_active_ddp_module())
            return super().forward(x)

    assert DistributedDataParallel._get_active_ddp_module() is None
    model = ddp(Inside(2, 2))
    model(leaf)
    assert seen[-1] is model
    assert {id(p) for p in model._module_parameters} == {id(p) for p in model.parameters()}

    tensor = torch.zeros(3)
    pointer = tensor.untyped_storage()._cdata
    alone = torch._C._storage_Use_Count(pointer)
    view = tensor[1:]
    assert torch._C._storage_Use_Count(pointer) == alone + 1
    del view
    assert torch._C._storage_Use_Count(pointer) == alone
