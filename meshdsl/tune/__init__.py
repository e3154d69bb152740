"""Decisions that need a cost model: sharding of weight updates, overlap of collectives, products before loops."""
