"""Launches of kernels: made, remembered, counted."""
