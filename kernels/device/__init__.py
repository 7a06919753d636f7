"""Device functions that several passes call: tiles, activations, the order of tiles."""
