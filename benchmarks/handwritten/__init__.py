"""Baselines: steps written by hand with `jax.shard_map`, and the same steps partitioned by GSPMD."""
