"""Tile sizes by architecture, pass and format."""
