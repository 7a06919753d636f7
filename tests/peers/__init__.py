"""Transformers' own tests, over tiny models of many architectures, with fusedmlp as the default experts.

`python -m peers` (`make peers`) runs them twice, the first time with Transformers' own `grouped_mm`, and compares test
by test. `make` unpacks them from the source distribution into `.transformers/`; no line of them is kept here. They are
imported as the package `upstream/`.
"""
