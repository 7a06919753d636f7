"""No optimizer steps past a gradient that is in `main_grad`, in a queue, or still to come."""

import pytest
import torch
from support.loops import Model, backward, batch


@pytest.mark.parametrize("attached", [True, False], ids=["main_grad", ".grad"])
@pytest.mark.parametrize("closure", [False, True])
def test_a_step_before_a_queue_has_run_raises(closure, attached):
    model = Model(delay_wgrad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in (model.experts.fc1.weight, model.experts.fc2.weight) if attached else ():
        param.main_grad = torch.zeros_like(param)
    if not closure:
        backward(model, 1)
    with pytest.raises(RuntimeError, match=r"got one that is still in a WgradQueue: call backward_dw\(\)"):
        optimizer.step((lambda: backward(model, 2)) if closure else None)
    model.experts.backward_dw()
    optimizer.step()


def test_an_optimizer_that_steps_from_the_dummy_of_another_owner_raises(make_layer):
    layer = make_layer()
    layer.attach(False)
    layer.backward(1)
    with pytest.raises(RuntimeError, match=r"expected its gradient in \.grad; got a zero dummy"):
        torch.optim.SGD(layer.params, lr=0.1).step()
    for param in layer.params:
        param.grad = param.main_grad
    torch.optim.SGD(layer.params, lr=0.1).step()


@pytest.mark.parametrize("attached", [True, False], ids=["main_grad", ".grad"])
def test_a_delayed_gradient_is_refused_where_a_hook_would_step_before_it_is_there(attached):
    model = Model(delay_wgrad=True)
    weight = model.experts.fc1.weight
    if attached:
        weight.main_grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    handle = weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match="fc1_weight: the parameter has a post-accumulate-grad hook, which backward"):
        backward(model, 1)
    with torch.no_grad():
        model(next(batch(1)))
    weight.skip_backward_post_hook = True  # as an owner does if its hook waits for backward_dw()
    model(next(batch(1)))
    del weight.skip_backward_post_hook
    handle.remove()
    backward(model, 1)
    model.experts.backward_dw()
