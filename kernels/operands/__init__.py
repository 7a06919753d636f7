"""How kernels get tensors: experts' tensors, TMA descriptors, alignment."""
