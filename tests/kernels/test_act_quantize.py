"""The activation between 8-bit GEMMs: every byte of its copies against 16-bit passes that are quantized afterwards."""

import os
from dataclasses import replace

import pytest
import torch
from cases.act_quantize import (
    OUTPUTS,
    Case,
    by_torch,
    check,
    check_close,
    check_copies,
    check_dprobs,
    inputs,
    run,
    without,
)
from cases.factory import GATED, UNGATED
from cases.quantize import UNWRITTEN

from fusedmlp.recipe import BLOCKS

SMALL = {"counts": (19, 0, 1), "padding": 3}
LOADS = {
    "ragged": ((130, 0, 70, 1), 5),
    "single rows": ((1, 0, 1, 1), 0),
    "empty": ((0, 0, 0), 7),
    "whole tiles": ((128, 256), 0),
    "last only": ((0, 0, 33), 130),
}
GPT_OSS = {"interleaved": True, "limit": 1.5, "alpha": 1.702, "linear_offset": 1.0}
pytestmark = [pytest.mark.parametrize("recipe", BLOCKS)]
if not os.environ.get("EMULATE"):  # emulated, fp8_block has another kernel, which only this file checks byte by byte
    pytestmark.append(pytest.mark.sparse)


@pytest.mark.parametrize("load", [pytest.param(load, marks=[pytest.mark.slow] * (load != "ragged")) for load in LOADS])
def test_loads(recipe, load):
    counts, padding = LOADS[load]
    check(Case(recipe, counts=counts, padding=padding))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GATED, *UNGATED])
def test_activations(recipe, name):
    check(Case(recipe, **SMALL, activation=name))


