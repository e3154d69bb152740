"""Passes: a pass takes a valid graph and returns a valid graph with the same results."""
