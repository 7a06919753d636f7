"""FUSEDMLP_DEBUG=1: checks on the host of what is otherwise on the device alone."""

import logging

import pytest
import torch
from support import forked

from fusedmlp import GroupedLinear, GroupedMLP, MainGradBuffer, calls, debug, environment


@pytest.fixture
def lines(monkeypatch):
    """Logged lines, with the checks enabled for one test."""
    monkeypatch.setattr(debug, "dropped", {"ids": 0, "of": 0})
    monkeypatch.setattr(debug, "enabled", True)
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    handler.addFilter(lambda record: not record.msg.endswith("padding"))  # which has a test of its own
    debug.log.addHandler(handler)
    yield found
    debug.log.removeHandler(handler)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([3, -1], r"expected no negative count; got \[3, -1\]"), ([3, 4], r"expected a sum of at most 6 .*; got 7")],
)
def test_counts_on_the_device_are_checked(counts, message, lines, monkeypatch):
    monkeypatch.setattr(calls, "offsets", lambda *_: pytest.fail("the counts had not been read"))  # as on a GPU
    with pytest.raises(ValueError, match=f"tokens_per_expert: {message}"):
        GroupedMLP(2, 4, 6)(torch.randn(6, 4), torch.tensor(counts))


def test_rows_of_no_expert_are_logged(lines, caplog):
    """Counts of tokens in place of rows lose rows without an error."""
    for counts in ([1, 1], [3, 3]):
        GroupedMLP(2, 4, 6)(torch.randn(6, 4), counts)
    assert caplog.messages == ["tokens_per_expert: 4 of 6 rows belong to no expert: padding"]


def test_dropped_ids_are_counted(lines):
    module = GroupedMLP(2, 4, 6)
    for ids in ([[0, 1], [1, 2]], [[0, 1], [1, 0]], [[-1, 5], [1, 9]]):
        module.forward_tokens(torch.randn(2, 4), torch.tensor(ids), torch.rand(2, 2))
    what = "top_k_index: expected ids in [0, 2); got "
    assert lines == [
        what + "1 of 4 outside, which are dropped (so far 1 of 4)",
        what + "3 of 4 outside, which are dropped (so far 4 of 12)",
    ]


X = torch.randn(6, 4)


def run(module, x=X, counts=(2, 3), dy=None):
    """Row 5 is padding."""
    y = module(x.clone().requires_grad_(), list(counts), *([torch.ones(6)] if isinstance(module, GroupedMLP) else []))
    y.backward(torch.ones_like(y) if dy is None else dy)


@pytest.mark.parametrize("packed", [True, False])
def test_finite_gradients_and_padding_say_nothing(packed, lines):
    x, dy = X.clone(), torch.ones_like(X)
    x[5] = dy[5] = torch.nan
    for delay in (False, True):
        module = GroupedMLP(2, 4, 6, packed=packed, bias=True, delay_wgrad=delay)
        MainGradBuffer(module.parameters())
        run(module, x, dy=dy)
        module.backward_dw()
        linear = GroupedLinear(2, 4, 4, packed=packed, bias=True, delay_wgrad=delay)
        run(linear, x, dy=dy)
        linear.backward_dw()
    assert lines == []


def passes(lines):
    return [line.split(":")[0] for line in lines]


def test_a_gradient_from_behind_is_named(lines):
    x, dy = X.clone(), torch.ones(6, 4)
    x[5] = dy[1, 2] = torch.nan  # padding, which nothing reads, and a row
    run(GroupedMLP(2, 4, 6), x, dy=dy)
    assert all(line.endswith("(not finite before it: dy)") for line in lines)
    # act is kept for delayed gradients alone, so dgrad of fc2 shows in what follows.
    assert passes(lines) == ["the gradient of the probabilities", "dgrad of fc1", "wgrad of fc2", "wgrad of fc1"]
    assert "wgrad of fc2: expected finite gradients; got 6 of 48 values" in lines[2]


def test_an_earlier_gradient_is_named(lines):
    module = GroupedMLP(2, 4, 6)
    MainGradBuffer(module.parameters())
    run(module)
    module.fc2.weight.main_grad[0, 0, 0] = torch.inf
    run(module)
    assert lines == [
        "wgrad of fc2: expected finite gradients; got 1 of 48 values that are not "
        "(not finite before it: the earlier gradient of fc2)"
    ]


def test_an_overflow_of_one_pass_is_named(lines):
    module = GroupedMLP(2, 4, 6, dtype=torch.float16, activation="relu")
    with torch.no_grad():
        module.fc1.weight.fill_(100)
        module.fc2.weight.fill_(1e-3)
    run(module, torch.full((6, 4), 100.0, dtype=torch.float16), dy=torch.full((6, 4), 300.0, dtype=torch.float16))
    assert passes(lines)[-1] == "wgrad of fc2"
    assert lines[-1].endswith("(all that it reads is finite)")


@pytest.mark.parametrize("buffer", [True, False])
def test_delayed_gradients(buffer, lines):
    module = GroupedMLP(2, 4, 6, delay_wgrad=True)
    if buffer:
        MainGradBuffer(module.parameters())
    dy = torch.ones(6, 4)
    dy[1, 2] = torch.nan
    run(module, dy=dy)
    assert passes(lines)[0] == "dgrad of fc2, through the activation"
    del lines[:]
    module.backward_dw()
    assert passes(lines) == ["delayed wgrad of fc2_weight", "delayed wgrad of fc1_weight"]
    assert lines[0].endswith("(not finite before it: dy)")


def test_linear(lines):
    dy = torch.ones(6, 4)
    dy[1, 2] = torch.nan
    run(GroupedLinear(2, 4, 4), dy=dy)
    assert passes(lines) == ["dgrad of grouped_linear", "wgrad of grouped_linear"]


@pytest.mark.slow
def test_the_switch_enables_the_checks():
    code = """import fusedmlp, torch
fusedmlp.GroupedMLP(1, 2, 2).forward_tokens(torch.ones(1, 2), torch.tensor([[7]]), torch.ones(1, 1))"""
    checked, unchecked = (forked.run("-c", code, FUSEDMLP_DEBUG=value) for value in ("1", "on"))
    assert checked.returncode == unchecked.returncode == 0, checked.stderr + unchecked.stderr
    assert "1 of 1 outside" in checked.stderr
    assert "FUSEDMLP_DEBUG: expected 0 or 1; got 'on'" in unchecked.stderr
    assert "outside" not in unchecked.stderr


def test_an_unknown_switch_warns(monkeypatch, recwarn):
    environment.warn_of_unknown()
    assert not recwarn
    monkeypatch.setenv("FUSEDMLP_DEBGU", "1")
    with pytest.warns(UserWarning, match="FUSEDMLP_DEBGU: .* unknown one; did you mean FUSEDMLP_DEBUG?"):
        environment.warn_of_unknown()
