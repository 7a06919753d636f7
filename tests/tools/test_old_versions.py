"""Versions of PyTorch before the one in whose graphs layers are right: the contract holds without graphs."""

import re

import pytest
import torch
from support import forked

from fusedmlp import versions
from fusedmlp.doctor import facts

# Simulated on the torch that is installed, unless that is one of these.
OLD = ["2.11.0+cu130", "2.12.1"]
HERE = [torch.__version__] if versions.compiler_problem() else OLD

_LAYERS = """
import copy, sys
from unittest import mock
import torch
from torch.utils.checkpoint import checkpoint
torch.__version__ = sys.argv[1]
import fusedmlp
from fusedmlp.operators import ops
from torch._dynamo.utils import counters
counts, ids = torch.tensor([3, 0, 4]), torch.tensor([[0, 2], [2, 1], [0, 0]])


class Model(torch.nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.mlp, self.linear = fusedmlp.GroupedMLP(3, 8, 6), fusedmlp.GroupedLinear(3, 8, 8, packed=False)
        self.use_reentrant = use_reentrant

    def layers(self, x):
        y = self.linear(self.mlp(x, counts), counts)
        return y + self.mlp.forward_tokens(x[:3], ids, x[:3, :2].sigmoid()).sum()

    def forward(self, x):
        x = torch.nn.functional.gelu(self.first(x))
        if self.use_reentrant is None:
            y = self.layers(x)
        else:
            y = checkpoint(self.layers, x, use_reentrant=self.use_reentrant)
        return self.last(x + y).square().mean() + self.mlp.fc1.weight.square().sum()  # and by plain PyTorch


def gradients(model, call, whole_step):
    buffer = fusedmlp.MainGradBuffer([*model.mlp.parameters(), *model.linear.parameters()])
    found = []
    for step in range(2):
        buffer.zero_grad()
        for micro_batch in range(2):
            x = torch.randn(7, 8, generator=torch.Generator().manual_seed(10 * step + micro_batch))
            loss = call(x)
            if not whole_step:
                loss.backward()
        assert all(p.grad is p.main_grad for p in model.mlp.parameters())
        found += [buffer.flat.clone(), *(p.grad.clone() for p in model.first.parameters())]
    return found


def whole(model):
    def step(x):
        model(x).backward()

    return step


torch.manual_seed(0)
for use_reentrant, whole_step in [(None, True), (None, False), (False, True), (False, False), (True, True)]:
    model = Model(use_reentrant)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    counters.clear()
    call = whole(other) if whole_step else other
    found = gradients(other, torch.compile(call, backend="aot_eager"), whole_step)
    expected = gradients(model, whole(model) if whole_step else model, whole_step)
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert expected[0].norm() > 0

# A step with a queue, compiled whole: its GEMMs run outside of graphs, too.
graphs, wgrad = [], ops.grouped_wgrad_


def spied(*args):
    graphs.append(torch.compiler.is_compiling())
    return wgrad(*args)


def step(layer, buffer):
    buffer.zero_grad()
    layer(x, counts).square().mean().backward()
    layer.backward_dw()


layer, x = fusedmlp.GroupedMLP(3, 8, 6, delay_wgrad=True), torch.randn(7, 8)
found = []
with mock.patch.object(ops, "grouped_wgrad_", spied):
    for call in (step, torch.compile(step, backend="aot_eager")):
        each = copy.deepcopy(layer)
        buffer = fusedmlp.MainGradBuffer(each.parameters())
        for _ in range(2):
            call(each, buffer)
        found.append(buffer.flat.clone())
torch.testing.assert_close(*found)
assert found[0].any() and graphs == [False] * 8, graphs

model = Model()
calls = {
    "grouped_mlp": lambda x: model.mlp(x, counts),
    "grouped_linear": lambda x: model.linear(x, counts),
    "moe_experts": lambda x: model.mlp.forward_tokens(x[:3], ids, x[:3, :2]),
}
for name, call in calls.items():
    torch._dynamo.reset()
    try:
        torch.compile(call, fullgraph=True, backend="eager")(torch.randn(7, 8))
    except Exception as error:
        print(name, " ".join(str(error).split()))
try:
    torch.export.export(model.mlp, (torch.randn(7, 8), counts), strict=False)
except RuntimeError as error:
    print("export", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", HERE)
def test_layers_run_outside_of_graphs_whose_gradients_would_be_wrong(version):
    done = forked.run("-c", _LAYERS, version)
    assert done.returncode == 0, done.stderr
    sentence = (
        f"fusedmlp inside torch.compile: expected torch>=2.13 for layers inside of its graphs; got torch {version}"
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == {"grouped_mlp", "grouped_linear", "moe_experts", "export"}
    assert all(sentence in line for line in lines.values())


@pytest.mark.parametrize("version", OLD)
def test_the_doctor_says_what_a_version_can_do(version, monkeypatch):
    monkeypatch.setattr(versions, "found", {"torch": version, "triton": "3.7.1"}.get)
    machine = facts.machine()
    assert machine["problems"] == []
    assert machine["torch_compile"].startswith(
        f"expected torch>=2.13 for layers inside of its graphs; got torch {version}"
    )
    monkeypatch.setattr(versions, "found", {"torch": "2.13.0", "triton": "3.7.1"}.get)
    assert facts.machine()["torch_compile"] == "layers run inside of its graphs"


@pytest.mark.slow
def test_the_doctor_runs_with_an_old_version():
    code = "import runpy, torch; torch.__version__ = {!r}; runpy.run_module('fusedmlp', run_name='__main__')"
    done = forked.run("-c", code.format(HERE[0]), "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch_compile     expected torch>=2.13 for layers inside of its graphs; got torch {HERE[0]}" in done.stdout
    assert re.search(r"bfloat16  checkpointed +\w+: error \S+, allowed \S+  ok", done.stdout)
    assert re.search(r"bfloat16  compiled +\w+: error \S+, allowed \S+  ok", done.stdout)


_CHECKPOINTED = """
import ctypes, gc, sys
import torch
from torch.utils.checkpoint import checkpoint
import fusedmlp
from fusedmlp.contract import engine
stash = torch._C._stash_obj_in_tls


