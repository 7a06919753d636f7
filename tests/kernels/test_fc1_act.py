"""fc1 with its activation, by itself and on every path: where gates end and linear channels begin, gathered rows."""

import pytest
import torch
from cases import experts, fc1_act
from cases.experts import DEVICE, INTERPRETED
from cases.factory import Case, Inputs
from cases.fc1_act import check, run

from fusedmlp.kernels.fc1_act import launch as fc1_act_launch
from fusedmlp.kernels.operands import descriptors

pytestmark = pytest.mark.sparse
LOADS = {"ragged": (3, 0, 17, 1, 40), "single rows": (1, 0, 1, 1), "empty": (0, 0, 0), "last only": (0, 0, 33)}
GPT_OSS = {"interleaved": True, "limit": 0.5, "alpha": 1.702, "linear_offset": 1.0}
ACTIVATIONS = {
    "gated": ("swiglu", {}),
    "clamped": ("geglu_tanh", {"limit": 0.3, "linear_offset": 1.0}),
    "interleaved": ("swiglu", GPT_OSS),
    "ungated": ("gelu", {}),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_activations_and_layouts_on_every_path(kind, layout, dtype, monkeypatch):
    # F is no multiple of a tile, so that tiles of gates run into the linear channels.
    name, options = ACTIVATIONS[kind]
    case = Case((3, 0, 17, 1), 21, H=80, F=48, activation=name, options=options, layout=layout, bias=True, dtype=dtype)
    by_tma = check(case)
    monkeypatch.setattr(descriptors, "fits", lambda array: False)
    by_pointer = check(case, best="pointer")
    monkeypatch.setattr(fc1_act_launch, "vectors_fit", lambda *_: False)
    unaligned = check(case, best="unaligned")
    if INTERPRETED:
        assert all(torch.equal(by_tma[name], by_pointer[name]) for name in by_tma)
        assert all(torch.equal(by_tma[name], unaligned[name]) for name in by_tma)


@pytest.mark.parametrize("load", LOADS)
def test_loads(load):
    check(Case(LOADS[load], padding=20, H=40, F=24, bias=True))


@pytest.mark.parametrize("where", experts.PLACES)
@pytest.mark.parametrize("kind", ["gated", "interleaved"])
def test_places_of_weights_and_biases(where, kind):
    name, options = ACTIVATIONS[kind]
    case = Case((3, 0, 17), 5, H=48, F=32, activation=name, options=options, bias=True, dtype=torch.bfloat16)
    check(case, where, best=experts.PLACES[where])


@pytest.mark.parametrize(("H", "F"), [(1, 1), (7, 5), (33, 35), (8, 4), (8, 40)])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_odd_sizes(H, F, kind):
    name, options = ACTIVATIONS[kind]
    case = Case((5, 18, 0, 1), 3, H=H, F=F, activation=name, options=options, bias=True, dtype=torch.bfloat16)
    check(case, best="tma" if F == 40 else "unaligned")  # the others have rows that are no multiple of 16 bytes


def test_halves_of_rows_that_no_descriptor_can_tell_apart(monkeypatch):
    # F = 4: rows are multiples of 16 bytes apart, but linear channels begin 8 bytes after gates.
    def with_wider_rows(h, a, *args, **kwargs):
        wider = a.new_empty(a.shape[0], 8)
        fc1_act_launch.grouped_fc1_act_(h, wider[:, :4], *args, **kwargs)
        a.copy_(wider[:, :4])

    monkeypatch.setattr(fc1_act, "grouped_fc1_act_", with_wider_rows)
    check(Case((5, 18, 0, 1), 3, H=40, F=4, dtype=torch.bfloat16), best="unaligned")


def test_columns_of_in_out_weights_that_are_no_vectors():
    # Descriptors could take whole rows, but gates and linear channels are loaded apart, by pointers.
    case = Case((5, 18, 0, 1), 3, H=48, F=40, layout="in_out", dtype=torch.bfloat16)
    check(case, best="unaligned")


def test_without_probs_or_bias():
    check(Case((5, 18, 0, 1), 3, H=40, F=40, probs=False))


@pytest.mark.parametrize("kind", ["gated", "interleaved"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("path", ["gather", "pointer", "unaligned"])
def test_rows_gathered_by_index(kind, index_dtype, path, monkeypatch):
    name, options = ACTIVATIONS[kind]
    inputs = Inputs(Case((3, 0, 17, 1), 6, H=48, F=32, activation=name, options=options, bias=True))
    permuted, _ = run(inputs)
    owned = 21
    order = torch.randperm(owned, generator=torch.Generator().manual_seed(1))
    tokens = torch.empty(owned, 48)
    tokens[order] = inputs.x[:owned]
    inputs.x = tokens
    row_ids = torch.cat([order, torch.full((6,), 10**6)]).to(index_dtype)  # those of padding rows are not used
    if path != "gather":
        monkeypatch.setattr(descriptors, "fits", lambda array: False)
    if path == "unaligned":
        monkeypatch.setattr(fc1_act_launch, "vectors_fit", lambda *_: False)
    gathered, _ = run(inputs, row_ids=row_ids, best=path)
    for key, tensor in permuted.items():
        torch.testing.assert_close(gathered[key], tensor)


def test_tokens_that_no_vector_can_be_loaded_from_are_gathered_element_by_element():
    inputs = Inputs(Case((3, 0, 17), 0, H=48, F=32, dtype=torch.bfloat16))
    permuted, _ = run(inputs)
    shifted = torch.cat([inputs.x.new_zeros(1), inputs.x.flatten()])[1:].view_as(inputs.x)
    inputs.x = shifted if DEVICE == "cpu" else shifted.to(DEVICE)
    gathered, _ = run(inputs, row_ids=torch.arange(20), best="unaligned")
    torch.testing.assert_close(gathered, permuted)


def test_infinite_weights_of_the_last_expert_do_not_reach_padding_rows():
    inputs = Inputs(Case((5, 0), padding=30, H=40, F=40, bias=True))
    inputs.fc1[1], inputs.bias1[1] = float("inf"), float("nan")
    got, _ = run(inputs)
    assert all((t[5:] == 0).all() for t in got.values())


def test_cost_counts_owned_rows_and_experts_with_rows():
    _, launch = run(Inputs(Case((5, 0, 12), padding=4, H=40, F=16, bias=True)))
    cost = launch.cost_of((5, 0, 12))
    assert cost.flops == 2 * 17 * 40 * 32
    assert cost.bytes == 4 * (17 * (40 + 32 + 16) + 2 * 32 * (40 + 1)) + 4 * 17
