"""Inputs, float64 references, the tolerance rule and cases of every pass: shared by tests and `bench.gpu`."""
