"""Sharded weight updates: which weights, in which groups of devices, and their buckets."""
