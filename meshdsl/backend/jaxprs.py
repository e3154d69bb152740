"""A jaxpr as one equation of a program inside `jax.shard_map`.

The jaxpr is traced outside the mesh, so the types in it do not vary over mesh axes: a loop may start from zeros, and a
kernel may declare its result without axes. The equation around it has the types that vary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from .varying import varying_axes

# Primitives that only call a function.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "remat2", "checkpoint",
}  # fmt: skip


def inner(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation of a jaxpr."""
    parts = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [part for part in parts if isinstance(part, ClosedJaxpr | Jaxpr)]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants; JAX 0.12 has one class for jaxprs with and without."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def call_on_blocks(jaxpr: Any, xs: Sequence[Any], varying: tuple[tuple[str, ...], ...]) -> list[Any]:
    """The results of a jaxpr on `xs`, the blocks of one device inside a `shard_map`.

    The jaxpr was traced on arrays of the shapes of `xs`, outside the mesh. `varying` has, for each result, the mesh
    axes along which devices may have different blocks.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jaxpr_as_fun(jaxpr)(*xs)
    return _blocks.bind(*xs, jaxpr=jaxpr, varying=varying)


def call_outside(f: Callable[..., Any], xs: Sequence[Any]) -> list[Any]:
    """The results of f(*xs), traced outside the mesh: kernels of JAX do not say over which axes their results vary.

    They vary over every axis that an operand varies over.
    """
    axes = varying_axes(*xs)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
    return call_on_blocks(jaxpr, xs, (axes,) * len(jaxpr.out_avals))


_blocks = Primitive("meshdsl_blocks")
_blocks.multiple_results = True


@_blocks.def_abstract_eval
def _blocks_types(*xs: Any, jaxpr: Any, varying: tuple[tuple[str, ...], ...]) -> list[Any]:
    like = xs[0]

    def on_mesh(aval: Any, axes: tuple[str, ...]) -> Any:
        sharding = like.sharding.update(spec=PartitionSpec(*[None] * aval.ndim))
        kind = like.mat.update(varying=frozenset(axes))
        return like.update(
            shape=aval.shape, dtype=aval.dtype, weak_type=False, sharding=sharding, manual_axis_type=kind
        )

    return list(map(on_mesh, jaxpr.out_avals, varying))


def _blocks_lowering(ctx: Any, *xs: Any, jaxpr: Any, varying: Any) -> Any:
    inside = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(inside, *xs)


def _blocks_on_cpu(ctx: Any, *xs: Any, jaxpr: Any, varying: Any) -> Any:
    if "fft[" not in str(jaxpr):
        return _blocks_lowering(ctx, *xs, jaxpr=jaxpr, varying=varying)
    inside = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    run = lambda *xs: _row_major_ffts(jaxpr.jaxpr, jaxpr.consts, xs)  # noqa: E731 - lower_fun takes a function
    return mlir.lower_fun(run, multiple_results=True)(inside, *xs)


def _row_major_ffts(jaxpr: Any, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr with every FFT in row-major order.

    XLA for CPU chooses another order beside a gather or scatter, and then fails: its FFT takes no other.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *xs], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        values, bodies = [read(v) for v in eqn.invars], inner(eqn)
        if eqn.primitive.name == "fft":
            results = [_row_major(eqn.primitive.bind(_row_major(values[0]), **eqn.params))]
        elif eqn.primitive.name in CALLS and bodies:
            results = _row_major_ffts(*opened(bodies[0]), values)
        else:
            results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _row_major(x: Any) -> Any:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


mlir.register_lowering(_blocks, _blocks_lowering)
mlir.register_lowering(_blocks, _blocks_on_cpu, platform="cpu")


@functools.lru_cache(maxsize=256)
def compiled(jaxpr: Any) -> Callable[..., list[Any]]:
    """The jaxpr as a function of arrays, compiled once."""
    return jax.jit(jaxpr_as_fun(jaxpr))
