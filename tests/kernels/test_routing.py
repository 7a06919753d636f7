"""Sorting by counting against torch's stable sort, the sum of a token's rows against float64, and copies of its row."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.oracle import tolerance
from fusedmlp.kernels.launching.cost import Cost
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.routing import order
from fusedmlp.kernels.routing.combine import combine_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.routing.sort import sort
from fusedmlp.kernels.routing.spread import spread_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poison")


def expected(ids, probs, num_experts):
    """`(offsets, row ids, places, probs)` by a stable sort."""
    flat = ids.flatten().to(torch.int64)
    experts = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    slots = experts.argsort(stable=True)
    counts = experts.bincount(minlength=num_experts + 1)
    offsets = torch.cat([counts.new_zeros(1), counts[:num_experts].cumsum(0)])
    return offsets, slots // ids.shape[1], slots.argsort(), probs.flatten()[slots]


def check(ids, num_experts, dtype=torch.float32):
    probs = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = order.order_rows(ids.to(DEVICE), probs.to(DEVICE), num_experts)
    assert [t.dtype for t in found] == [torch.int32] * 3 + [dtype]
    found = found._replace(plan=found.plan[: num_experts + 1])
    for name, got, want in zip(found._fields, found, expected(ids, probs, num_experts), strict=True):
        assert torch.equal(got.cpu().to(want.dtype), want), name
    return found


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**31))
def test_any_size_and_ids_of_other_ranks(num_tokens, top_k, num_experts, beyond, seed):
    generator = torch.Generator().manual_seed(seed)
    check(torch.randint(-beyond, num_experts + beyond, (num_tokens, top_k), generator=generator), num_experts)


@pytest.mark.parametrize(
    ("dtype", "num_experts"),
    [(torch.uint8, 300), (torch.int8, 512), (torch.int16, 7), (torch.int32, 1), (torch.int64, 1000)],
    ids=str,
)
def test_dtypes_and_many_experts(dtype, num_experts):
    """More experts than the dtype counts to, more rows than one block has, and blocks that end within a token."""
    limits = torch.iinfo(dtype)
    ids = torch.randint(max(limits.min, -2), min(limits.max, num_experts + 1) + 1, (701, 3)).to(dtype)
    ids[5] = limits.max
    ids[6] = limits.min
    check(ids, num_experts)


def test_more_blocks_than_are_summed_at_once_and_several_parts_of_a_block(monkeypatch):
    for name, value in (("_PART", 16), ("_SUMMED", 64), ("_MOST_BLOCKS", 40)):
        monkeypatch.setattr(order, name, value)
    check(torch.randint(0, 5, (450, 5)), 5)  # 36 blocks of 64 positions, 4 times 16; counts of 8 blocks at once


@triton.jit
def _sort_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, sort(tl.load(x_ptr + at)))


@pytest.mark.parametrize("N", [1, 2, 64, 2048])
@pytest.mark.parametrize("start", ["random", "rising", "falling"])
def test_sort_of_one_program(N, start):
    values = torch.randint(-(2**31), 2**31, (8 * N,)).unique()
    values = values[torch.randperm(len(values))[:N]].to(torch.int32)
    ascending = values.sort().values
    x = {"random": values, "rising": ascending, "falling": ascending.flip(0)}[start].to(DEVICE, copy=True)
    _sort_kernel[(1,)](x, N)
    assert torch.equal(x.cpu(), ascending)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_probabilities_of_every_dtype(dtype):
    check(torch.randint(-1, 6, (50, 3)), 5, dtype)


@pytest.mark.parametrize("ids", [[[3] * 4] * 40, [[9] * 4] * 40, [[-1, 2]], [[0]]], ids=str)
def test_all_to_one_expert_or_to_none(ids):
    check(torch.tensor(ids), 4)


def test_the_same_bits_every_run():
    ids = torch.randint(0, 3, (2000, 2))
    assert all(torch.equal(a, b) for a, b in zip(check(ids, 3), check(ids, 3), strict=True))


@pytest.mark.parametrize(("top_k", "H"), [(1, 16), (2, 33), (8, 48), (11, 1500), (20, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_a_token_are_summed_in_order(top_k, H, dtype):
    y = torch.randn(30 * top_k, H).to(dtype)
    places = torch.randperm(30 * top_k)
    out = torch.full((30, H), float("nan"), dtype=dtype, device=DEVICE)
    combine_(out, y.to(DEVICE), places.to(DEVICE, torch.int32))
    parts = y[places].view(30, top_k, H)
    in_order = torch.zeros(30, H)
    for k in range(top_k):
        in_order += parts[:, k].float()
    assert torch.equal(out.cpu(), in_order.to(dtype))
    exact, low = parts.double().sum(1), parts.float().sum(1).to(dtype).double()
    tolerance.assert_close({"out": out.cpu().double()}, {"out": exact}, {"out": low}, dtype)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)])
def test_nothing_to_sum(shape):
    combine_(torch.empty(shape, device=DEVICE), torch.empty(2 * shape[0], shape[1], device=DEVICE), torch.arange(10))


def test_tokens_that_choose_no_expert_are_zero():
    out = torch.full((3, 8), float("nan"), device=DEVICE)
    combine_(out, torch.empty(0, 8, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE))
    assert (out == 0).all()


@pytest.mark.parametrize(("top_k", "H"), [(1, 16), (2, 33), (8, 48), (11, 1500), (20, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_row_of_a_token_that_an_expert_has_gets_a_copy(top_k, H, dtype):
    x = torch.randn(30, H + 3).to(dtype)[:, 3:]  # rows that lie apart, and nowhere aligned
    x[7] = float("nan")
    places = torch.randperm(30 * top_k)
    out = torch.full((30 * top_k, H), 9.0, dtype=dtype, device=DEVICE)
    offsets = torch.tensor([0, 3, 29 * top_k], dtype=torch.int32, device=DEVICE)
    spread_(out, x.to(DEVICE), places.to(DEVICE, torch.int32), Schedule(offsets, 30 * top_k))
    expected = x[places.argsort() // top_k]
    expected[29 * top_k :] = 9.0  # not written
    assert torch.equal(out.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("rows", "tokens", "H"), [(0, 0, 8), (0, 5, 8), (5, 5, 0)])
def test_nothing_to_copy(rows, tokens, H):
    out, x = torch.empty(rows, H, device=DEVICE), torch.empty(tokens, H, device=DEVICE)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    spread_(out, x, torch.arange(rows, device=DEVICE), Schedule(offsets, rows))


def test_least_traffic_is_reported():
    schedule = Schedule(torch.tensor([0, 30], dtype=torch.int32, device=DEVICE), 30)
    with recording() as recorded:
        order.order_rows(torch.zeros(10, 3, dtype=torch.int64, device=DEVICE), torch.rand(10, 3, device=DEVICE), 7)
        combine_(torch.empty(10, 16, device=DEVICE), torch.empty(30, 16, device=DEVICE), torch.arange(30).to(DEVICE))
        places = torch.arange(30).to(DEVICE)
        spread_(torch.empty(30, 16, device=DEVICE), torch.empty(10, 16, device=DEVICE), places, schedule)
    assert {launch.path for launch in recorded} == {"pointer"}
    assert [launch.cost for launch in recorded if launch.cost] == [
        Cost("order_rows", 0, 30 * 8 + 4 * (8 + 30 + 30) + 2 * 4 * 30),
        Cost("combine", 30 * 16, 4 * 40 * 16 + 4 * 30),
        Cost("spread", 0, 4 * 40 * 16 + 4 * 30),
    ]
