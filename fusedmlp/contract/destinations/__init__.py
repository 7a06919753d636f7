"""Where weight gradients go: a file for each kind of destination, and `choice.py`, which lists them."""
