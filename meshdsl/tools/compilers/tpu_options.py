"""Options of the TPU compiler for programs with an overlap plan: each planned collective runs beside its products.

Without them, the compiler makes most kinds synchronous and may start a collective after the products beside it. The
machine files list the kinds that are asynchronous with these options, in texts of libtpu 0.0.42.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["plan_options"]

# The compiler starts a collective late once later kernels take as long as it. A plan has this decision already, so
# kernels count almost nothing: every start directly follows its fence.
LATENCIES = {f"xla_lhs_{kind}_fusion_latency_multiplier": "0.001" for kind in ("output", "loop")}
FUSED_GATHER = {"xla_enable_async_all_gather": "true", "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true"}


def _sparse_core(*kinds: str) -> dict[str, str]:
    """Collectives of these kinds on the sparse cores, small ones too."""
    enabled = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds}
    sizes = {f"xla_tpu_sparse_core_{kind.removeprefix('nd_')}_offload_min_size_in_bytes": "0" for kind in kinds}
    return enabled | sizes


# generation -> kind -> options
ASYNCHRONOUS = {
    **{name: {"all_gather": FUSED_GATHER} for name in ("v2", "v3", "v4")},
    "v5p": {
        "all_gather": FUSED_GATHER,
        "all_reduce": _sparse_core("all_reduce"),
        "reduce_scatter": _sparse_core("all_reduce", "reduce_scatter", "nd_reduce_scatter"),
    },
    "v6e": {
        "all_gather": _sparse_core("all_gather"),
        # sparse cores cannot cast: the compiler would let a sum in float32 give the bfloat16 that its reader casts to
        "all_reduce": _sparse_core("all_reduce") | {"xla_jf_bf16_propagation": "false"},
        "reduce_scatter": _sparse_core("reduce_scatter"),
    },
}


def plan_options(generation: str, started: Iterable[str]) -> dict[str, str]:
    """The options for a plan that starts collectives of these kinds, on a generation such as "v5e"; {} for none.

    >>> sorted(set(plan_options("v5e", ["all_to_all"])) - set(plan_options("v5e", ["all_gather"])))
    ['xla_tpu_enable_async_all_to_all']
    """
    started = set(started)
    options = dict(LATENCIES) if started else {}
    for kind in sorted(started):
        options |= ASYNCHRONOUS.get(generation, {}).get(kind, {})
    return options | ({"xla_tpu_enable_async_all_to_all": "true"} if "all_to_all" in started else {})
