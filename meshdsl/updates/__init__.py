"""Sharded weight updates whole: analysis, decision, rewriting, groups of devices, and buckets."""
