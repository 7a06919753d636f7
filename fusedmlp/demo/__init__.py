"""The `demo` command: train a small mixture-of-experts language model with and without gradient fusion."""
