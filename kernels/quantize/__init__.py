"""Quantization to 8 bits: one read of a matrix or of weights, copies for products over columns and over rows."""
