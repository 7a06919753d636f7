"""`moe_experts` against a loop over tokens and their choices in float64: every option, and every kind of routing."""

import pytest
import torch
from cases import moe
from cases.factory import GATED, UNGATED
from cases.moe import Case, Inputs
from support.grids import seeds

import fusedmlp
from bench.oracle.tolerance import assert_close
from fusedmlp.kernels.routing.plan import size_of_plan
from fusedmlp.kernels.tiles.select import architecture
from fusedmlp.kernels.tiles.table import row_blocks
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPArguments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("torch", "triton")
pytestmark = pytest.mark.usefixtures("poison")


def check(case, impls=IMPLS):
    inputs = Inputs(case)
    expected, low_precision = moe.reference(inputs, torch.float64), moe.reference(inputs, case.dtype)
    widest = max(case.dtype, case.main_grad_dtype, case.weights_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    for impl in impls:
        assert_close(moe.run(inputs, impl, DEVICE), expected, low_precision, widest)


@pytest.mark.parametrize("seed", seeds(100, some=50))
def test_random_case(seed):
    check(moe.random_case(seed), IMPLS if seed % 5 == 0 else ["torch"])  # interpreted kernels are slow


@pytest.mark.parametrize("activation", GATED + UNGATED)
def test_activation(activation):
    check(Case(activation=activation, bias=True), IMPLS if activation in ("geglu", "relu2") else ["torch"])


def test_gpt_oss_activation():
    options = {"interleaved": True, "limit": 0.5, "alpha": 1.702, "linear_offset": 1.0}
    check(Case(H=24, F=20, options=options, bias=True, dtype=torch.bfloat16))


@pytest.mark.parametrize("queue", ["none", "delayed", "fused"])
@pytest.mark.parametrize("mode", moe.MODES)
@pytest.mark.parametrize("packed", [True, False])
def test_every_way_to_accumulate(mode, queue, packed):
    check(Case(mode=mode, queue=queue, packed=packed, bias=True, microbatches=3, dtype=torch.bfloat16), ["torch"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "queue", "packed"),
    [
        ("main_grad", "fused", False),
        ("overwrite", "delayed", True),
        ("grad", "none", False),
        ("no grad yet", "fused", True),
        ("off", "none", True),
    ],
)
def test_ways_to_accumulate_on_triton(mode, queue, packed):
    check(Case(mode=mode, queue=queue, packed=packed, microbatches=2, dtype=torch.bfloat16), ["triton"])


@pytest.mark.parametrize(
    "case",
    [
        Case(T=0, bias=True, microbatches=2),
        Case(T=0, mode="off"),
        Case(K=1),
        Case(T=1, K=1, E=1),
        Case(ids="outside", bias=True),
        Case(ids="outside", bias=True, queue="fused", microbatches=2, mode="overwrite"),
        Case(ids="one expert", K=4, bias=True),  # every token chooses the same expert several times
        Case(ids="one choice", E=1),
        Case(T=40, E=30, K=2, bias=True),  # about as many experts as tokens: several have no rows
        Case(T=70, E=3, K=2, H=16, F=16),
    ],
    ids=str,
)
def test_routing(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32, torch.uint64])
def test_ids_of_any_integer_dtype(dtype):
    inputs = Inputs(Case())
    expected = moe.run(inputs, "torch", DEVICE)
    for batch in inputs.microbatches:
        batch.ids = torch.where(batch.ids < 0, 100, batch.ids).to(dtype)
    for name, tensor in moe.run(inputs, "torch", DEVICE).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queue", ["none", "fused"])
