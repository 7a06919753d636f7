"""Benchmarks of layers and passes beside peers, by pytest-benchmark; on a GPU, too, if there is one."""
