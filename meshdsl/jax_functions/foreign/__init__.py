"""Sharded JAX programs that nobody wrote in meshdsl: is the result that of one device, and what is sent?

`trace` traces a function that contains `jax.shard_map`, on its own mesh and on others. `simulate` runs the jaxpr on the
blocks of all devices, `collectives` moves them. `explain` says of a value what its blocks are of a value that one
device computes, and `findings` goes back from a wrong result to where that ends. `static` follows shardings without
computing, from one of `states` to the next. `price` lists what is sent, and `verify` has `md.verify_jax`.
"""

from .report import JaxReport
from .verify import verify_jax

__all__ = ["JaxReport", "verify_jax"]
