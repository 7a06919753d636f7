"""Guards 7, 9 and 12: refusals that depend on what a layer is used with (list: test_guards.py).

Tensor hooks are refused in rows of support/systems.py and, beside the catch, in test_plain_and_fused.py.
"""

import warnings
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fusedmlp

MODULE = fusedmlp.GroupedLinear(3, 4, 5)
TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda t: layer(t).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x),
    "vmap": lambda layer, x: torch.func.vmap(layer)(torch.stack([x, x])),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "functional_call in grad": lambda layer, x: torch.func.grad(
        lambda params: torch.func.functional_call(MODULE, params, (x, [3, 0, 2])).sum()
    )(dict(MODULE.named_parameters())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_guard_7_torch_func_is_refused(transform, make_layer):
    layer = make_layer("linear")
    before = layer.attach(False)
    with pytest.raises(RuntimeError, match=r"torch\.func transform"):
        TRANSFORMS[transform](layer, layer.batch(1)[0].nan_to_num())
    assert torch.equal(layer.main_grads()[0], before[0])


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


@pytest.mark.parametrize("memory", ["main_grad", "grad", "buffer"])
@pytest.mark.parametrize("when", ["between forward and backward", "after a step"])
def test_guard_9_a_later_hook_on_a_delayed_weight_is_refused(when, memory, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    _kept = fusedmlp.MainGradBuffer(layer.params) if memory == "buffer" else layer.attach(False)
    (x, dy), mode = layer.batch(1), "auto" if memory == "buffer" else memory
    run = partial(layer, x, accumulate_wgrad=mode, wgrad_queue=queue)
    if when == "after a step":
        layer.backward(1, accumulate_wgrad=mode if memory == "buffer" else "main_grad", delayed=True)
    y = run() if when == "between forward and backward" else None
    layer.params[1].register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(
        RuntimeError, match=r"weight\[1\]: the parameter has a post-accumulate-grad hook, which backward"
    ):
        (run() if y is None else y).backward(dy)
    assert not queue


@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("moe", False)])
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


def test_private_functions_of_torch_behave_as_the_guards_need(ddp):
    leaf, other, answers = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []

    def asking(y):
        """Let the node of y, before it runs, ask the engine about the node after it."""
        node = y.grad_fn.next_functions[0][0]

        def ask(_):
            try:
                answer = torch._C._will_engine_execute_node(node)
            except RuntimeError as error:
                answer = str(error)
            answers.append((type(node), answer, torch._C._current_graph_task_id()))

        y.grad_fn.register_prehook(ask)
        return y

    assert torch._C._current_graph_task_id() == -1
    asking(2 * leaf).sum().backward()
    (asking(2 * leaf) + other).sum().backward(inputs=[leaf])
    torch.autograd.grad((asking(2 * leaf) + other).sum(), [leaf])
    asking(2 * (leaf * 3)).sum().backward()  # the node of leaf * 3 will run, and is no leaf
    types, answers, tasks = zip(*answers, strict=True)
    assert types[:3] == (torch._C._functions.AccumulateGrad,) * 3
    assert types[3] is not torch._C._functions.AccumulateGrad
    assert answers[:2] == (True, True)
    assert "called with a leaf" in answers[2] or "autograd.grad" in answers[2]
    assert answers[3] is True
    assert len(set(tasks)) == len(tasks)
    assert min(tasks) >= 0

    hooked, seen = 2 * leaf, []
    leaf_node = hooked.grad_fn.next_functions[0][0]
    assert leaf_node.variable is leaf
    hooked.register_hook(lambda _: seen.append(torch._C._will_engine_execute_node(leaf_node)))
    (hooked + other).sum().backward(inputs=[hooked, other])
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
