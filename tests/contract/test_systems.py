"""Every system of docs/systems.md in every mode: right, against float64 autograd, or refused, changing nothing."""

import re

import pytest
import torch
from support import systems
from support.systems import MODES, SYSTEMS, Step

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per expert"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", [s for s in SYSTEMS if s.run is not None], ids=lambda s: s.name)
def test_system(system, mode, packed, make_layer, assert_close):
    step = Step(make_layer, mode, packed)
    if mode in system.refused:
        places = step.places()
        with pytest.raises((RuntimeError, TypeError, ValueError), match=re.escape(system.refused[mode])):
            system.run(step)
        if system.run not in (systems.clip_outside, systems.copied_with_queue):  # they ran a backward before
            assert all(torch.equal(p, b) for p, b in zip(places, step.before, strict=True))
        return
    handed = system.run(step)
    if step.queue is not None:
        step.queue.run()
    expected = step.layer.wgrads(*system.seeds)
    if not system.seeds:
        expected = [torch.zeros_like(w) for w in expected]
    if handed is None:
        expected = [b.double() + w for b, w in zip(step.before, expected, strict=True)]
        assert_close(step.places(), expected, dtype=step.layer.dtype)
    else:
        assert_close(handed, expected)
        assert all(torch.equal(p, b) for p, b in zip(step.places(), step.before, strict=True))
    if step.attached:  # and nothing is in .grad that somebody could add again
        assert not any(p.grad.count_nonzero() for p in step.params if p.grad is not None)


def test_the_document_holds_this_table():
    text = systems.PAGE.read_text()
    assert text == systems.page(text), "run: PYTHONPATH=.:tests python -m support.systems"
    assert text.count("| right |") > 50
