"""Products on the CPU by each of three functions; blocks and scratch of any length: `operators/torch_products.py`."""

import pytest
import torch
import torch.nn.functional as F
from cases import factory
from cases.factory import Case, Inputs
from support import mlp_arguments
from torch.utils._python_dispatch import TorchDispatchMode

from bench.oracle import reference
from bench.oracle.tolerance import assert_close
from fusedmlp.operators import torch_impl, torch_products
from fusedmlp.operators.torch_products import Rows

K, N, PADDING = 16, 24, 2
LOADS = {"even": (3, 3, 3, 3), "uneven": (4, 0, 2, 5), "empty": (0, 0, 0, 0)}


def way_of(run, monkeypatch):
    """Names of the product functions that a call uses."""
    used = set()
    for module, name in ((torch, "bmm"), (torch, "mm"), (F, "grouped_mm")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=original, **k: (used.add(n), f(*a, **k))[1])
    run()
    return used


def operands(load, dtype, columns=K, features=N):
    generator = torch.Generator().manual_seed(0)
    rows = sum(LOADS[load]) + PADDING
    x, dy = (torch.randn(rows, n, generator=generator).to(dtype) for n in (columns, features))
    x[-PADDING:], dy[-PADDING:] = float("nan"), float("nan")
    w = torch.randn(4, features, columns, generator=generator).to(dtype)
    return Rows(torch.tensor([0, *torch.tensor(LOADS[load]).cumsum(0)], dtype=torch.int32), rows), x, dy, w


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, rtol=8 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("load", "packed", "columns", "way"),
    [
        ("even", True, K, "bmm"),
        ("empty", True, K, "bmm"),
        ("uneven", True, K, "grouped_mm"),
        ("uneven", True, K - 1, "mm"),  # rows are no multiple of 16 bytes
        ("even", False, K, "mm"),
        ("uneven", False, K, "mm"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_product(load, packed, columns, way, dtype, transposed, monkeypatch):
    rows, x, dy, w = operands(load, dtype, columns)
    operand = x if transposed else dy
    got = []
    used = way_of(
        lambda: got.append(rows.product(operand, [w] if packed else list(w), transposed=transposed)), monkeypatch
    )
    assert used == {way}
    want = reference.gemm(operand.double(), w.double() if transposed else w.double().mT, LOADS[load])
    close(got[0], F.pad(want, (0, 0, 0, PADDING)), dtype)
    assert got[0].is_contiguous()


def test_rows_that_share_memory():
    """An incoming gradient can be one row, expanded, which `F.grouped_mm` refuses."""
    rows, x, _, w = operands("uneven", torch.float32)
    got = rows.product(x[:1].expand_as(x), [w], transposed=True)
    for part, w_e in zip(rows.split(got), w.double(), strict=True):
        close(part, (x[:1].double() @ w_e.T).expand_as(part), torch.float32)


@pytest.mark.parametrize("scratch", [1, 2 * K * N, 1 << 20])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_wgrad(load, dtype, packed, accumulate, scratch, monkeypatch):
    """Into fp32, as many experts at a time as fit the scratch; without rows nothing is added, or zeros are written."""
    monkeypatch.setattr(torch_products, "SCRATCH_ELEMENTS", scratch)
    rows, x, dy, _ = operands(load, dtype)
    dw = torch.randn(4, N, K)
    want = reference.wgrad(dy.double(), x.double(), LOADS[load]) + (dw.double() if accumulate else 0)
    each = [part.clone() for part in dw]
    versions = [part._version for part in each]
    rows.wgrad_([dw] if packed else each, dy, x, accumulate)
    for e, expected in enumerate(want):
        close((dw if packed else each)[e], expected, dtype)
        if accumulate and not LOADS[load][e]:
            assert each[e]._version == versions[e]


@pytest.mark.parametrize("packed", [True, False])
def test_wgrad_adds_to_experts_with_rows_of_each_part_of_the_scratch(packed, monkeypatch):
    """Two experts at a time: of the first two the second has no rows, of the others both have."""
    test_wgrad("uneven", torch.bfloat16, packed, True, 2 * K * N, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [1, 96, 400])
def test_blocks_of_any_length_make_the_same_layer(elements, dtype, monkeypatch):
    monkeypatch.setattr(torch_products, "BLOCK_ELEMENTS", elements)
    case = Case(counts=(4, 0, 9, 1), padding=3, dtype=dtype, bias=True)
    inputs, magnitudes = Inputs(case), {}
    expected = factory.reference(inputs, torch.float64, magnitudes)
    assert_close(factory.run(inputs, "torch", "cpu"), expected, factory.reference(inputs, dtype), dtype, magnitudes)


class Passes(TorchDispatchMode):
    """Records the operators between products that write to memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("bmm", "baddbmm_", "empty", "new_empty", "empty_like", "lift_fresh"):
            self.names.append(name)
        return function(*arguments, **options or {})


FORWARD = ["silu", "mul_", "mul"]
BACKWARD = ["mul", "silu", "mul", "mul", "silu_backward", "mul_", "mul_", "sum", "mul"]


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        (torch.float32, FORWARD, BACKWARD),
        (torch.bfloat16, ["copy_", *FORWARD], ["copy_", "copy_", *BACKWARD, "copy_"]),
    ],
    ids=str,
)
def test_passes_over_memory_between_products(dtype, forward, backward):
    """Swiglu with probabilities, in one block; in 16 bits, copies convert what is read and written."""
    rows, x, dy, _ = operands("even", dtype, features=K)
    offsets, probs = torch.tensor(rows.bounds, dtype=torch.int32), torch.rand(rows.number)
    fc1, fc2 = [torch.randn(4, 2 * N, K).to(dtype)], [torch.randn(4, K, N).to(dtype)]
    given = mlp_arguments.forward(x=x, fc1=fc1, fc2=fc2, offsets=offsets, probs=probs, impl="torch")
    rows_of_padding = ["zero_"]
    with Passes() as passes:
        _, h, *_ = torch_impl.grouped_mlp(*given.without_impl)
    assert [name for name in passes.names if name not in rows_of_padding] == forward
    dw = [[torch.zeros(t.shape, dtype=dtype)] for (t,) in (fc1, fc2)]
    written = {"dw1": dw[0], "dw2": dw[1], "accumulate1": True, "accumulate2": True}
    of_backward = mlp_arguments.backward(given, dy=dy, h=h, **written)
    with Passes() as passes:
        torch_impl.grouped_mlp_backward_(*of_backward.without_impl)
    assert [name for name in passes.names if name not in rows_of_padding] == backward


def test_autocast_leaves_products_alone():
    rows, x, dy, w = operands("uneven", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert rows.product(x, [w], transposed=True).dtype == torch.float32
        dw = torch.zeros(4, N, K)
        rows.wgrad_([dw], dy, x, True)
    close(dw[0], dy[:4].double().T @ x[:4].double(), torch.float32)
