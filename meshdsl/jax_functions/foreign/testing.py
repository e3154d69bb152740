"""For tests of sharded JAX programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report import JaxReport
from .verify import verify_jax

__all__ = ["assert_sharded_right"]


def assert_sharded_right(f: Callable[..., Any], *args: Any, **options: Any) -> JaxReport:
    """Fail unless a function with `jax.shard_map` computes what one device computes; returns the report.

    Arguments and options are those of `md.verify_jax`. Raises `AssertionError` with the printed report for a finding,
    and for a result that nothing decides.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import meshdsl as md
    >>> def total(x):
    ...     return jax.lax.psum(jnp.sum(x), "rows")
    >>> mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    >>> step = jax.shard_map(total, mesh=mesh, in_specs=P("rows"), out_specs=P())
    >>> md.testing.assert_sharded_right(step, jax.ShapeDtypeStruct((8,), "float32")).bytes
    4
    """
    report = verify_jax(f, *args, **options)
    if not report.ok:
        raise AssertionError(str(report))
    return report
