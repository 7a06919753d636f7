"""What needs a GPU: checks of the kernels and times, in one command."""
