"""Tools for people who work on fusedmlp, run from a clone of the repository.

`cpu/` has benchmarks beside peers, `gpu/` checks and timings that need a GPU, `host/` the host's cost of a layer,
`limits/` limits of the hardware and a model, `proof/` checks of compiled kernels, `report/` pages and figures from
`results/`, and `cases/` inputs and references that checks of the kernels share with tests.
"""
