"""`python -m fusedmlp bench --report DIR`: results of the benchmarks as one page with tables and pictures."""
