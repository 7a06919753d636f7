"""Transformers' own tests, over tiny models of many architectures, with fusedmlp as the default experts.

`python -m peers` (`make peers`) runs them twice, the second time with Transformers' own `grouped_mm`, and compares test
by test. The tests are those of the source distribution, which `make` unpacks into `.transformers/`; no line of them is
kept here. `upstream/` is the package that they are imported as.
"""
