"""The table of states: public calls take every transition in it, and nothing else changes what `main_grad` holds."""

import ast
from pathlib import Path

import pytest
import torch

import fusedmlp
from fusedmlp.contract import states
from fusedmlp.contract.parameter_state import ParameterState, state_of
from fusedmlp.contract.states import GRADIENT, LENT, STALE, STEPPED, TRANSITIONS, ZEROS, Event, Holds
from fusedmlp.operators import ops

CONTRACT = Path(states.__file__).parent
TABLE = {(before, event, after) for event, arrows in TRANSITIONS.items() for before, after in arrows.items()}


class Life:
    """One weight in a buffer, in a buffer with an optimizer, or with attributes alone."""

    def __init__(self, make_layer, owner):
        self.layer, self.owner = make_layer("linear"), owner
        (self.param,) = self.layer.params
        self.optimizer, self.buffer = torch.optim.SGD([self.param], lr=0.0), None
        self.layer(self.layer.batch(1)[0])  # a fused layer uses it
        if owner == "attributes":
            self.layer.attach(False)
        else:
            optimizer = self.optimizer if owner == "optimizer" else None
            self.buffer = fusedmlp.MainGradBuffer([self.param], optimizer=optimizer)
        self.layer(self.layer.batch(1)[0])  # plain gradients are caught from now on

    def plain(self):
        (3 * self.param).sum().backward()

    def step(self):
        with self.buffer.as_grad():
            self.optimizer.step()

    def reach(self, holds):
        """Bring the weight to a state; with an optimizer, its `.grad` is None then."""
        if holds in (STEPPED, GRADIENT) and self.owner != "attributes":
            self.layer.backward(1)
        if holds is STEPPED:
            self.step()
        elif holds is LENT:
            with self.buffer.as_grad():
                pass
        elif holds is STALE:
            self.buffer.zero_()
        if self.owner == "optimizer":
            self.optimizer.zero_grad()
        assert state_of(self.param).holds is holds

    def attach(self):
        del self.param.main_grad
        fusedmlp.MainGradBuffer([self.param])

    def catch(self):
        self.plain()
        self.buffer.norm()  # finds it in .grad, unless the hook has caught it

    def fail(self, monkeypatch, zeroed=False):
        def fails(*_):
            if zeroed:  # as another thread may do
                self.buffer.zero_()
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(ops, "grouped_wgrad_", fails)
            with pytest.raises(torch.OutOfMemoryError):
                self.layer.backward(1)

    def step_by_hand(self):
        self.param.grad = torch.ones_like(self.param)
        self.optimizer.step()


def lives():
    """Owner, state, and the call that is an event for it."""
    for holds in Holds:
        for name in ("detach", "zero_", "norm"):
            yield "buffer", holds, lambda life, _, name=name: getattr(life.buffer, name)()
        yield "buffer", holds, lambda life, _: life.layer.backward(1)
        yield "buffer", holds, lambda life, _: life.catch()
        yield "buffer", holds, lambda life, _: life.step()
        yield "buffer", holds, lambda life, _: life.attach()
    yield "attributes", GRADIENT, lambda life, _: life.attach()
    for holds in (GRADIENT, ZEROS, STEPPED, STALE):
        yield "optimizer", holds, lambda life, _: life.buffer.norm()
        yield "optimizer", holds, lambda life, _: life.step_by_hand()
        yield "optimizer", holds, lambda life, _: life.layer.backward(1)
    yield "buffer", STALE, lambda life, monkeypatch: life.fail(monkeypatch)
    yield "buffer", STALE, lambda life, monkeypatch: life.fail(monkeypatch, zeroed=True)


def test_public_calls_take_every_transition_of_the_table(make_layer, monkeypatch):
    taken, on = set(), ParameterState.on

    def recorded(state, event):
        before = state.holds
        on(state, event)
        taken.add((before, event, state.holds))

    monkeypatch.setattr(ParameterState, "on", recorded)
    for owner, holds, act in lives():
        life = Life(make_layer, owner)
        life.reach(holds)
        act(life, monkeypatch)
    assert taken - TABLE == set()
    assert TABLE - taken == set()


def test_nothing_but_the_table_changes_the_state():
    """`holds` is assigned in the constructor and by `on` alone."""
    found = [
        path.name
        for path in CONTRACT.parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "holds" and isinstance(node.ctx, ast.Store)
    ]
    assert found == ["parameter_state.py"] * 2
    assert set(TRANSITIONS) == set(Event)


def test_an_unknown_transition_raises():
    state = state_of(torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(KeyError):
        state.on(Event.RETURN)
