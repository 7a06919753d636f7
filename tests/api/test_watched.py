"""In eager mode operators are called as functions, but are dispatched where modes or subclasses watch."""

from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fusedmlp
from fusedmlp.operators import ops

OPS = torch.ops.fusedmlp
SWIGLU = fusedmlp.Activation("swiglu").encoded
NAMES = {"expert_offsets", "grouped_mlp", "grouped_mlp_backward_"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def step():
    torch.manual_seed(0)
    layer = fusedmlp.GroupedMLP(2, 4, 3, device=DEVICE)
    x = torch.randn(5, 4, device=DEVICE, requires_grad=True)

    def step():
        layer(x, torch.tensor([3, 2], device=DEVICE)).sum().backward()

    return step


@pytest.fixture
def gemm():
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, device=DEVICE), torch.randn(2, 3, 4, device=DEVICE)
    return x, w, torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE)


class Seen(TorchDispatchMode):
    """Records the operators of fusedmlp that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusedmlp":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_eager_does_not_dispatch(step, monkeypatch):
    through_the_dispatcher = set()
    call = torch._ops.OpOverload.__call__

    def spy(self, /, *args, **kwargs):
        through_the_dispatcher.add(self.name())
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", spy)
    step()
    assert not {name for name in through_the_dispatcher if name.startswith("fusedmlp")}
    with Seen():
        step()
    assert {f"fusedmlp::{name}" for name in NAMES} <= through_the_dispatcher


def test_dispatch_modes(step):
    with Seen() as seen:
        step()
    assert seen.names == NAMES


def test_flops_are_counted(step):
    formulas = {getattr(OPS, name): (lambda *_, **__: 5) for name in NAMES}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    assert counter.get_total_flops() == 5 * len(NAMES)


def test_fake_tensors_inside_of_their_mode_and_outside(gemm):
    with FakeTensorMode() as mode:
        x, w, offsets = map(mode.from_tensor, gemm)
        inside = ops.grouped_gemm(x, [w], [], offsets, "", False, "triton")
    with torch.no_grad():
        outside = ops.grouped_gemm(x, [w], [], offsets, "", False, "triton")
    assert type(inside) is type(outside) is type(x)
    assert inside.shape == outside.shape == (5, 3)


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_profilers_record_operators(step, profile):
    with profile() as recorded:
        step()
    seen = {event.key for event in recorded.key_averages()}
    assert {f"fusedmlp::{name}" for name in NAMES} <= seen


def test_compilers_see_operators(gemm):
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        run = torch.compile(
            lambda x, w, o: ops.grouped_gemm(x, [w], [], o, "", False, "torch"), backend=backend, fullgraph=True
        )
        run(*gemm)
        graph = make_fx(lambda x, w, o: ops.grouped_gemm(x, [w], [], o, "", False, "torch"))(*gemm)
        early = make_fx(lambda x, w, o: ops.grouped_gemm(x, [w], [], o, "", False, "torch"), pre_dispatch=True)(*gemm)
    for targets in (seen, *([node.target for node in g.graph.nodes] for g in (graph, early))):
        assert OPS.grouped_gemm.default in targets


class Logged(torch.Tensor):
    """A tensor subclass that handles operators itself."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return torch.zeros(5, 3)


@pytest.mark.parametrize("place", ["x", "w", "offsets"])
def test_subclasses_dispatch(gemm, place):
    named = dict(zip(("x", "w", "offsets"), gemm, strict=True))
    x, w, offsets = (named | {place: named[place].as_subclass(Logged)}).values()
    Logged.seen.clear()
    with torch.no_grad():
        ops.grouped_gemm(x, [w], [], offsets, "", False, "triton")
    assert Logged.seen == [OPS.grouped_gemm.default]


def test_function_modes(gemm):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, w, offsets = gemm
    with torch.no_grad(), Mode():
        ops.grouped_gemm(x, [w], [], offsets, "", False, "torch")
    assert OPS.grouped_gemm.default in seen


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_tensors_that_are_not_what_lies_at_their_address(gemm, impl):
    x, w, offsets = gemm
    with torch.no_grad():
        expected = ops.grouped_gemm(-x, [w], [], offsets, "", False, impl)
        torch.testing.assert_close(ops.grouped_gemm(torch._neg_view(x), [w], [], offsets, "", False, impl), expected)
        meta = ops.grouped_gemm(x.to("meta"), [w.to("meta")], [], offsets.to("meta"), "", False, impl)
    assert meta.device.type == "meta"


def test_transforms(gemm):
    x, w, offsets = gemm
    with torch.no_grad(), pytest.raises(RuntimeError, match="Batching rule not implemented for fusedmlp::grouped_gemm"):
        torch.func.vmap(lambda x: ops.grouped_gemm(x, [w], [], offsets, "", False, "torch"))(x.expand(2, 5, 4))


def test_autograd_makes_a_call_watched(gemm):
    x, w, offsets = gemm
    y = ops.grouped_gemm(x.requires_grad_(), [w], [], offsets, "", False, "triton")
    y.sum().backward()
    with torch.no_grad():
        expected = ops.grouped_gemm(torch.ones_like(y), [w.mT], [], offsets, "", False, "triton")
    torch.testing.assert_close(x.grad, expected)


def test_inference_and_autocast_make_no_call_watched(gemm, monkeypatch):
    x, w, offsets = gemm

    def fail(self, /, *args, **kwargs):
        raise AssertionError("dispatched")

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", fail)
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        ops.grouped_gemm(x.clone(), [w], [], offsets, "", False, "torch")
