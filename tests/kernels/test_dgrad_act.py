"""The backward of fc2 and of the activation, by itself and on every path."""

import pytest
import torch
from cases import dgrad_act, experts
from cases.dgrad_act import check, run
from cases.experts import INTERPRETED
from cases.factory import Case, Inputs

from fusedmlp.kernels.dgrad_act import launch as dgrad_act_launch
from fusedmlp.kernels.operands import descriptors

LOADS = {"ragged": (3, 0, 17, 1, 40), "single rows": (1, 0, 1, 1), "empty": (0, 0, 0), "last only": (0, 0, 33)}
GPT_OSS = {"interleaved": True, "limit": 0.5, "alpha": 1.702, "linear_offset": 1.0}
ACTIVATIONS = {
    "gated": ("swiglu", {}),
    "clamped": ("geglu_tanh", {"limit": 0.3, "linear_offset": 1.0}),
    "interleaved": ("swiglu", GPT_OSS),
    "ungated": ("gelu", {}),
}


pytestmark = [pytest.mark.sparse, pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_activations_and_layouts_on_every_path(kind, layout, dtype, monkeypatch):
    name, options = ACTIVATIONS[kind]
    case = Case((3, 0, 17, 1), 21, H=80, F=48, activation=name, options=options, layout=layout, bias=True, dtype=dtype)
    by_tma = check(case)
    monkeypatch.setattr(descriptors, "fits", lambda array: False)
    by_pointer = check(case, best="pointer")
    monkeypatch.setattr(dgrad_act_launch, "vectors_fit", lambda *_: False)
    unaligned = check(case, best="unaligned")
    if INTERPRETED:
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
        monkeypatch.setattr(descriptors, "fits", lambda array: False)
    if path == "unaligned":
        monkeypatch.setattr(dgrad_act_launch, "vectors_fit", lambda *_: False)
    check(case, gathered=True, best=path)


@pytest.mark.parametrize(("H", "F"), [(1, 1), (33, 35), (8, 40)])
def test_gathered_rows_of_odd_sizes(H, F):
    check(Case((5, 18, 0, 1), 3, H=H, F=F, bias=True, dtype=torch.bfloat16), gathered=True, best="unaligned")


def test_an_index_may_be_of_int64_and_name_a_row_twice():
    inputs = Inputs(Case((3, 0, 2), 1, H=48, F=32, bias=True))
    inputs.dy, row_ids = experts.among_others(inputs.dy, 5, torch.int64)
    row_ids[4] = row_ids[0]
    twice, _ = run(inputs, row_ids=row_ids, best="gather")
    inputs.dy = inputs.dy[row_ids.clamp(max=inputs.dy.shape[0] - 1)]
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
    check(case, best="tma" if F == 40 else "unaligned")  # the others have rows that are no multiple of 16 bytes


@pytest.mark.parametrize("kind", ["gated", "interleaved", "ungated"])
def test_halves_of_rows_that_no_descriptor_can_tell_apart(kind, monkeypatch):
    # F = 4: rows are multiples of 16 bytes apart, but linear channels begin 8 bytes after gates, unless they alternate.
    # Rows of 4 channels also end after 8 bytes, inside the vectors that the kernel would load.
    def with_wider_rows(dh, a, *args, **kwargs):
        h_of_dy = [*args]
        wider, wide_dh, wide_h = (a.new_full((a.shape[0], 8), float("nan")) for _ in range(3))
        wide_h[:, : dh.shape[1]] = h_of_dy[1]
        h_of_dy[1] = wide_h[:, : dh.shape[1]]
        partial = dgrad_act_launch.grouped_dgrad_act_(wide_dh[:, : dh.shape[1]], wider[:, :4], *h_of_dy, **kwargs)
        assert wider[:, 4:].isnan().all()
        assert wide_dh[:, dh.shape[1] :].isnan().all()
        a.copy_(wider[:, :4])
        dh.copy_(wide_dh[:, : dh.shape[1]])
        return partial

    monkeypatch.setattr(dgrad_act, "grouped_dgrad_act_", with_wider_rows)
    name, options = ACTIVATIONS[kind]
    case = Case(
        (5, 18, 0, 1), 3, H=40, F=4, activation=name, options=options, layout="in_out", bias=True, dtype=torch.bfloat16
    )
    check(case, best="tma" if kind == "interleaved" else "unaligned")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_tiles_that_run_past_the_last_channel(kind):
    # They must not write what lies there: the linear channels of the row, or another row.
    name, options = ACTIVATIONS[kind]
    for F in (8, 24, 72):
        check(Case((3, 0, 17, 1), 4, H=48, F=F, activation=name, options=options, dtype=torch.bfloat16))


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
    cost = launch.cost_of((5, 0, 12))
    assert cost.flops == 2 * 17 * 40 * 16
    assert cost.bytes == 4 * (17 * (40 + 32 + 32 + 16) + 2 * 40 * (16 + 1)) + 17 * (4 + 4)
