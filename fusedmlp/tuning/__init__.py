"""`python -m fusedmlp tune`: a search for faster tiles on this GPU, which `FUSEDMLP_TUNED=1` uses."""
