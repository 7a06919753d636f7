"""Both implementations against a float64 reference: every option, ragged, single-row, empty and padded loads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import factory
from cases.factory import Case, Inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import examples, seeds

import fusedmlp
from bench.oracle import reference
from bench.oracle.tolerance import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("torch", "triton")
pytestmark = pytest.mark.usefixtures("poison")


def check(case, impls=IMPLS):
    inputs = Inputs(case)
    magnitudes = {}
    expected = factory.reference(inputs, torch.float64, magnitudes)
    low_precision = factory.reference(inputs, case.dtype)
    dtypes = {case.dtype, case.main_grad_dtype}
    for impl in impls:
        widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        assert_close(factory.run(inputs, impl, DEVICE), expected, low_precision, widest, magnitudes)


@pytest.mark.parametrize("seed", seeds(200, some=50))
def test_random_case(seed):
    check(factory.random_case(seed))


@pytest.mark.sparse
@pytest.mark.parametrize("activation", factory.GATED + factory.UNGATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activation(activation, dtype):
    check(Case(counts=(4, 0, 9), activation=activation, dtype=dtype, bias=True))


def test_gpt_oss_activation():
    options = {"interleaved": True, "limit": 0.5, "alpha": 1.702, "linear_offset": 1.0}
    check(Case(counts=(19, 3), H=24, F=20, activation="swiglu", options=options, bias=True))


@pytest.mark.parametrize("options", [{}, {"alpha": 1.5, "linear_scale": 0.7, "interleaved": True}], ids=["K3", "own"])
def test_situ_glu_bounds_both_halves(options):
    h = torch.linspace(-60, 60, 24, dtype=torch.float64).view(2, 12)
    activation = fusedmlp.Activation("situ_glu", **options)
    assert fusedmlp.Activation.decode(activation.encoded) == activation
    gate, linear = activation.split(h)
    alpha, scale = options.get("alpha", 4.0), options.get("linear_scale", 25.0)
    expected = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * scale * torch.tanh(linear / scale)
    torch.testing.assert_close(reference.activate("situ_glu", h, **activation.options), expected)
    check(Case(counts=(19, 3), H=24, F=20, activation="situ_glu", options=options, bias=True))


def test_loads_as_many_as_if_they_were_even():
    check(Case(counts=(5, 3, 7, 5), bias=True))


loads = st.lists(st.integers(0, 40), min_size=1, max_size=7)
sizes = st.integers(1, 40)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(counts=loads, padding=st.integers(0, 20), H=sizes, F=sizes, packed=st.booleans())
def test_any_shape_and_load_torch(counts, padding, H, F, packed):
    check(Case(counts=tuple(counts), padding=padding, H=H, F=F, packed=packed, bias=True), ["torch"])


@pytest.mark.slow
@settings(max_examples=examples(10), deadline=None, derandomize=True)
@given(counts=loads, padding=st.integers(0, 20), H=sizes, F=sizes, packed=st.booleans())
def test_any_shape_and_load_triton(counts, padding, H, F, packed):
    check(Case(counts=tuple(counts), padding=padding, H=H, F=F, packed=packed, bias=True), ["triton"])


@pytest.mark.parametrize("impl", IMPLS)
def test_non_finite_values_of_one_expert_stay_there(impl):
    # 0 * Inf = NaN: a mask on one operand only would let a neighbour's row through.
    inputs = Inputs(Case(counts=(5, 3, 7), padding=0, bias=True))
    inputs.x[5:8], inputs.dy[5:8], inputs.probs[5:8] = float("inf"), float("nan"), float("inf")
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        got = factory.run(inputs, impl, DEVICE)
    for name, tensor in got.items():
        mine = tensor[[0, 2]] if name[:2] in ("df", "db") else torch.cat([tensor[:5], tensor[8:]])
        assert torch.isfinite(mine).all(), name


def strided(kind):
    """A gradient of y, `[8, 8]`, with strides that the backward of a later operator may give it."""
    return {
        "expanded": torch.tensor(0.7).expand(8, 8),
        "transposed": torch.randn(8, 8).t(),
        "sliced": torch.randn(8, 20)[:, 3:11],
    }[kind]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_incoming_gradient_of_any_strides(impl, kind):
    inputs = Inputs(Case(counts=(5, 3), padding=0, H=8))
    dy = strided(kind)
    inputs.dy = dy.contiguous()
    expected = factory.reference(inputs, torch.float64)
    low_precision = factory.reference(inputs, torch.float32)
    inputs.dy = dy
    assert_close(factory.run(inputs, impl, DEVICE), expected, low_precision, torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_incoming_gradient_and_input_of_any_strides_of_grouped_linear(impl, kind):
    dy, weight = strided(kind).to(DEVICE), torch.randn(2, 8, 4, device=DEVICE, requires_grad=True)
    x = torch.randn(4, 8, device=DEVICE).t().requires_grad_()
    fusedmlp.grouped_linear(x, weight, [5, 3], impl=impl).backward(dy)
    torch.testing.assert_close(weight.grad, torch.stack([dy[:5].T @ x[:5], dy[5:].T @ x[5:]]).detach())
    torch.testing.assert_close(x.grad, torch.cat([dy[:5] @ weight[0], dy[5:] @ weight[1]]).detach())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "counts_as", ["list", *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))]
)
def test_counts_of_any_kind(impl, counts_as):
    x, weight = torch.randn(9, 4, device=DEVICE), torch.randn(3, 5, 4, device=DEVICE)
    counts = [2, 0, 6] if counts_as == "list" else torch.tensor([2, 0, 6], dtype=counts_as)
    y = fusedmlp.grouped_linear(x, weight, counts, impl=impl)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:8] @ weight[2].T, torch.zeros(1, 5, device=DEVICE)])
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_layer_in_16_bits(impl):
    case = Case(bias=True, dtype=torch.bfloat16)
    plain = factory.run(Inputs(case), impl, DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        under = factory.run(Inputs(case), impl, DEVICE)
    for name, tensor in plain.items():
        assert torch.equal(under[name], tensor), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("probs_shape", [(9,), (9, 1)])
def test_probs_gradient_has_the_shape_and_dtype_of_probs(impl, probs_shape):
    x = torch.randn(9, 4, device=DEVICE)
    fc1, fc2 = torch.randn(2, 6, 4, device=DEVICE), torch.randn(2, 4, 3, device=DEVICE)
    probs = torch.rand(probs_shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = fusedmlp.grouped_mlp(x, fc1, fc2, [4, 5], probs=probs, impl=impl)
    dy = torch.randn_like(y)
    y.backward(dy)
    with torch.no_grad():
        unscaled = fusedmlp.grouped_mlp(x, fc1, fc2, [4, 5], impl=impl)
    expected = (dy * unscaled).sum(1).reshape(probs_shape)
    assert probs.grad.shape == probs_shape
    torch.testing.assert_close(probs.grad, expected.to(torch.bfloat16), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("delayed", [True, False])
def test_grouped_linear(impl, packed, layout, delayed):
    torch.manual_seed(0)
    counts, N, K = (5, 0, 17, 1), 20, 35
    x, dy, weight, bias = torch.randn(25, K), torch.randn(25, N), torch.randn(4, N, K), torch.randn(4, N)

    def expected(dtype):
        wide_x, wide_dy, w, b = (t.to(dtype) for t in (x, dy, weight, bias))
        y = reference.gemm(wide_x, w, counts) + b.repeat_interleave(torch.tensor(counts), 0)
        of_rows = {"y": y, "dx": reference.gemm(wide_dy, w.mT, counts)}
        padded = {name: F.pad(t, (0, 0, 0, 25 - sum(counts))) for name, t in of_rows.items()}
        db = torch.stack([rows.sum(0) for rows in wide_dy[: sum(counts)].split(counts)])
        return padded | {"w": 0.5 + reference.wgrad(wide_dy, wide_x, counts), "db": db}

    stored = weight if layout == "out_in" else weight.transpose(1, 2)
    stored = [stored.contiguous()] if packed else list(stored.contiguous())
    params = [torch.nn.Parameter(t.clone().to(DEVICE)) for t in stored]
    biases = [torch.nn.Parameter(t.clone().to(DEVICE)) for t in ([bias] if packed else bias)]
    buffer = fusedmlp.MainGradBuffer(params)
    buffer.flat.fill_(0.5)
    leaf = x.clone().to(DEVICE).requires_grad_()
    queue = fusedmlp.WgradQueue() if delayed else None
    y = fusedmlp.grouped_linear(
        leaf,
        params[0] if packed else params,
        counts,
        bias=biases[0] if packed else biases,
        weight_layout=layout,
        wgrad_queue=queue,
        impl=impl,
    )
    y.backward(dy.to(DEVICE))
    if queue is not None:
        queue.run()
    main_grad = params[0].main_grad if packed else torch.stack([p.main_grad for p in params])
    db = biases[0].grad if packed else torch.stack([b.grad for b in biases])
    got = {
        "y": y.detach(),
        "dx": leaf.grad,
        "w": main_grad if layout == "out_in" else main_grad.transpose(1, 2),
        "db": db,
    }
    got = {name: t.cpu() for name, t in got.items()}
    assert_close(got, expected(torch.float64), expected(torch.float32), torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_at_all(impl):
    fc1 = torch.nn.Parameter(torch.randn(2, 6, 4, device=DEVICE))
    fc2 = torch.nn.Parameter(torch.randn(2, 4, 3, device=DEVICE))
    x = torch.empty(0, 4, device=DEVICE, requires_grad=True)
    y = fusedmlp.grouped_mlp(x, fc1, fc2, [0, 0], impl=impl)
    assert y.shape == (0, 4)
    y.sum().backward()
    assert fc1.grad.count_nonzero() == 0
    assert fc2.grad.count_nonzero() == 0
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["column", "expanded"])
def test_probs_biases_and_counts_of_any_strides(impl, kind):
    x, fc1, fc2 = torch.randn(6, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    probs = torch.rand(6, 3)[:, 1] if kind == "column" else torch.tensor(0.5).expand(6)
    biases = torch.randn(6, 2).t().requires_grad_(), torch.randn(4, 2).t().requires_grad_()
    dense = [b.detach().contiguous().requires_grad_() for b in biases]
    counts = torch.tensor([[2, 9], [4, 9]])[:, 0]
    tensors = [t.to(DEVICE) for t in (x, fc1, fc2, counts)]
    dy = torch.randn(6, 4, device=DEVICE)
    ys = []
    for p, (b1, b2) in ((probs, biases), (probs.contiguous(), dense)):
        y = fusedmlp.grouped_mlp(
            *tensors, probs=p.to(DEVICE), fc1_bias=b1.to(DEVICE), fc2_bias=b2.to(DEVICE), impl=impl
        )
        y.backward(dy)
        ys.append(y.detach())
    torch.testing.assert_close(*ys)
    for b, d in zip(biases, dense, strict=True):
        torch.testing.assert_close(b.grad, d.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_queued_micro_batch_of_one_row_with_any_row_stride(impl):
    queue = fusedmlp.WgradQueue(fuse_microbatches=True)
    weight = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True)
    expected = torch.zeros(2, 4, 3, device=DEVICE)
    for counts in ([1, 0], [2, 3]):
        x, dy = torch.randn(sum(counts), 3, device=DEVICE), torch.randn(sum(counts), 9, device=DEVICE)[:, :4]
        fusedmlp.grouped_linear(x, weight, counts, wgrad_queue=queue, impl=impl).backward(dy)
        n = counts[0]
        expected += torch.stack([dy[:n].T @ x[:n], dy[n:].T @ x[n:]])
    queue.run()
    torch.testing.assert_close(weight.grad, expected)
