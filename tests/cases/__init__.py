"""Inputs, float64 references and cases of every pass, for tests and for checks on a GPU."""
