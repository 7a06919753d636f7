"""Quantization to 8 bits: one read of a matrix, copies for products over its columns and over its rows."""
