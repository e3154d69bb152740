"""Imported functions beside JAX: values and gradients, under layouts, by the NumPy simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from benchmarks.handwritten import twins

Layout = tuple[str, str]  # a mesh and a layout
ONE: Layout = ("", "")
TOKENS, TARGETS = twins.text()
LLAMA = (twins.llama, (twins.llama_params(), TOKENS, TARGETS))
GPT2 = (twins.gpt2, (twins.gpt2_params(), TOKENS, TARGETS))


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
    """The results, as arrays, of a function of the tensors of an imported one, run by the simulator under a layout."""
    program = md.compile(f, *layout).program(*m.specs)
    structure = jax.tree.structure(md.eval_shape(f, *m.specs))
    outs = [
        md.tensor(jnp.asarray(x), v.dims)
        for x, v in zip(md.simulate(program, *m.split(*args)), program.outs, strict=True)
    ]
    return m.arrays(jax.tree.unflatten(structure, outs))


def check_values(
    f: Callable[..., Any], args: Sequence[Any], *options: Any, wanted: Any = None, **names: Any
) -> md.Imported:
    """The values of f, imported, beside JAX's; `options` are layouts and the largest error.

    `wanted` are the values if they are known; else JAX compiles f.
    """
    m = md.from_jax(f, *args, **names)
    _check(m, m, args, jax.jit(f)(*args) if wanted is None else wanted, *options)
    return m


def check_gradients(
    f: Callable[..., Any], args: Sequence[Any], *options: Any, wanted: Any = None, **names: Any
) -> md.Imported:
    """The loss f and its gradient by md.grad, beside JAX's; `options` and `wanted` as for `check_values`."""
    m = md.from_jax(f, *args, **names)
    want = jax.jit(jax.value_and_grad(f))(*args) if wanted is None else wanted
    _check(m, md.value_and_grad(m), args, want, *options)
    return m


def _check(
    m: md.Imported,
    f: Callable[..., Any],
    args: Sequence[Any],
    want: Any,
    layouts: Sequence[Layout] = (ONE,),
    at_most: float = 1e-5,
) -> None:
    for layout in layouts:
        error = worst(simulated(m, f, layout, args), want)
        assert error <= at_most, f"{layout}: the error is {error:.1e}"
