"""`python -m fusedmlp memory`: bytes that a layer takes, with and without fusedmlp."""
