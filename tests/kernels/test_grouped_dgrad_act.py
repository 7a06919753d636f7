"""The backward of fc2 and of the activation, by itself and on every path."""

import pytest
import torch
from support import experts
from support import reference as oracle
from support.factory import Case, Inputs
from support.tolerance import assert_close

import fusedmlp
from fusedmlp.kernels import descriptors, grouped_dgrad_act, launches
from fusedmlp.kernels.grouped_dgrad_act import grouped_dgrad_act_
from fusedmlp.operators.triton_impl import _options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOADS = {"ragged": (3, 0, 17, 1, 40), "single rows": (1, 0, 1, 1), "empty": (0, 0, 0), "last only": (0, 0, 33)}
GPT_OSS = {"interleaved": True, "limit": 0.5, "alpha": 1.702, "linear_offset": 1.0}
ACTIVATIONS = {
    "gated": ("swiglu", {}),
    "clamped": ("geglu_tanh", {"limit": 0.3, "linear_offset": 1.0}),
    "interleaved": ("swiglu", GPT_OSS),
    "ungated": ("gelu", {}),
}


def pre_activation(inputs):
    """`h` of all rows, NaN at padding rows."""
    generator = torch.Generator().manual_seed(7)
    h = torch.randn(inputs.probs.shape[0], inputs.bias1.shape[1], generator=generator).to(inputs.case.dtype)
    h[sum(inputs.case.counts) :] = float("nan")
    return h


def reference(inputs, dtype):
    """`dh`, `a` and `dprobs` of the rows of experts, by autograd in any dtype."""
    case, owned = inputs.case, sum(inputs.case.counts)
    h = pre_activation(inputs)[:owned].to(dtype).requires_grad_()
    probs = inputs.probs[:owned].to(dtype).requires_grad_()
    act = oracle.activate(case.activation, h, **case.options)
    a = act * probs[:, None].to(act.dtype) if case.probs else act
    ys, row = [], 0
    for e, n in enumerate(case.counts):
        w = inputs.fc2[e].to(dtype)
        y = a[row : row + n] @ (w.T if case.layout == "out_in" else w)
        if case.bias and case.probs:
            y = y + probs[row : row + n, None] * inputs.bias2[e].to(dtype)
        ys.append(y)
        row += n
    torch.cat(ys).backward(inputs.dy[:owned].to(dtype))
    results = {"dh": h.grad, "a": a.detach()}
    if case.probs:
        results["dprobs"] = probs.grad
    return {name: t.double() for name, t in results.items()}


def run(inputs, where="packed", *, rows=None, best="tma"):
    """`dh`, `a` and `dprobs` of all rows; checks which path was taken."""
    case, num_rows = inputs.case, inputs.probs.shape[0]
    h = pre_activation(inputs).to(DEVICE)
    dh, a = torch.full_like(h, float("nan")), h.new_full((num_rows, case.F), float("nan"))
    with launches.recording() as log:
        dprobs = grouped_dgrad_act_(
            dh,
            a,
            inputs.dy.to(DEVICE),
            h,
            experts.logical(experts.place(inputs.fc2, where, DEVICE), case.layout),
            experts.tiles_of(case.counts, num_rows, DEVICE),
            _options(fusedmlp.Activation(case.activation, **case.options).encoded),
            bias_EH=experts.place(inputs.bias2, where, DEVICE) if case.bias else None,
            probs_R=inputs.probs.to(DEVICE) if case.probs else None,
            rows_R=None if rows is None else rows.to(DEVICE),
        )
    (launch,) = log
    assert launch.path == experts.expected_path("dgrad_act", case.dtype, DEVICE, best, (case.H, case.F))
    results = {"dh": dh, "a": a} if dprobs is None else {"dh": dh, "a": a, "dprobs": dprobs}
    return {name: t.cpu() for name, t in results.items()}, launch


def gather(inputs, index_dtype=torch.int32):
    """Puts the rows of dy into another order, among rows that nobody wants; the index that undoes it."""
    order = torch.randperm(2 * inputs.dy.shape[0], generator=torch.Generator().manual_seed(1))
    order = order[: inputs.dy.shape[0]]
    tokens = torch.full((2 * order.numel(), inputs.case.H), float("nan"), dtype=inputs.dy.dtype)
    tokens[order] = inputs.dy
    order[sum(inputs.case.counts) :] = 10**6  # padding rows' indices are not used
    inputs.dy = tokens
    return order.to(index_dtype)


