"""Thin adapters to other libraries. Each imports its library only when it is itself imported."""
