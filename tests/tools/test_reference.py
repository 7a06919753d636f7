"""The float64 reference against one autograd of the whole layer, and the tolerance rule on errors that are known."""

import pytest
import torch
from support import forked

from bench.oracle import reference
from bench.oracle.tolerance import Errors, assert_close, assert_norms_close, errors_of

COUNTS, PADDING, H, F = (3, 0, 5), 2, 4, 6
GPT_OSS = {"interleaved": True, "limit": 0.7, "alpha": 1.702, "linear_offset": 1.0}


def tensors():
    torch.manual_seed(0)
    E, R = len(COUNTS), sum(COUNTS) + PADDING
    shapes = {"x": (R, H), "fc1": (E, 2 * F, H), "fc2": (E, H, F), "bias1": (E, 2 * F), "bias2": (E, H), "probs": (R,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("options", [{}, GPT_OSS, {"probs_before_fc2": True}], ids=["plain", "gpt_oss", "before fc2"])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_experts_one_by_one_are_the_layer(layout, options):
    leaf = {name: t.requires_grad_() for name, t in tensors().items()}
    y = reference.rows(counts=COUNTS, **leaf, **{k: v for k, v in options.items() if k != "probs_before_fc2"})
    dy = torch.randn(sum(COUNTS) + PADDING, H, dtype=torch.float64)
    y.backward(dy[: sum(COUNTS)])
    stored = {name: t.mT if layout == "in_out" and name in reference.WEIGHTS else t for name, t in leaf.items()}
    got = reference.grouped_mlp(stored, COUNTS, dy, torch.float64, layout=layout, before=0.5, **options)
    padded = torch.cat([y, y.new_zeros(PADDING, H)])
    expected = {"y": padded, **{f"d{name}": t.grad for name, t in leaf.items()}}
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if name in ("dfc1", "dfc2"):
            want = 0.5 + (want.mT if layout == "in_out" else want)
        torch.testing.assert_close(got[name], want.detach(), msg=name)


def test_products_are_those_of_each_expert():
    x, w = torch.randn(10, 4), torch.randn(3, 5, 4)
    y = reference.gemm(x, w, COUNTS)
    torch.testing.assert_close(y, torch.cat([x[:3] @ w[0].T, x[3:8] @ w[2].T]))
    dw = reference.wgrad(y, x[:8], COUNTS)
    torch.testing.assert_close(dw, torch.stack([y[:3].T @ x[:3], torch.zeros(5, 4), y[3:].T @ x[3:8]]))


def test_magnitudes_bound_the_results():
    found, inputs = {}, tensors()
    dy = torch.randn(sum(COUNTS) + PADDING, H, dtype=torch.float64)
    results = reference.grouped_mlp(inputs, COUNTS, dy, torch.float64, magnitudes=found, before=0.5)
    assert results.keys() == found.keys()
    assert all(result.abs().max() <= found[name] + 1e-12 for name, result in results.items())


EXPECTED = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def off_by(error):
    return EXPECTED + torch.tensor([error, 0.0, 0.0])


@pytest.mark.parametrize("lost", [0.0, 1e-3])
def test_twice_the_low_precision_error_and_the_band_are_allowed(lost):
    allowed = 2 * (lost / 4 + 2 * EPS)
    errors = errors_of({"y": off_by(3e-3)}, {"y": EXPECTED}, {"y": off_by(lost)}, torch.float32)
    assert errors.allowed() == pytest.approx(allowed)
    assert errors.relative() == pytest.approx({"y": 3e-3 / 4})
    for factor in (0.99, 1.01):
        errors = errors_of({"y": off_by(4 * factor * allowed)}, {"y": EXPECTED}, {"y": off_by(lost)}, torch.float32)
        if factor < 1:
            errors.verify()
        else:
            with pytest.raises(AssertionError, match=r"here: y: error .*, allowed"):
                errors.verify("here")


def test_parts_add_up_to_the_whole():
    whole = errors_of({"y": off_by(1e-3)}, {"y": EXPECTED}, {"y": off_by(2e-3)}, torch.float32)
    parts = Errors(torch.float32)
    for actual, expected, low in zip(off_by(1e-3), EXPECTED, off_by(2e-3), strict=True):
        parts.add("y", actual, expected, low)
    assert parts.found == whole.found


def test_the_scale_is_that_of_the_terms_where_it_is_known():
    errors = Errors(torch.float32, {"y": torch.tensor(40.0)}, layers=3)
    errors.add("y", off_by(1e-2), EXPECTED, off_by(1e-3))
    assert errors.relative() == pytest.approx({"y": 1e-2 / 40})
    assert errors.allowed() == pytest.approx(2 * (1e-3 / 40 + 3 * 2 * EPS))


def test_what_an_element_may_lose_in_its_sum_is_allowed_beyond_that():
    """It is no excuse for other elements."""
    band, lost = 4 * 2 * 2 * EPS, torch.tensor([1e-2, 0.0, 0.0], dtype=torch.float64)
    for actual, right in ((off_by(1e-2 + 0.9 * band), True), (off_by(-1e-2 - 1.1 * band), False)):
        errors = errors_of({"y": actual}, {"y": EXPECTED}, {"y": EXPECTED}, torch.float32, accumulated={"y": lost})
        assert (errors.relative()["y"] <= errors.allowed()) == right
    expected = {"y": EXPECTED}
    for value, of_sums, message in ((1e-2, lost.flip(0), "y: error"), (float("nan"), lost, "y: error inf")):
        with pytest.raises(AssertionError, match=message):
            assert_close({"y": off_by(value)}, expected, expected, torch.float32, accumulated={"y": of_sums})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_is_wrong(value):
    with pytest.raises(AssertionError, match="y: error inf"):
        assert_close({"y": off_by(value)}, {"y": EXPECTED}, {"y": EXPECTED}, torch.float32)
    with pytest.raises(AssertionError, match="a reference is not finite"):
        assert_close({"y": EXPECTED}, {"y": EXPECTED}, {"y": off_by(value)}, torch.float32)
    with pytest.raises(AssertionError, match="y: 2-norm of the error"):
        assert_norms_close({"y": off_by(value)}, {"y": EXPECTED}, {"y": EXPECTED}, torch.float32)
    with pytest.raises(AssertionError, match="a reference is not finite"):
        assert_norms_close({"y": EXPECTED}, {"y": EXPECTED}, {"y": off_by(value)}, torch.float32)


def test_nothing_compared_is_not_right():
    with pytest.raises(AssertionError, match="expected results to compare; got none"):
        assert_close({}, {}, {}, torch.float32)
    empty = {"y": torch.empty(0)}
    assert_close(empty, empty, empty, torch.float32)  # an expert without rows


def test_what_should_be_zero_is_zero():
    zero = torch.zeros(3)
    assert_close({"y": zero}, {"y": zero}, {"y": zero}, torch.float32)
    with pytest.raises(AssertionError, match="y: error inf"):
        assert_close({"y": zero + 1e-30}, {"y": zero}, {"y": zero}, torch.float32)


def test_names_and_shapes_are_those_expected():
    with pytest.raises(AssertionError, match=r"expected \['y'\]; got \['x'\]"):
        assert_close({"x": EXPECTED}, {"y": EXPECTED}, {"y": EXPECTED}, torch.float32)
    with pytest.raises(AssertionError, match=r"y: expected shape \(3,\); got \(1, 3\)"):
        assert_close({"y": EXPECTED[None]}, {"y": EXPECTED}, {"y": EXPECTED}, torch.float32)


def test_the_norm_sees_what_the_largest_element_hides():
    expected, low = torch.ones(1000, dtype=torch.float64), torch.ones(1000)
    expected[0] = 100
    low[0] = 100
    actual = expected * (1 + 2 * EPS)
    assert_close({"y": actual}, {"y": expected}, {"y": low}, torch.float32)
    with pytest.raises(AssertionError, match="y: 2-norm of the error"):
        assert_norms_close({"y": actual}, {"y": expected}, {"y": low}, torch.float32)


def test_the_reference_and_the_self_test_load_without_triton():
    code = (
        "import sys; assert 'fusedmlp' not in sys.modules; sys.modules['triton'] = None\n"
        "from bench.oracle import reference, tolerance; from fusedmlp.doctor import selftest"
    )
    done = forked.run("-c", code)
    assert done.returncode == 0, done.stderr
