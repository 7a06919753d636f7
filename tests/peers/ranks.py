"""Imports of the server that forks ranks, made once: Transformers, its tests, and the choice of experts."""

import transformers

from peers import default_experts

transformers.logging.set_verbosity_error()
default_experts.use(default_experts.chosen())

import peers.cases  # noqa: E402, F401  (models, and the tests' modules)
