"""Code that the Gluon kernels share: partitions of warps, the ring of stages, Hopper, Blackwell."""
