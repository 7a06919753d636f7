"""The activation between 8-bit GEMMs, forward and backward: 16 bits in, 8 bits out."""
