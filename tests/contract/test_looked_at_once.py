"""A parameter is checked in its first forward; what changes afterwards is noticed by a later forward or in backward."""

import sys

import pytest
import torch
from support.contract_helpers import plus, run_without_memory

import fusedmlp
from fusedmlp import contract
from fusedmlp.contract import parameter_state


def fused(layer, seed, **options):
    """Run a forward in mode "main_grad"; return y and a gradient for it."""
    x, dy = layer.batch(seed)
    return layer(x, accumulate_wgrad="main_grad", **options), dy


@pytest.mark.parametrize("way", ["clear", "none"])
def test_a_plain_gradient_is_caught_after_somebody_removed_our_hook(way, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    before = layer.attach(False)
    layer.backward(1, accumulate_wgrad="main_grad")
    for param in layer.params:
        param.grad = None  # as an owner does that sees the flag
        if way == "clear":
            param._backward_hooks.clear()
        else:
            param._backward_hooks = None
    fused(layer, 2)
    sum((3 * param).sum() for param in layer.params).backward()
    plain = [torch.full_like(main, 3) for main in before]
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1), plain))


@pytest.mark.parametrize("expert", [0, 1])
def test_a_weight_that_is_no_leaf_any_more_is_refused(expert, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach()
    layer.backward(1, accumulate_wgrad="main_grad")
    weight, scale = layer.params[expert], torch.ones(1, requires_grad=True)
    weight.grad = None
    weight.requires_grad_(False).mul_(scale)
    with pytest.raises(RuntimeError, match=rf"weight\[{expert}\]: .* needs a leaf parameter"):
        fused(layer, 2)


@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("delayed", [False, True])
def test_an_expert_of_another_shape_since_forward_is_named(delayed, expert, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    layer.backward(1, accumulate_wgrad="main_grad")
    y, dy = fused(layer, 2, wgrad_queue=queue)
    layer.params[expert].data = torch.randn(3, 4)
    with pytest.raises(ValueError, match=rf"weight\[{expert}\]: expected main_grad of shape \(3, 4\); got \(5, 4\)"):
        y.backward(dy)


@pytest.mark.parametrize("mode", ["main_grad", "grad"])
def test_a_hook_between_a_delayed_forward_and_its_backward_is_refused(mode, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, accumulate_wgrad=mode, wgrad_queue=queue)
    layer.params[1].register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"weight\[1\]: the parameter has a post-accumulate-grad hook"):
        y.backward(dy)
    assert len(queue) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_main_grad_that_is_sparse_is_named(layout, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    layer.backward(1, accumulate_wgrad="main_grad")
    layer.params[1].main_grad = torch.zeros(5, 4).to_sparse(layout=layout)
    with pytest.raises(ValueError, match=r"weight\[1\]: expected main_grad to be dense; got one in torch.sparse"):
        layer.backward(2)


def test_experts_that_fit_their_main_grads_and_not_each_other_are_refused(make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    y, dy = fused(layer, 1)
    layer.params[1].data, layer.params[1].main_grad = torch.randn(3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"weight\[1\]: expected a gradient of the shape of expert 0's, \(5, 4\); got"):
        y.backward(dy)


# A queue that runs again after an error


def test_a_gradient_overwrites_when_its_queue_runs_again(monkeypatch, make_layer, assert_close):
    """The first run fails: it allocates an output beside main_grad for the frozen expert, and memory is short."""
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    optimizer = torch.optim.SGD(layer.params, lr=0.0)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1, accumulate_wgrad="main_grad")
    optimizer.step()
    optimizer.zero_grad()
    layer.params[1].requires_grad_(False)
    layer.backward(2, wgrad_queue=queue)

    run_without_memory(queue, monkeypatch)
    queue.run()
    wgrads = layer.wgrads(2)
    assert_close([layer.params[i].grad for i in (0, 2)], [wgrads[i] for i in (0, 2)])
    assert len(buffer.params) == len(layer.params)


def test_what_is_remembered_of_a_parameter_goes_with_it_and_runs_no_python_code():
    """An interrupt inside such code could leave the state to another parameter with the same id."""
    param = torch.nn.Parameter(torch.zeros(2, 3))
    key = id(param)
    parameter_state.state_of(param)
    folder, lines = contract.__path__[0], []

    def trace(frame, event, _):
        if frame.f_code.co_filename.startswith(folder):
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
