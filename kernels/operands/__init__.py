"""Tensors as kernels get them: those of all experts, TMA descriptors, alignment."""
