"""Right numbers, of tests, too: a reference in plain PyTorch, and the errors that the tolerance rule allows."""
