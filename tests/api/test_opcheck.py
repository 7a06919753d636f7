"""Operators by themselves, as `torch.library` checks them and as `torch.export` runs them; their derivatives."""

from functools import partial

import pytest
import torch
from support import mlp_arguments
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.kernels.operands.quantized import is_quantized
from fusedmlp.recipe import BLOCKS

pytestmark = pytest.mark.sparse

OPS = torch.ops.fusedmlp
IMPLS = ["torch", "triton"]
KINDS = pytest.mark.parametrize("kind", ["linear", "mlp", "tokens"])
COUNTS, T, K, H, F = (3, 0, 2), 3, 2, 4, 5
R = sum(COUNTS) + 1  # one row of padding


def tensors(seed, *shapes, grad):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_(grad) for shape in shapes]


def of_linear(impl, grad):
    x, w, b = tensors(0, (R, H), (3, F, H), (3, F), grad=grad)
    offsets = OPS.expert_offsets(torch.tensor(COUNTS), R, impl)
    yield OPS.grouped_gemm.default, (x, [w], [b], offsets, "", False, impl)
    yield (
        OPS.grouped_gemm.default,
        (x, [each.detach().requires_grad_(grad) for each in w], [], offsets, "", False, impl),
    )
    yield OPS.grouped_gemm.default, (x, [w], None, offsets, "", False, impl)
    dw, db = torch.empty(3, F, H), torch.empty(3, F)
    (dy,) = tensors(1, (R, F), grad=grad)
    yield OPS.grouped_wgrad_.default, ([dw], [db], [dy], [x], [offsets], [], [], False, "", impl)
    yield OPS.expert_offsets.default, (torch.tensor(COUNTS), R, impl)


def of_mlp(impl, grad):
    x, fc1, fc2, b1, b2, dy = tensors(2, (R, H), (3, 2 * F, H), (3, H, F), (3, 2 * F), (3, H), (R, H), grad=grad)
    probs = torch.rand(R).requires_grad_(grad)
    offsets = OPS.expert_offsets(torch.tensor(COUNTS), R, impl)
    given = mlp_arguments.forward(x=x, fc1=[fc1], fc2=[fc2], offsets=offsets, impl=impl, probs=probs)
    yield OPS.grouped_mlp.default, given._replace(bias1=[b1], bias2=[b2])
    yield OPS.grouped_mlp.default, given._replace(bias1=[b1], bias2=None)
    yield OPS.grouped_mlp.default, given._replace(bias1=None, bias2=[b2])
    yield OPS.grouped_mlp.default, given._replace(probs=None)
    dw1, dw2 = [torch.empty_like(fc1)], [torch.empty_like(fc2)]
    backward = {"dw1": dw1, "dw2": dw2, "dy": dy, "h": OPS.grouped_mlp(*given)[1]}
    yield OPS.grouped_mlp_backward_.default, mlp_arguments.backward(given, **backward)
    if impl == "torch":
        A, B = tensors(8, (3, 2, H), (3, 2 * F, 2), grad=grad)
        given = given._replace(lora1=[A, B])
        yield OPS.grouped_mlp.default, given
        of_adapter = {"t1": OPS.grouped_mlp(*given)[2].detach(), "dlora1": [torch.empty_like(A), torch.empty_like(B)]}
        yield OPS.grouped_mlp_backward_.default, mlp_arguments.backward(given, **backward, **of_adapter)


def of_tokens(impl, grad):
    x, fc1, fc2 = tensors(3, (T, H), (3, 2 * F, H), (3, H, F), grad=grad)
    index, probs = torch.tensor([[0, 2], [2, 3], [0, 1]]), torch.rand(T, K).requires_grad_(grad)  # 3: no expert
    yield OPS.order_rows.default, (index, probs, 3, impl)
    plan, row_ids, places, row_probs = OPS.order_rows(index, probs, 3, impl)
    row_probs = row_probs.detach().requires_grad_(grad)
    given = mlp_arguments.forward(x=x, fc1=[fc1], fc2=[fc2], offsets=plan, impl=impl, probs=row_probs)
    yield OPS.grouped_mlp.default, given._replace(row_ids=row_ids)
    yield OPS.grouped_mlp.default, given._replace(row_ids=row_ids, places=places)
    yield OPS.grouped_mlp.default, given._replace(row_ids=row_ids, places=places, probs=None)


