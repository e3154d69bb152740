"""`md.verify_jax` on small programs of `jax.shard_map`: what JAX has in them, each right and with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshdsl as md

HERE = "test_verify_jax.py"
X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def mapped(
    f: Any, ins: Any, outs: Any, sizes: dict[str, int] | None = None, check: bool = False, **options: Any
) -> Any:
    sizes = sizes or {"rows": 4}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check, **options)


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def of_pallas(x: Any, right: bool) -> Any:
    y = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return lax.psum(jnp.sum(y * y), "rows" if right else ())


def of_groups(x: Any, right: bool) -> Any:
    half = lax.psum(x.sum(0), "rows", axis_index_groups=[[0, 1], [2, 3]])
    pairs = [[0, 2], [1, 3]] if right else [[0, 1], [2, 3]]
    return lax.psum(half, "rows", axis_index_groups=pairs)


def of_scan(x: Any, right: bool) -> Any:
    def step(total: Any, row: Any) -> Any:
        return total + (lax.psum(row, "rows") if right else row), row.sum()

    total, sums = lax.scan(step, jnp.zeros(8), x)
    return total, lax.psum(sums.sum(), "rows")


def of_while(x: Any, right: bool) -> Any:
    size = lax.psum(jnp.sum(x * x), "rows") if right else jnp.sum(x * x)
    return lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0] / 2, s[1] + 1), (size, 0.0))[1]


def of_cond(x: Any, right: bool) -> Any:
    """Only the first device has the sum: on the other ones it is left out, or what they have is added too."""
    first = lax.axis_index("rows") == 0
    whole = lax.psum(x.sum(0), "rows")
    own = lax.cond(first, lambda: whole, lambda: jnp.zeros_like(whole) if right else whole)
    return lax.psum(own, "rows")


def of_remat(x: Any, right: bool) -> Any:
    f = jax.checkpoint(lambda x: jnp.sum(jnp.tanh(x) ** 2))
    value, grad = jax.value_and_grad(f)(x)
    return lax.psum(value, "rows") if right else lax.pmean(value, "rows"), grad


@jax.custom_vjp
def enter(x: Any) -> Any:
    return x


enter.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "rows"),))


@jax.custom_vjp
def forgot(x: Any) -> Any:
    return x


forgot.defvjp(lambda x: (x, None), lambda _, ct: (ct,))


def of_custom_vjp(w: Any, x: Any, right: bool) -> Any:
    f = enter if right else forgot
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x) @ w)))(x)


def of_untiled(x: Any, right: bool) -> Any:
    n = lax.axis_size("rows")
    parts = x.reshape(x.shape[0], n, -1)
    sent = lax.all_to_all(parts, "rows", 1, 0) if right else jnp.moveaxis(parts, 1, 0)
    return sent.reshape(n * x.shape[0], -1)


def of_vmap(x: Any, right: bool) -> Any:
    return jax.vmap(lambda x: lax.psum(x @ x, "rows") if right else lax.pmax(x @ x, "rows"))(x.T)


def of_bfloat16(x: Any, right: bool) -> Any:
    y = (x.astype(jnp.bfloat16) * 3).sum(0)
    return lax.psum(y, "rows") if right else y


def of_sort(x: Any, right: bool) -> Any:
    whole = lax.all_gather(x, "rows", axis=0, tiled=True)
    return jnp.sort(whole if right else jnp.concatenate([x] * 4), 0)


def of_nested(x: Any, right: bool) -> Any:
    def inner(x: Any) -> Any:
        return lax.psum(jnp.sum(x), "cols" if right else ())

    inside = jax.shard_map(inner, in_specs=P("cols"), out_specs=P(), axis_names={"cols"}, check_vma=False)
    return lax.psum(inside(x), "rows")


ROWS, WHOLE = P("rows"), P()
REFERENCES = {"groups": lambda x: x.sum(0)}  # one device has no groups of two
CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "pallas": (of_pallas, ROWS, WHOLE),
    "groups": (of_groups, ROWS, WHOLE),
    "scan": (of_scan, ROWS, (WHOLE, WHOLE)),
    "while": (of_while, ROWS, WHOLE),
    "cond": (of_cond, ROWS, WHOLE),
    "remat": (of_remat, ROWS, (WHOLE, ROWS)),
    "untiled": (of_untiled, ROWS, P(None, "rows")),
    "vmap": (of_vmap, ROWS, WHOLE),
    "bfloat16": (of_bfloat16, ROWS, WHOLE),
    "sort": (of_sort, ROWS, WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_jax_has_inside_is_simulated_and_faults_of_it_are_found(name: str) -> None:
    f, ins, outs = CASES[name]
    reference = REFERENCES.get(name)
    assert (report := md.verify_jax(mapped(lambda x: f(x, True), ins, outs), X, reference=reference)).ok, report
    report = md.verify_jax(mapped(lambda x: f(x, False), ins, outs), X, reference=reference)
    assert report.findings and not report.ok, report
    assert any(at.file.endswith(HERE) for at in report.findings[0].lines), report


def test_rules_of_custom_vjp_are_followed() -> None:
    for right in (True, False):
        step = mapped(lambda w, x, right=right: of_custom_vjp(w, x, right), (P(None, "rows"), WHOLE), WHOLE)
        assert md.verify_jax(step, W, X).ok == right


def test_a_shard_map_inside_another_and_axes_that_stay_automatic() -> None:
    sizes = {"rows": 2, "cols": 2, "auto": 2}
    for right in (True, False):
        step = mapped(lambda x, right=right: of_nested(x, right), ROWS, WHOLE, sizes, axis_names={"rows"})
        assert md.verify_jax(step, X).ok == right
