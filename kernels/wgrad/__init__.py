"""The weight gradient, accumulated into main_grad."""