def test_the_same_bits_every_time(impl, queue):
    case = Case(T=9, K=3, E=3, dtype=torch.bfloat16, queue=queue, microbatches=2)
    first, second = (moe.run(Inputs(case), impl, DEVICE) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


@pytest.mark.parametrize("impl", IMPLS)
def test_the_order_of_tokens_changes_no_tokens_bits(impl):
    """A token's rows are summed in the order of its choices, wherever they lie."""
    case = Case(T=12, K=3, bias=True)
    inputs = Inputs(case)
    (batch,) = inputs.microbatches
    expected = moe.run(inputs, impl, DEVICE)
    order = torch.randperm(case.T)
    batch.x, batch.ids, batch.probs, batch.dy = (t[order] for t in (batch.x, batch.ids, batch.probs, batch.dy))
    got = moe.run(inputs, impl, DEVICE)
    for name in ("y", "dx", "dprobs"):
        torch.testing.assert_close(got[name], expected[name][order], rtol=1e-6, atol=1e-6)


def layer(T=16, K=8, E=4, H=32, F=2, dtype=torch.float32):
    """Tensors with K > F, so that a copy of `hidden_states` per row would be most of the memory that is kept."""
    x = torch.randn(T, H, dtype=dtype, device=DEVICE, requires_grad=True)
    ids = torch.randint(0, E, (T, K), device=DEVICE)
    probs = torch.rand(T, K, device=DEVICE, requires_grad=True)
    fc1 = torch.randn(E, 2 * F, H, dtype=dtype, device=DEVICE, requires_grad=True)
    fc2 = torch.randn(E, H, F, dtype=dtype, device=DEVICE, requires_grad=True)
    return x, ids, probs, fc1, fc2


@pytest.mark.parametrize("impl", IMPLS)
def test_hidden_states_are_saved_once_per_token(impl):
    tensors = layer()
    x, ids, probs, fc1, fc2 = tensors
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fusedmlp.moe_experts(*tensors, impl=impl)
    y.sum().backward()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    R, E, G = ids.numel(), *fc1.shape[:2]
    given = sum(t.untyped_storage().nbytes() for t in (x, probs, fc1, fc2))
    plan = size_of_plan(R, E, row_blocks(architecture(x.device))) if impl == "triton" else E + 1
    assert sum(storages.values()) == given + 4 * (R * G + 3 * R + plan)  # h; row ids, places, probabilities


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fuse", [True, False])
def test_a_queue_holds_hidden_states_and_dy_once_per_token(impl, fuse):
    x, ids, probs, fc1, fc2 = layer()
    queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
    for _ in range(2):
        y = fusedmlp.moe_experts(x, ids, probs, fc1, fc2, wgrad_queue=queue, impl=impl)
        y.backward(torch.randn_like(y))
    for delayed in queue._pending:
        rows = {delayed.operands.dy.shape[0], delayed.operands.x.shape[0]}
        assert rows == {x.shape[0], ids.numel()}
    queue.clear()


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_experts_elsewhere_cost_no_gemm_work(impl, monkeypatch):
    seen = []
    original = ops.grouped_mlp
    monkeypatch.setattr(ops, "grouped_mlp", lambda *a: (seen.append(MLPArguments(*a).offsets), original(*a))[1])
    x, _, probs, fc1, fc2 = layer(T=5, K=2)
    ids = torch.tensor([[-1, 4], [9, 2], [2, 3], [-7, 0], [4, 5]], device=DEVICE)
    fusedmlp.moe_experts(x, ids, probs, fc1, fc2, impl=impl)
    assert [plan[:5].tolist() for plan in seen] == [[0, 1, 1, 3, 4]]


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_only_of_what_wants_them(impl):
    x, ids, probs, fc1, fc2 = layer(T=6)
    expected = torch.autograd.grad(fusedmlp.moe_experts(x, ids, probs, fc1, fc2, impl=impl).sum(), [x, probs, fc1, fc2])
    for wanted in range(4):
        tensors = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, probs, fc1, fc2))]
        y = fusedmlp.moe_experts(tensors[0], ids, *tensors[1:], impl=impl)
        y.sum().backward()
        for i, tensor in enumerate(tensors):
            assert (tensor.grad is None) == (i != wanted)
        assert torch.equal(tensors[wanted].grad, expected[wanted])


@pytest.mark.parametrize("impl", IMPLS)
def test_tensors_of_any_strides(impl):
    x, ids, probs, fc1, fc2 = layer(T=8, K=8, H=8)
    dy = torch.randn(8, 8, device=DEVICE)
    plain = fusedmlp.moe_experts(x, ids, probs, fc1, fc2, impl=impl)
    expected = torch.autograd.grad(plain, [x, probs, fc1], dy)
    strided = [t.detach().t().contiguous().t().requires_grad_(t.requires_grad) for t in (x, ids, probs)]
    y = fusedmlp.moe_experts(*strided, fc1, fc2, impl=impl)
    got = torch.autograd.grad(y, [strided[0], strided[2], fc1], dy.t().contiguous().t())
    for a, b in zip([y, *got], [plain, *expected], strict=True):
        assert torch.equal(a, b)
