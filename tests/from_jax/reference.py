"""Imported functions beside JAX: values and gradients, under layouts, by the NumPy simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

Layout = tuple[str, str]  # a mesh and a layout
ONE: Layout = ("", "")


def worst(got: Any, want: Any) -> float:
    """The largest error, relative to the largest number of its array; infinite where NaN or inf differ.

    An array that is thousands of times smaller than another, as the gradient of a bias that cancels, counts as that one
    does.
    """
    got, want = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (got, want))
    largest = 0.0
    least = 1e-3 * max(
        (float(np.max(np.abs(w[np.isfinite(w)]), initial=0)) for w in want if np.issubdtype(w.dtype, np.inexact)),
        default=0,
    )
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, g.dtype, w.shape, w.dtype)
        if not np.issubdtype(w.dtype, np.inexact) and w.dtype != jnp.bfloat16:
            largest = max(largest, 0.0 if np.array_equal(g, w) else np.inf)
            continue
        kind = np.complex128 if np.issubdtype(w.dtype, np.complexfloating) else np.float64
        g, w = g.astype(kind), w.astype(kind)
        if not np.array_equal(np.isfinite(g), np.isfinite(w)):
            return np.inf
        g, w = (np.where(np.isfinite(w), x, 0) for x in (g, w))
        largest = max(largest, float(np.max(np.abs(g - w), initial=0) / max(1e-6, least, np.max(np.abs(w), initial=0))))
    return largest


def simulated(m: md.Imported, f: Callable[..., Any], layout: Layout, args: Sequence[Any]) -> Any:
    """What a function of the imported one's tensors returns under a layout, as arrays."""
    program = md.compile(f, *layout).program(*m.specs)
    structure = jax.tree.structure(md.eval_shape(f, *m.specs))
    outs = md.simulate(program, *m.split(*args))
    return m.joined(list(map(jnp.asarray, outs)), [v.dims for v in program.outs], structure)


def check_values(
    f: Callable[..., Any],
    args: Sequence[Any],
    layouts: Sequence[Layout] = (ONE,),
    at_most: float = 1e-5,
    **options: Any,
) -> md.Imported:
    """The values of f, imported, beside JAX's, under each layout."""
    m = md.from_jax(f, *args, **options)
    want = f(*args)
    for layout in layouts:
        error = worst(simulated(m, m, layout, args), want)
        assert error <= at_most, f"{layout}: the error of the values is {error:.1e}"
    return m


def check_gradients(
    f: Callable[..., Any],
    args: Sequence[Any],
    layouts: Sequence[Layout] = (ONE,),
    at_most: float = 1e-5,
    **options: Any,
) -> md.Imported:
    """The loss f and its gradient by md.grad, beside JAX's, under each layout."""
    m = md.from_jax(f, *args, **options)
    want = jax.value_and_grad(f)(*args)
    for layout in layouts:
        error = worst(simulated(m, md.value_and_grad(m), layout, args), want)
        assert error <= at_most, f"{layout}: the error of loss and gradient is {error:.1e}"
    return m
