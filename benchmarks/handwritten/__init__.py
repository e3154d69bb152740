"""The baselines: steps written by hand with `jax.shard_map`, and the same steps left to the compiler."""
