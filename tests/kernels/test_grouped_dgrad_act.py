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
from fusedmlp.triton_impl import _options

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


def run(inputs, where="packed", *, best="tma"):
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
        )
    (launch,) = log
    assert launch.path == experts.expected_path("dgrad_act", case.dtype, DEVICE, best, (case.H, case.F))
    results = {"dh": dh, "a": a} if dprobs is None else {"dh": dh, "a": a, "dprobs": dprobs}
    return {name: t.cpu() for name, t in results.items()}, launch


def check(case, where="packed", *, best="tma"):
    inputs = Inputs(case)
    got, _ = run(inputs, where, best=best)
    owned = sum(case.counts)
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
def test_loads(load):
    check(Case(LOADS[load], padding=20, H=40, F=72, bias=True))


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
