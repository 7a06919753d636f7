"""The order of rows by expert, the tiles of a load, and the sum over the experts of a token."""
