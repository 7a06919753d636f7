"""Destinations of weight gradients: a file for each kind, and `choice.py`, which lists them."""