def borrows(key, value):
    before = sys.getrefcount(value)
    stash(key, value)
    if sys.getrefcount(value) > before:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


if sys.argv[1] == "borrows":
    torch._C._stash_obj_in_tls = borrows
layer, counts = fusedmlp.GroupedMLP(3, 8, 6), torch.tensor([3, 0, 4])
buffer = fusedmlp.MainGradBuffer(layer.parameters())


def nested(x, depth, use_reentrant):
    if depth == 0:
        return layer(x, counts)
    return checkpoint(nested, x, depth - 1, use_reentrant, use_reentrant=use_reentrant)


x = torch.randn(7, 8, requires_grad=True)
for depth, use_reentrant in [(0, False), (1, False), (1, True), (3, False), (3, True), (70, True)]:
    buffer.zero_grad()
    for _ in range(3):
        nested(x, depth, use_reentrant).square().sum().backward()
    if depth == 0:
        expected = buffer.flat.clone()
    torch.testing.assert_close(buffer.flat, expected)
    assert expected.any()
    torch.zeros(2, requires_grad=True).sum().backward()
    gc.collect()
    left = [each for each in gc.get_objects() if isinstance(each, engine.Backward)]
    assert not left and not engine._running, (depth, use_reentrant, left)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["as it is", "borrows"])
def test_what_checkpoints_leave_in_thread_local_state_lives_and_dies(stash):
    """torch 2.11 takes no reference to it, which "borrows" simulates elsewhere; a process that has used it crashes."""
    done = forked.run("-c", _CHECKPOINTED, stash)
    assert done.returncode == 0, (done.returncode, done.stderr)
