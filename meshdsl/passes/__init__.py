"""Passes on graphs: each takes a valid graph and returns a valid graph with the same results.

`pipelines` has those that make stages of layers.
"""
