"""`md.named`: names for the axes of an array inside plain JAX code."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's primitives are only partly typed)

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import meshdsl as md

MARKER = Primitive("md_named")
MARKER.def_impl(lambda x, *, words: x)
MARKER.def_abstract_eval(lambda x, *, words: x)
mlir.register_lowering(MARKER, lambda ctx, x, *, words: [x])
ad.deflinear2(MARKER, lambda ct, x, *, words: [MARKER.bind(ct, words=words)])


def _batch(xs: Any, axes: Any, *, words: tuple[str, ...]) -> Any:
    (axis,) = axes
    return MARKER.bind(xs[0], words=(*words[:axis], ".", *words[axis:])), axis


batching.primitive_batchers[MARKER] = _batch


def named(x: Any, names: str) -> Any:
    """`x` itself; where `md.from_jax` imports the function around it, its axes have these names.

    >>> import jax, jax.numpy as jnp
    >>> import meshdsl as md
    >>> def f(x, w):
    ...     return md.named(x @ w, "batch hidden") * 2
    >>> md.from_jax(f, jnp.ones((4, 3)), jnp.ones((3, 5))).specs
    (float32[batch=4 x_1=3], float32[x_1=3 hidden=5])

    One word an axis: a name, `.` for an axis without a name, or `a*b` for an axis that merges two dims. The identity
    for `jax.jit`, `jax.grad`, `jax.vmap` (whose axis has no name), `jax.lax.scan` and `jax.checkpoint`. Raises
    `ShapeError` if the number of words is not that of the axes.
    """
    words, shape = tuple(names.split()), jax.numpy.shape(x)
    if len(words) != len(shape):
        raise md.ShapeError(
            f"md.named has {len(words)} names ({names}) for an array of shape {shape}\n"
            "  give one word for each axis; '.' leaves an axis without a name"
        )
    return MARKER.bind(jax.numpy.asarray(x), words=words)
