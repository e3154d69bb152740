"""Compile JAX's own TPU attention (splash) and its gradient: python -m benchmarks.shipped_attention v5e:2x2 4096 128

`benchmarks.attention_kernels --shipped` runs it for one chip and reads what the compiler scheduled: 16 heads under a
causal mask, in blocks of 512 x 512, with the fused backward pass: the other one has two kernels, of 1,497 and 1,898
bundles.
"""

from __future__ import annotations

import os
import sys

from meshdsl.tools.compilers.aot import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # libtpu reads it when jax is imported

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import splash_attention as splash

HEADS, BLOCK = 16, 512


def main() -> int:
    topology, length, head = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sizes = splash.BlockSizes(
        block_q=BLOCK, block_kv=BLOCK, block_q_dkv=BLOCK, block_kv_dkv=BLOCK, use_fused_bwd_kernel=True
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length)) for _ in range(HEADS)])
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    x = jax.ShapeDtypeStruct((HEADS, length, head), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(lambda q, k, v, ct: jax.vjp(attend, q, k, v)[1](ct)).lower(x, x, x, x).compile()
    return 0


if __name__ == "__main__":
    sys.exit(main())
