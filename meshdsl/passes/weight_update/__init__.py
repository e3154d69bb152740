"""Find the update of every weight in a graph and shard it (Xu et al., 2020)."""
