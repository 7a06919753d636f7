"""`fusedmlp.backward_dw(model)` and `fusedmlp.discard(model)`."""

import copy

import pytest
import torch

import fusedmlp

COUNTS = [3, 0, 2]


class Model(torch.nn.Module):
    """Two delayed layers with queues of their own, two with one queue, and one that does not delay."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(fusedmlp.GroupedMLP(3, 4, 5, delay_wgrad=True) for _ in range(2))
        self.last = fusedmlp.GroupedLinear(3, 4, 4)
        self.shared = torch.nn.ModuleList(fusedmlp.GroupedLinear(3, 4, 4) for _ in range(2))
        queue = fusedmlp.WgradQueue()
        for layer in self.shared:
            layer.wgrad_queue = queue

    def forward(self, x):
        for layer in (*self.layers, *self.shared, self.last):
            x = layer(x, COUNTS)
        return x


def test_every_queue_of_a_model_runs_and_is_emptied():
    model, x = Model(), torch.randn(5, 4)
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        layer.wgrad_queue = None
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert model.layers[0].fc1.weight.grad is None
    fusedmlp.backward_dw(model)
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, want.grad)
    model.zero_grad()
    model(x).sum().backward()
    fusedmlp.discard(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # no gradient waits
    assert model.layers[0].fc1.weight.grad is None
    fusedmlp.backward_dw(model)  # nothing to do


@pytest.mark.parametrize("call", [fusedmlp.backward_dw, fusedmlp.discard])
def test_what_is_no_module_is_refused(call):
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got list"):
        call([])
