"""Decisions that need a machine model: which weight updates to shard, over which groups, and how to overlap
collectives.
"""
