"""The grouped GEMM of fc2, of grouped_linear and of input gradients."""
