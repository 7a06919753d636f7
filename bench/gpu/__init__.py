"""Checks and timings of the kernels that need a GPU, in one command."""
