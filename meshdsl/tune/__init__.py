"""Decisions that need a machine: which weight updates are sharded, over which groups, and with which buckets."""