def of_copies(impl, grad):
    w, x = torch.randn(2, 64, 32), torch.randn(140, 32).bfloat16().requires_grad_(grad)
    yield OPS.quantize_weights.default, ([w], "mxfp8", impl)
    yield OPS.quantize_weights.default, ([*w], "fp8_block", impl)
    offsets = OPS.expert_offsets(torch.tensor([70, 69]), 140, impl)
    for recipe in BLOCKS:
        yield OPS.quantize_rows.default, (x.detach(), offsets, 2, recipe, impl)
    if impl == "torch" and not grad:  # their outputs are differentiated by layers alone
        by_in, by_out = (copies := OPS.quantize_weights([w], "mxfp8", impl))[:2], copies[2:]
        yield OPS.grouped_gemm.default, (x, [*by_in], [], offsets, "mxfp8/mxfp8", False, impl)
        fc2 = OPS.quantize_weights([torch.randn(2, 32, 64)], "mxfp8", impl)
        given = mlp_arguments.forward(x=x, fc1=[*by_in], fc2=[*fc2[:2]], offsets=offsets, impl=impl)
        given = given._replace(activation=fusedmlp.Activation("relu").encoded, recipe="mxfp8/mxfp8")
        yield OPS.grouped_mlp.default, given
        backward = mlp_arguments.backward(
            given,
            dw1=[torch.empty(2, 64, 32)],
            dw2=[],
            dy=torch.randn_like(x),
            h=OPS.grouped_mlp(*given)[1],
            fc1=[*by_out],
            fc2=[*fc2[2:]],
            keep=True,
        )
        yield OPS.grouped_mlp_backward_.default, backward
        rows, rows_scales, tokens, tokens_scales = OPS.quantize_rows(x, offsets, 2, "mxfp8", impl)
        yield OPS.grouped_mlp.default, given._replace(x=rows, x_scales=rows_scales)
        yield OPS.grouped_mlp_backward_.default, backward._replace(x=tokens, x_scales=tokens_scales, keep=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of gathered rows, by opcheck
@pytest.mark.usefixtures("poison")  # opcheck also compares what a plan leaves unwritten
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("calls", [of_linear, of_mlp, of_tokens, of_copies], ids=lambda calls: calls.__name__)
def test_every_operator_as_torch_library_sees_it(calls, grad, impl, monkeypatch):
    monkeypatch.setattr(torch.testing, "assert_close", partial(torch.testing.assert_close, equal_nan=True))
    for operator, given in calls(impl, grad):
        checks = ["test_autograd_registration", "test_faketensor"]
        if not any(is_quantized(arg) for arg in given):  # PyTorch's check multiplies them
            checks += ["test_schema"]
        if operator is not OPS.order_rows.default or not grad:  # opcheck sums outputs in the dtype of the first, int32
            checks += ["test_aot_dispatch_static", "test_aot_dispatch_dynamic"]
        found = opcheck(operator, tuple(given), test_utils=checks, raise_exception=False)
        assert set(found.values()) == {"SUCCESS"}, (operator, found)


class Layer(torch.nn.Module):
    def __init__(self, kind, impl):
        super().__init__()
        self.kind, self.impl = kind, impl
        sizes = {"fc1": (3, 2 * F, H), "fc2": (3, H, F), "b1": (3, 2 * F), "b2": (3, H)}
        sizes = {"fc1": (3, F, H), "b1": (3, F)} if kind == "linear" else sizes
        for name, weight in zip(sizes, tensors(5, *sizes.values(), grad=True), strict=True):
            self.register_parameter(name, torch.nn.Parameter(weight.detach()))

    def forward(self, x, probs, index):
        if self.kind == "linear":
            return fusedmlp.grouped_linear(x, self.fc1, index, bias=self.b1, impl=self.impl)
        options = {"fc1_bias": self.b1, "fc2_bias": self.b2, "impl": self.impl}
        if self.kind == "mlp":
            return fusedmlp.grouped_mlp(x, self.fc1, self.fc2, index, probs=probs, **options)
        return fusedmlp.moe_experts(x, index, probs, self.fc1, self.fc2, **options)


def batch(kind):
    if kind == "tokens":
        return *tensors(6, (T, H), (T, K), grad=True), torch.tensor([[0, 2], [2, 3], [0, 1]])
    return *tensors(7, (R, H), (R,), grad=True), torch.tensor(COUNTS)


def results(run, layer, kind):
    """The output and every gradient."""
    x, probs, index = batch(kind)
    wanted = [x, *[probs] * (kind != "linear"), *(p for _, p in sorted(layer.named_parameters()))]
    y = run(x, probs, index)
    (dy,) = tensors(8, y.shape, grad=False)
    return [y, *torch.autograd.grad(y, wanted, dy)]


RUNS = {
    "strict": lambda program: program,
    "not strict": lambda program: program,
    "in a checkpoint": lambda program: partial(checkpoint, program, use_reentrant=False),
    "compiled": lambda program: torch.compile(program, backend="aot_eager"),
}


@KINDS
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("how", [*list(RUNS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_an_exported_program_has_the_gradients_of_the_layer(how, impl, kind):
    layer = Layer(kind, impl)
    program = torch.export.export(layer, batch(kind), strict=how == "strict").module()
    names = {str(node.target) for node in program.graph.nodes}
    assert any("fusedmlp" in name for name in names)
    torch._dynamo.reset()
    assert_close(results(RUNS[how](program), program, kind), results(layer, layer, kind))


@KINDS
def test_a_second_derivative_of_an_operator_is_an_error(kind):
    program = torch.export.export(Layer(kind, "torch"), batch(kind), strict=False).module()
    x, probs, index = batch(kind)
    (dx,) = torch.autograd.grad(program(x, probs, index).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward .* is not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_of_a_program_are_plain_whatever_parameters_have(strict):
    layer = Layer("mlp", "torch")
    expected = results(layer, layer, "mlp")
    for param in layer.parameters():
        param.main_grad = torch.full_like(param, 7.0)
    program = torch.export.export(layer, batch("mlp"), strict=strict).module()
    assert_close(results(program, program, "mlp"), expected)
    assert all((param.main_grad == 7).all() for param in layer.parameters())


class Inference(torch.nn.Module):
    """Layers with and without biases; the graph counts the rows of the second and third."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = map(torch.nn.Parameter, tensors(9, (3, 2 * F, H), (3, H, F), grad=False))
        self.mlp = fusedmlp.GroupedMLP(3, H, F)
        self.linear = fusedmlp.GroupedLinear(3, H, H, bias=True)

    def forward(self, x, ids, probs):
        h = fusedmlp.moe_experts(x, ids, probs, self.fc1, self.fc2)
        counts = torch.bincount(ids[:, 0], minlength=3)
        return self.linear(self.mlp(h, counts, probs[:, 0]), counts)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_counts_by_bincount(strict):
    layer = Inference()
    x, probs = tensors(10, (5, H), (5, 2), grad=True)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 2], [0, 0]])
    program = torch.export.export(layer, (x, ids, probs), strict=strict).module()
    found = []
    for model in (program, layer):
        y = model(x, ids, probs)
        wanted = [x, probs, *(p for _, p in sorted(model.named_parameters()))]
        found.append([y, *torch.autograd.grad(y, wanted, x.detach().cos())])
    assert_close(*found)
    ids[1, 0] = 3
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(x, ids, probs)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning", "ignore:.*torch.jit.script_method.*")
def test_a_package_of_aotinductor(tmp_path):
    layer, rows = Inference(), torch.export.Dim.DYNAMIC
    x, ids, probs = torch.randn(5, H), torch.tensor([[0, 2], [2, 1], [0, 1], [2, 2], [0, 0]]), torch.rand(5, 2)
    program = torch.export.export(layer, (x, ids, probs), dynamic_shapes=({0: rows},) * 3)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    run = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for size in (5, 3):
            given = x[:size], ids[:size], probs[:size]
            assert_close(run(*given), layer(*given))
    ids[1, 0] = 3  # then there are more counts than experts
    with pytest.raises(RuntimeError, match=r"Expected u\d+ <= 3 but received 4"):
        run(x, ids, probs)


def test_a_queue_is_refused_in_a_program():
    layer = fusedmlp.GroupedMLP(3, H, F, delay_wgrad=True)
    with pytest.raises(RuntimeError, match=r"wgrad_queue \(delay_wgrad=True\) inside"):
        torch.export.export(layer, (torch.randn(R, H), torch.tensor(COUNTS)), strict=False)
