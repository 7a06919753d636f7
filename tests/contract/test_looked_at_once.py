"""A parameter is checked in its first forward; what changes afterwards is noticed by a later forward or in backward.

What `main_grad` may become meanwhile is in test_guards.py, and what the weight may become in test_edges.py.
"""

import pytest
import torch

import fusedmlp


@pytest.mark.parametrize("expert", [0, 1])
def test_a_weight_that_is_no_leaf_any_more_is_refused(expert, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach()
    layer.backward(1, accumulate_wgrad="main_grad")
    layer.params[expert].requires_grad_(False).mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match=rf"weight\[{expert}\]: .* needs a leaf parameter"):
        layer(layer.batch(2)[0], accumulate_wgrad="main_grad")


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
