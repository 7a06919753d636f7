"""`python -m fusedmlp doctor`: what this machine can run, why not more, and whether it computes the right numbers."""
