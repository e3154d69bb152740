"""Decisions that need a machine model: how to shard weight updates, and how to overlap collectives with computation."""
