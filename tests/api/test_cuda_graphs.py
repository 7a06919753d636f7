"""CUDA graphs, as far as a CPU can show: a step reads no values of tensors on the host, so that it can be captured.

`python -m gpu.checks graph` captures and replays on a GPU.
"""

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

import fusedmlp
from fusedmlp import calls
from fusedmlp.contract import queue as wgrad_queue
from fusedmlp.operators import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("mlp", "linear", "moe")
WAYS = {  # the mode; whether a queue fuses micro-batches (None: no queue); whether weights are packed
    "main_grad": ("main_grad", None, True),
    "main_grad, fused queue": ("main_grad", True, False),
    "overwritten, queue": ("overwrite", False, True),
    "grad, fused queue": ("grad", True, True),
    "off": ("off", None, False),
    "off, queue": ("off", False, False),
}
# Methods of tensors, and operators, that read values on the host.
METHODS = (
    *("item", "tolist", "numpy", "cpu", "to"),
    *("__bool__", "__int__", "__index__", "__float__", "__array__", "__contains__"),
)
OPERATORS = {
    "_local_scalar_dense",  # item(), bool(), float()
    "nonzero",
    "masked_select",
    "bincount",
    "repeat_interleave",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


class Layer:
    """A layer on static buffers: biases; 3 experts, one without rows; 2 padding rows, or ids of experts elsewhere."""

    def __init__(self, kind, packed, mode):
        torch.manual_seed(0)
        self.kind, self.mode = kind, mode
        shapes = {"fc1": (10, 4), "fc2": (4, 5)} if kind != "linear" else {"fc1": (4, 4)}
        shapes |= {f"bias{name[2:]}": shape[:1] for name, shape in shapes.items()}
        self.groups = {name: self._group(shape, packed) for name, shape in shapes.items()}
        self.params = [p for name, group in self.groups.items() for p in group if name.startswith("fc")]
        self.arguments = {name: group[0] if packed else group for name, group in self.groups.items()}
        for param in self.params:
            if mode == "grad":
                param.grad = torch.ones_like(param)
            if mode == "overwrite":
                param.main_grad = torch.ones_like(param)
        if mode == "main_grad":
            fusedmlp.MainGradBuffer(self.params).flat.fill_(1)
        self.x, self.dy = torch.randn(2, 7, 4, device=DEVICE)
        self.x.requires_grad_()
        self.probs = torch.rand((7, 2) if kind == "moe" else 7, device=DEVICE).requires_grad_()
        self.counts = torch.tensor([2, 0, 3], device=DEVICE)
        self.ids = torch.tensor([[0, 2], [2, 2], [-1, 3], [5, 0], [2, 0], [0, 2], [3, 3]], device=DEVICE)

    @staticmethod
    def _group(shape, packed):
        shapes = [(3, *shape)] if packed else [shape] * 3
        return [Parameter(torch.randn(s, device=DEVICE)) for s in shapes]

    def step(self, impl, fuse=None):
        """Run two micro-batches, with a queue unless `fuse` is None; return the last output and all gradients."""
        queue = None if fuse is None else fusedmlp.WgradQueue(fuse_microbatches=fuse)
        for first in (True, False):
            for param in self.params:
                param.overwrite_main_grad = self.mode == "overwrite" and first
            options = {
                "accumulate_wgrad": "main_grad" if self.mode == "overwrite" else self.mode,
                "wgrad_queue": queue,
                "impl": impl,
            }
            weights = (self.arguments["fc1"], self.arguments.get("fc2"))
            if self.kind == "linear":
                y = fusedmlp.grouped_linear(self.x, weights[0], self.counts, bias=self.arguments["bias1"], **options)
            else:
                options |= {"fc1_bias": self.arguments["bias1"], "fc2_bias": self.arguments["bias2"]}
                if self.kind == "mlp":
                    y = fusedmlp.grouped_mlp(self.x, *weights, self.counts, probs=self.probs, **options)
                else:
                    y = fusedmlp.moe_experts(self.x, self.ids, self.probs, *weights, **options)
            y.backward(self.dy)
        if queue is not None:
            queue.run()
        inputs = [self.x] if self.kind == "linear" else [self.x, self.probs]
        main = "main_grad" if self.mode in ("main_grad", "overwrite") else "grad"
        biases = [p for name, group in self.groups.items() for p in group if name.startswith("bias")]
        return [y.detach(), *(t.grad for t in inputs + biases), *(getattr(p, main) for p in self.params)]


@pytest.fixture
def device_counts(monkeypatch):
    """Treat row counts on the CPU as a GPU's, which the host does not read."""
    monkeypatch.setattr(calls, "offsets", lambda counts, x, impl: ops.expert_offsets(counts, x.shape[0], impl))


class _NoReads(TorchDispatchMode):
    """Refuse operators that wait for a GPU, also inside our own, which `torch.library` otherwise hides from a mode."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if function.namespace == "fusedmlp":
            *arguments, impl = args
            with self:
                return getattr(ops._implementation(impl), name)(*arguments)
        indices = [t for argument in args if isinstance(argument, list | tuple) for t in argument]
        by_mask = name.startswith("index") and any(getattr(t, "dtype", None) == torch.bool for t in indices)
        if name in OPERATORS or by_mask:
            raise AssertionError(f"{name} reads a tensor on the host")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_reads():
    """Raise where Python inside would wait for a GPU: only kernels may read values of tensors."""
    launching = False

    def refused(name, method):
        def run(tensor, *args, **kwargs):
            if not launching and (name != "to" or "cpu" in [a for a in args if isinstance(a, str)]):
                raise AssertionError(f"{name} reads a tensor on the host")
            return method(tensor, *args, **kwargs)

        return run

    def launch(*args, **kwargs):
        nonlocal launching
        launching = True
        try:
            with _disable_current_modes():
                return run_kernel(*args, **kwargs)
        finally:
            launching = False

    run_kernel = InterpretedFunction.run
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(InterpretedFunction, "run", launch)
        for name in METHODS:  # on a CPU some call no operator
            patch.setattr(torch.Tensor, name, refused(name, getattr(torch.Tensor, name)))
        stack.enter_context(_NoReads())
        yield


@pytest.mark.usefixtures("device_counts")
@pytest.mark.sparse
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_on_the_host(kind, way):
    mode, fuse, packed = WAYS[way]
    layer = Layer(kind, packed, mode)
    with no_reads():
        results = layer.step("triton", fuse)
    expected = Layer(kind, packed, mode).step("torch", fuse)
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)


READS = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "bool": lambda t: bool(t[0]),
    "int": lambda t: int(t[0]),
    "index": lambda t: range(10)[t[0]],
    "float": lambda t: float(t[0]),
    "if": lambda t: 1 if (t == 0).all() else 2,
    "in": lambda t: 3 in t,
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: torch.equal(t, t),
    "bincount": lambda t: t.bincount(),
    "unique": lambda t: t.unique(),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
}


@pytest.mark.parametrize("read", READS)
def test_what_would_wait_for_a_gpu_is_found(read):
    counts = torch.tensor([2, 0, 3])
    READS[read](counts)
    with no_reads(), pytest.raises(AssertionError, match="reads a tensor on the host"):
        READS[read](counts)


def test_the_torch_implementation_is_found_to_read_offsets():
    with no_reads(), pytest.raises(AssertionError, match="tolist reads a tensor on the host"):
        Layer("linear", True, "off").step("torch")


@pytest.mark.usefixtures("device_counts")
def test_a_read_in_backward_or_in_the_queue_is_found(monkeypatch):
    original = ops.grouped_wgrad_
    monkeypatch.setattr(ops, "grouped_wgrad_", lambda *a: (bool(a[4][0][0]), original(*a))[1])
    for fuse in (None, False):
        with no_reads(), pytest.raises(AssertionError, match="__bool__ reads a tensor on the host"):
            Layer("linear", True, "off").step("triton", fuse)


@pytest.mark.parametrize("as_list", [True, False])
def test_counts_on_the_host_are_refused_while_a_graph_is_captured(as_list, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():  # stands for a GPU
        x, weight = torch.empty(6, 4, device="cuda"), torch.empty(2, 5, 4, device="cuda")
        fusedmlp.grouped_linear(x, weight, torch.tensor([2, 4], device="cuda"))
        counts = [2, 4] if as_list else torch.tensor([2, 4])
        with pytest.raises(RuntimeError, match=r"tokens_per_expert: expected a tensor on cuda:0 while .* is captured"):
            fusedmlp.grouped_linear(x, weight, counts)


@pytest.mark.parametrize("captured", ["backward", "the run"])
def test_a_queue_is_captured_with_its_backward_or_not_at_all(captured, monkeypatch):
    weight, queue = torch.randn(2, 5, 4, requires_grad=True), fusedmlp.WgradQueue()
    monkeypatch.setattr(wgrad_queue, "_capturing", lambda _: captured == "backward")
    fusedmlp.grouped_linear(torch.randn(6, 4), weight, [2, 4], wgrad_queue=queue).sum().backward()
    monkeypatch.setattr(wgrad_queue, "_capturing", lambda _: captured == "the run")
    with pytest.raises(RuntimeError, match=f"weight: expected backward and .* got {captured} captured alone"):
        queue.run()
    assert weight.grad is None
    assert len(queue) == 1
    queue.clear()


def test_the_documented_step_runs():
    text = (Path(__file__).parents[2] / "docs" / "cuda_graphs.md").read_text()
    example, capture = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(capture, "cuda_graphs.md", "exec")
    torch.manual_seed(0)
    names = {}
    exec(example.replace('device = "cuda"', f'device = "{DEVICE}"'), names)
    weights = list(names["experts"].parameters())
    before = [w.detach().clone() for w in weights]
    names["step"]()
    grads = []
    for routed in zip(names["hidden_states"], names["top_k_index"], names["top_k_weights"], strict=True):
        leaves = [w.clone().requires_grad_() for w in before]
        y = fusedmlp.moe_experts(*routed, *leaves, accumulate_wgrad="off")
        grads.append(torch.autograd.grad(y.square().mean(), leaves))
    total = [sum(pair) for pair in zip(*grads, strict=True)]
    norm = torch.stack([g.norm() for g in total]).norm()
    for weight, start, grad in zip(weights, before, total, strict=True):
        step = 1e-2 * grad * (1 / norm).clamp(max=1)
        rounding = torch.finfo(torch.float32).eps * start.abs().max()
        assert step.abs().max() > 100 * rounding
        torch.testing.assert_close(start - weight.detach(), step, rtol=1e-3, atol=rounding.item())
