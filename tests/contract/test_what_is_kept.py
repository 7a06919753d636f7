"""State that the contract keeps between backwards: it does not grow, and it keeps no parameter alive."""

import gc
import sys
import weakref
from functools import partial

import pytest
import torch
from support.compiler import DYNAMO_WARNS, in_graphs
from support.contract_helpers import plain
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import contract
from fusedmlp.contract import parameter_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    *DYNAMO_WARNS,
]


def delayed(layer):
    queue = fusedmlp.WgradQueue(fuse_microbatches=True)
    layer.backward(1, 2, wgrad_queue=queue, overwrites=True)
    queue.run()


def beside_plain(layer, run):
    """Run a layer, or a checkpoint of it, whose weights plain PyTorch uses, too: its gradient comes first."""
    x, dy = layer.batch(1)
    ((run(x.requires_grad_()) * dy).nansum() + plain(layer)).backward()


def checkpointed(layer, run=None):
    beside_plain(layer, partial(checkpoint, run or layer, use_reentrant=True))


def failing(layer):
    right = layer.params[0].main_grad

    def run(x):
        y = layer(x)
        layer.params[0].main_grad = torch.zeros(2)
        return y

    with pytest.raises(ValueError, match="expected main_grad of shape"):
        beside_plain(layer, run)
    layer.params[0].main_grad = right


def compiled(layer):
    x, dy = layer.batch(1)
    run = partial(torch.compile(type(layer).__call__, fullgraph=True, backend="aot_eager"), layer)
    run(x).backward(dy)
    checkpointed(layer, run)


EAGER = {
    "fused": lambda layer: layer.backward(1),
    "fused and plain": lambda layer: beside_plain(layer, layer),
    "plain alone": lambda layer: plain(layer).backward(),
    "delayed": delayed,
    "checkpointed": checkpointed,
    "overwriting": lambda layer: layer.backward(1, overwrites=True),
    "failing": failing,
    "asked for": lambda layer: torch.autograd.grad(layer(layer.batch(1)[0]), layer.params, layer.batch(1)[1]),
}


@pytest.mark.sparse
@pytest.mark.parametrize("train", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("packed", [True, False])
def test_hooks_do_not_pile_up(packed, train, make_layer):
    """The owner keeps AccumulateGrad nodes alive, with their hooks, as Megatron's DDP does."""
    layer, handles = make_layer(packed=packed), []
    layer.attach(False)
    nodes = [get_gradient_edge(param).node for param in layer.params]
    for node in nodes:  # the handle of a hook here leads to the hooks of others
        handles += [node.register_prehook(lambda _: None), node.register_hook(lambda *_: None)]
    for param in layer.params:
        handles.append(param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
        param.skip_backward_post_hook = True

    def count():
        return [len(handle.hooks_dict_ref()) for handle in handles], [len(p._backward_hooks) for p in layer.params]

    layer.backward(1)
    first = count()
    assert first == ([1] * len(handles), [1] * len(layer.params))
    for _ in range(100):
        train(layer)
    assert count() == first
    assert all(get_gradient_edge(p).node is node for p, node in zip(layer.params, nodes, strict=True))


@pytest.fixture
def only_new_garbage():
    """Exclude existing objects from collections: searching them takes a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.sparse
@pytest.mark.parametrize("train", [*EAGER.values(), pytest.param(compiled, marks=in_graphs)], ids=[*EAGER, "compiled"])
@pytest.mark.parametrize("owner", ["buffer", "attributes"])
def test_what_is_remembered_of_parameters_keeps_none_of_them(owner, train, make_layer, only_new_garbage):
    torch._dynamo.reset()
    others = set(parameter_state._states)
    layer = make_layer()
    if owner == "buffer":
        buffer = fusedmlp.MainGradBuffer(layer.params)
        buffer.zero_grad()
    else:
        layer.attach(False)
    for _ in range(2):
        layer.backward(1, overwrites=True)
        train(layer)
    if owner == "buffer":
        buffer.norm()
        del buffer
    ids = {id(param) for param in layer.params}
    assert ids <= set(parameter_state._states)
    gone = [weakref.ref(t) for param in layer.params for t in (param, param.main_grad)]
    del layer
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert not ids & set(parameter_state._states)
    assert set(parameter_state._states) == others


def test_a_queue_keeps_its_parameters_until_it_is_empty(make_layer):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    layer.attach(False)
    layer.backward(1, wgrad_queue=queue)
    refs, ids = [weakref.ref(p) for p in layer.params], {id(p) for p in layer.params}
    del layer
    gc.collect()
    assert all(ref() is not None for ref in refs)
    queue.run()
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert not ids & set(parameter_state._states)


def test_what_is_remembered_of_a_parameter_goes_with_it_and_runs_no_python_code():
    """An interrupt inside such code could leave the state to another parameter with the same id."""
    param = torch.nn.Parameter(torch.zeros(2, 3))
    key, lines = id(param), []
    parameter_state.state_of(param)

    def trace(frame, event, _):
        if frame.f_code.co_filename.startswith(contract.__path__[0]):
            lines.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        del param
    finally:
        sys.settrace(before)
    assert lines == []
    assert key not in parameter_state._states


@pytest.mark.parametrize("mode", ["off", "grad", "auto"])
def test_parameters_without_main_grad_can_be_swapped_after_a_step(mode):
    """`module.to` and `load_state_dict` may swap; PyTorch refuses parameters with weak references to them."""
    module, x = fusedmlp.GroupedMLP(3, 4, 5, accumulate_wgrad=mode), torch.randn(5, 4)
    for _ in range(2):  # "grad" adds to an existing one
        module(x, [3, 0, 2]).sum().backward()
    module.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert module(x.bfloat16(), [3, 0, 2]).dtype == torch.bfloat16
