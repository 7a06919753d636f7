"""Connects operators and the gradient contract to autograd; computes nothing itself."""
