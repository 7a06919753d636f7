"""Inputs, float64 references, the tolerance rule and cases of every pass: what tests and `bench.gpu` have in common."""
