"""Tools of those who work on fusedmlp, run from a clone of the repository.

`cpu/` has benchmarks beside peers, `gpu/` what needs a GPU, `host/` what a layer costs the host, `limits/` what
hardware allows, `proof/` what is known of compiled kernels, `report/` pages and figures from `results/`, and `cases/`
what checks of the kernels have in common with tests.
"""
