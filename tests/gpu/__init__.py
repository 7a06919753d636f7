"""Checks of whole layers and of passes on a real GPU, which `python -m bench.gpu` runs."""
