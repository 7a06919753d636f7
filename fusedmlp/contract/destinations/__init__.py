"""Destinations of weight gradients: a file for each kind; `route.py` lists them."""
