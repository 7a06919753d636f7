"""Costs of a layer on the host, with a CUDA driver that does nothing."""