@pytest.mark.slow
@pytest.mark.parametrize("probs", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"interleaved": True}, {"limit": 1.0}, {"limit": 1.0, "linear_offset": 1.0}, GPT_OSS],
    ids=lambda options: "-".join(options),
)
def test_options(recipe, options, probs):
    check(Case(recipe, counts=(130, 3), padding=2, options=options, probs=probs))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_halves_of_any_width(recipe, blocks):
    """Where 128 does not divide F, halves of dh meet inside of a chunk."""
    check(Case(recipe, **SMALL, F=blocks * BLOCKS[recipe]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "no linear part"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_channels_of_any_number(recipe, blocks, name):
    activation = "relu2" if name == "no linear part" else "swiglu"
    options = {"interleaved": True} if name == "interleaved" else {}
    check(Case(recipe, **SMALL, F=blocks * BLOCKS[recipe], activation=activation, options=options))


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("options", [{}, {"interleaved": True}], ids=["halves", "interleaved"])
def test_an_absent_output_is_left_alone(recipe, name, options):
    check(without(Case(recipe, **SMALL, options=options), name))


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [(), ("dh rows",), ("dh", "a"), ("dh tokens", "a tokens", "dh")], ids=str)
def test_some_outputs(recipe, outputs):
    check(Case(recipe, **SMALL, outputs=outputs))


@pytest.mark.slow
def test_rows_at_odd_addresses_and_strides(recipe):
    case = Case(recipe, **SMALL)
    given = inputs(case)
    for name, offset in (("h", 3), ("d", 1)):
        t = getattr(given, name)
        wide = torch.full((t.shape[0], t.shape[1] + 5), torch.nan, dtype=t.dtype)
        wide[:, offset : offset + t.shape[1]] = t
        setattr(given, name, wide[:, offset : offset + t.shape[1]])
    check(case, given)


def special(case):
    """Inputs with zeros of both signs, subnormal, large and infinite numbers, and NaN, in `h`, `d` and `probs`."""
    given = inputs(case)
    h, d, p = given.h, given.d, given.probs
    d[0], d[1], d[2, ::2], d[3] = 0.0, -0.0, -0.0, 1e-40
    d[4, 3], d[5, 1], d[6, 2], d[7] = 3e38, -3e38, torch.inf, torch.nan
    h[8], h[9], h[10, ::2], h[11] = 0.0, -0.0, 1e-40, 88.0
    h[12, 3], h[13, 5], h[14, 7], h[15] = torch.inf, -torch.inf, torch.nan, -200.0
    p[16], p[17], p[18] = 0.0, torch.nan, 1e-30
    return given


@pytest.mark.parametrize("name", ["swiglu", "silu"])
def test_special_values(recipe, name):
    """Copies are those of the kernel's own `a` and `dh`; these are infinite and NaN where PyTorch's are."""
    case = Case(recipe, counts=(19, 2), padding=2, activation=name)
    given = special(case)
    found, _ = run(case, given)
    check_copies(case, found, {of: found[of][:21] for of in ("a", "dh")})
    want = by_torch(case, given)
    for of in ("a", "dh"):
        got, exact = found[of][:21].float(), want[of].float()
        ordinary = exact.isfinite() & (exact.abs() > 1e-37)
        assert torch.equal(got.isnan(), exact.isnan()), of
        assert torch.equal(got.isinf(), exact.isinf()), of
        assert (got[~ordinary & exact.isfinite()].abs() < 1.1e-37).all(), of
        assert ((got - exact)[ordinary].abs() <= exact[ordinary].abs() * 2.0**-6).all(), of


@pytest.mark.slow
def test_an_expert_sees_nothing_of_others(recipe):
    """Rows of the next expert, and padding rows, change no byte of a tile."""
    case = Case(recipe, counts=(70, 40), padding=9)
    given = inputs(case)
    before, _ = run(case, given)
    given.h[70:], given.d[70:], given.probs[70:] = torch.inf, torch.inf, torch.nan
    after, _ = run(case, given)
    for name in ("a rows", "a tokens", "dh rows", "dh tokens"):
        one, other = (found[name].elements.view(torch.uint8) for found in (before, after))
        first = slice(0, 1 if name.endswith("tokens") else 70)
        assert torch.equal(one[first], other[first]), name
        assert not torch.equal(one, other), name
        scales = [found[name].scales.view(torch.uint8) for found in (before, after)]
        assert torch.equal(scales[0][0], scales[1][0]), name
        assert (before[name].scales[2:].view(torch.uint8) == UNWRITTEN).all(), name


@pytest.mark.slow
def test_dprobs_are_the_same_bits_every_run(recipe):
    case = Case(recipe, F=256)
    given = inputs(case)
    (one, _), (other, _) = run(case, given), run(case, given)
    check_dprobs(case, one, given)
    check_close(case, one, given)
    assert torch.equal(one["partial"], other["partial"])


@pytest.mark.parametrize("change", [{"counts": (0,), "padding": 0}, {"F": 0}], ids=str)
def test_nothing_to_quantize(recipe, change):
    case = replace(Case(recipe), **change)
    found, launches = run(case, inputs(case))
    assert launches == []
    assert found["partial"].numel() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("outputs", [OUTPUTS, ("dh rows", "a"), ("dh tokens",)], ids=str)
def test_cost_counts_owned_rows_and_whole_tiles(recipe, name, outputs):
    case = Case(recipe, activation=name, outputs=outputs)
    _, launches = run(case, inputs(case))
    forward, backward = (launch.cost_of(case.counts) for launch in launches)
    rows, tiles, halves = 201, 4, case.G // 128
    assert forward.bytes == rows * (2 * case.G + 4 + 128) + tiles * 512
    written = {
        "dh rows": halves * (rows * 128 + tiles * 512),
        "dh tokens": halves * (tiles * 128 * 128 + tiles * 512),
        "a tokens": tiles * 128 * 128 + tiles * 512,
        "dh": rows * case.G * 2,
        "a": rows * 128 * 2,
    }
    assert backward.bytes == rows * (2 * case.G + 2 * 128 + 4 + 4) + sum(written[each] for each in outputs)
    multiplied = {"dh rows": case.G, "dh tokens": case.G, "a tokens": 128, "dh": 0, "a": 0}
    assert forward.flops == rows * 128
    assert backward.flops == rows * sum(multiplied[each] for each in outputs)