def check(case, where="packed", *, gathered=False, best="tma"):
    inputs = Inputs(case)
    permuted, owned = inputs.dy, sum(case.counts)
    rows = gather(inputs) if gathered else None
    got, _ = run(inputs, where, rows=rows, best=best)
    inputs.dy = permuted
    assert all((t[owned:] == 0).all() for t in got.values())
    expected, low = reference(inputs, torch.float64), reference(inputs, case.dtype)
    assert_close({name: t[:owned].double() for name, t in got.items()}, expected, low, case.dtype)
    return got


pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_activations_and_layouts_on_every_path(kind, layout, dtype, monkeypatch):
    name, options = ACTIVATIONS[kind]
    case = Case((3, 0, 17, 1), 21, H=80, F=48, activation=name, options=options, layout=layout, bias=True, dtype=dtype)
    by_tma = check(case)
    monkeypatch.setattr(descriptors, "fits_tensor", lambda tensor: False)
    by_pointer = check(case, best="pointer")
    monkeypatch.setattr(grouped_dgrad_act, "vectors_fit", lambda *_: False)
    unaligned = check(case, best="unaligned")
    if DEVICE == "cpu":
        assert all(torch.equal(by_tma[name], by_pointer[name]) for name in ("dh", "a"))
        assert all(torch.equal(by_tma[name], unaligned[name]) for name in ("dh", "a"))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("gathered", [False, True])
def test_loads(load, gathered):
    check(Case(LOADS[load], 20, H=48, F=72, bias=True), gathered=gathered, best="gather" if gathered else "tma")


@pytest.mark.parametrize("kind", ["gated", "interleaved"])
@pytest.mark.parametrize("path", ["gather", "pointer", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_gathered_by_index(kind, path, dtype, monkeypatch):
    name, options = ACTIVATIONS[kind]
    case = Case((3, 0, 17, 1), 21, H=80, F=48, activation=name, options=options, bias=True, dtype=dtype)
    if path != "gather":
        monkeypatch.setattr(descriptors, "fits_tensor", lambda tensor: False)
    if path == "unaligned":
        monkeypatch.setattr(grouped_dgrad_act, "vectors_fit", lambda *_: False)
    check(case, gathered=True, best=path)


@pytest.mark.parametrize(("H", "F"), [(1, 1), (33, 35), (8, 40)])
def test_gathered_rows_of_odd_sizes(H, F):
    check(Case((5, 18, 0, 1), 3, H=H, F=F, bias=True, dtype=torch.bfloat16), gathered=True, best="unaligned")


def test_an_index_may_be_of_int64_and_name_a_row_twice():
    inputs = Inputs(Case((3, 0, 2), 1, H=48, F=32, bias=True))
    rows = gather(inputs, torch.int64)
    rows[4] = rows[0]
    twice, _ = run(inputs, rows=rows, best="gather")
    inputs.dy = inputs.dy[rows.clamp(max=inputs.dy.shape[0] - 1)]
    permuted, _ = run(inputs)
    torch.testing.assert_close(twice, permuted)


@pytest.mark.parametrize("where", experts.PLACES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_places_of_weights_and_biases(where, layout):
    case = Case((3, 0, 17), 5, H=48, F=32, layout=layout, bias=True, dtype=torch.bfloat16)
    check(case, where, best=experts.PLACES[where])


@pytest.mark.parametrize(("H", "F"), [(1, 1), (7, 5), (33, 35), (8, 4), (8, 40)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_odd_sizes(H, F, kind):
    name, options = ACTIVATIONS[kind]
    case = Case((5, 18, 0, 1), 3, H=H, F=F, activation=name, options=options, bias=True, dtype=torch.bfloat16)
    check(case, best="tma" if F == 40 else "unaligned")  # what the others have is not a multiple of 16 bytes


@pytest.mark.parametrize("bias", [True, False])
def test_without_probs(bias):
    check(Case((5, 18, 0, 1), 3, H=40, F=40, probs=False, bias=bias))


def test_dprobs_has_the_same_bits_every_run():
    inputs = Inputs(Case((33, 0, 20), 3, H=40, F=200, bias=True))
    assert torch.equal(run(inputs)[0]["dprobs"], run(inputs)[0]["dprobs"])


def test_infinite_weights_of_the_last_expert_do_not_reach_padding_rows():
    inputs = Inputs(Case((5, 0), padding=30, H=40, F=40, bias=True))
    inputs.fc2[1], inputs.bias2[1] = float("inf"), float("nan")
    got, _ = run(inputs)
    assert all((t[5:] == 0).all() for t in got.values())


def test_cost_counts_owned_rows_and_experts_with_rows():
    _, launch = run(Inputs(Case((5, 0, 12), padding=4, H=40, F=16, bias=True)))
    assert launch.flops == 2 * 17 * 40 * 16
    assert launch.bytes == 4 * (17 * (40 + 32 + 32 + 16) + 2 * 40 * (16 + 1)) + 17 * (4 + 4)
