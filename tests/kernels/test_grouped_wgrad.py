"""The wgrad kernel by itself: main_grad in odd places, several segments, no rows."""

import pytest
import torch

from fusedmlp.kernels.expert_tensors import ExpertTensors
from fusedmlp.kernels.grouped_wgrad import grouped_wgrad_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, K = 36, 40


def segment(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts)
    dy, x = torch.randn(rows, N, generator=generator), torch.randn(rows, K, generator=generator)
    offsets = torch.tensor([sum(counts[:e]) for e in range(len(counts) + 1)], dtype=torch.int32)
    return dy.to(DEVICE), x.to(DEVICE), offsets.to(DEVICE)


def expected(segments, initial):
    total = initial.double().clone()
    for dy, x, offsets in segments:
        bounds = offsets.tolist()
        for e, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            total[e] += dy[first:end].double().T @ x[first:end].double()
    return total


def experts_in(where, count):
    """`count` matrices `[N, K]` of main_grad, as owners lay them out."""
    size = N * K
    flat = torch.full((2 * count * size + 16,), 0.25, device=DEVICE)
    if where == "reversed":
        starts = [(count - 1 - e) * size for e in range(count)]
    elif where == "misaligned":
        starts = [1 + e * (size + 1) for e in range(count)]
    else:
        starts = [e * size + (size if e > 1 else 0) for e in range(count)]
    views = [flat[start : start + size].view(N, K) for start in starts]
    return flat, views


@pytest.mark.parametrize("where", ["reversed", "misaligned", "scattered"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_main_grad_in_an_owners_buffer(where, accumulate):
    one = segment((17, 0, 5, 40))
    flat, views = experts_in(where, 4)
    described = ExpertTensors.of(views, 2)
    assert (described.table is not None) == (where == "scattered")
    untouched = torch.ones_like(flat, dtype=torch.bool)
    for view in views:
        offset = (view.data_ptr() - flat.data_ptr()) // 4
        untouched[offset : offset + N * K] = False
    grouped_wgrad_(described, None, [one[0]], [one[1]], [one[2]], accumulate=accumulate)
    want = expected([one], torch.full((4, N, K), 0.25 if accumulate else 0.0, device=DEVICE))
    torch.testing.assert_close(torch.stack(views).double(), want, rtol=1e-5, atol=1e-5)
    assert (flat[untouched] == 0.25).all()


@pytest.mark.parametrize("accumulate", [True, False])
def test_segments_equal_one_launch_each(accumulate):
    segments = [segment((3, 0, 20), 1), segment((0, 0, 7), 2), segment((40, 0, 1), 3)]
    initial = torch.full((3, N, K), 0.5, device=DEVICE)
    dw = initial.clone()
    grouped_wgrad_(ExpertTensors.of([dw], 2), None, *zip(*segments, strict=True), accumulate=accumulate)
    want = expected(segments, initial if accumulate else torch.zeros_like(initial))
    torch.testing.assert_close(dw.double(), want, rtol=1e-5, atol=1e-5)
    if accumulate:
        assert torch.equal(dw[1], initial[1])  # no rows in any segment: not a bit may change


def test_experts_without_rows_are_zeroed_when_overwriting_and_kept_when_adding():
    dy, x, offsets = segment((0, 5))
    dw = torch.full((2, N, K), float("nan"), device=DEVICE)
    grouped_wgrad_(ExpertTensors.of([dw], 2), None, [dy], [x], [offsets], accumulate=False)
    assert dw[0].count_nonzero() == 0
    dw[0] = 7.0
    grouped_wgrad_(ExpertTensors.of([dw], 2), None, [dy], [x], [offsets], accumulate=True)
    assert (dw[0] == 7.0).all()


@pytest.mark.parametrize("with_dw", [True, False])
def test_bias_gradient(with_dw):
    dy, x, offsets = segment((17, 0, 30))
    scale = torch.rand(47, device=DEVICE)
    dw = torch.empty(3, N, K, device=DEVICE)
    db = torch.full((3, N), float("nan"), device=DEVICE)
    grouped_wgrad_(
        ExpertTensors.of([dw], 2) if with_dw else None,
        ExpertTensors.of([db], 1),
        [dy],
        [x],
        [offsets],
        accumulate=False,
        scale_R=scale,
    )
    scaled = dy * scale[:, None]
    want = torch.stack([scaled[:17].sum(0), torch.zeros(N, device=DEVICE), scaled[17:].sum(0)])
    torch.testing.assert_close(db, want, rtol=1e-5, atol=1e-5)


def test_the_same_bits_every_run():
    dy, x, offsets = segment((33, 60))
    runs = []
    for _ in range(2):
        dw = torch.zeros(2, N, K, device=DEVICE)
        grouped_wgrad_(ExpertTensors.of([dw], 2), None, [dy], [x], [offsets], accumulate=True)
        runs.append(dw)
    assert torch.equal(*runs)
