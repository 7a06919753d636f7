"""Chooses the function that computes experts by default: the environment variable `EXPERTS`.

With "fusedmlp", tests that ask for `grouped_mm` by name get ours as well: those that compare it with `eager`, and those
of expert parallelism. Calls of both functions are counted, since a run without calls proves nothing.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

from transformers import PreTrainedModel
from transformers.integrations import moe

from fusedmlp.integrations.transformers import register
from peers.compare import OURS, THEIRS

calls: Counter[str] = Counter()


def _counted(name):
    function = moe.ALL_EXPERTS_FUNCTIONS[name]

    @functools.wraps(function, updated=())
    def experts_forward(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    moe.ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return experts_forward


def use(default: str) -> None:
    """Make `default` the experts of models that name none; call once in a process."""
    register()
    ours, theirs = _counted(OURS), _counted(THEIRS)
    if default == THEIRS:
        moe.grouped_mm_experts_forward = theirs
        return
    moe.grouped_mm_experts_forward = ours
    moe.ExpertsInterface._global_mapping[THEIRS] = ours
    original = PreTrainedModel.get_correct_experts_implementation

    def get_correct_experts_implementation(self, requested_experts):
        found = original(self, requested_experts)
        return OURS if requested_experts is None and found == THEIRS else found

    PreTrainedModel.get_correct_experts_implementation = get_correct_experts_implementation


def chosen() -> str:
    """The value of `EXPERTS` in the environment."""
    return os.environ["EXPERTS"]
