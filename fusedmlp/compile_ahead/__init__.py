"""`python -m fusedmlp compile`: a layer's kernels, compiled into Triton's cache for a GPU that need not be there."""
