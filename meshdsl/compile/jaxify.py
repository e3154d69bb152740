"""`md.jaxify`: a compiled function as a plain function of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import ShapeError, expect
from ..trace import flatten, tensor, tree
from . import Compiled
from .inside_jax import run, traced_by_jax


def jaxify(compiled: Compiled, *args: Any) -> Callable[..., Any]:
    """A compiled function as a plain function of `jax.Array`s, for a training loop of your own.

    >>> import jax, jax.numpy as jnp
    >>> import meshdsl as md
    >>> f = md.jaxify(md.compile(lambda x: md.sum(x * x), "rows:4", "io:rows"), md.spec("io:8"))
    >>> float(f(jnp.arange(8.0))), jax.grad(f)(jnp.arange(8.0)).tolist()
    (140.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0])
    >>> tuple(f.in_shardings[0].spec), tuple(f.out_shardings.spec)
    (('rows',), ())

    `args` are specs or tensors of one signature. They may be left out for the function of a `md.from_jax` and its
    gradient, which then take and return arrays in the axes of the imported function. Where `args` have tensors, the
    function takes arrays of the same shapes, and returns arrays: global ones, in the program's shardings,
    `.in_shardings` and `.out_shardings`. It can be called inside `jax.jit`, and transformed by `jax.grad`, `jax.jvp`,
    `jax.vmap` and what is made of them, in any order: each derivative, and the function of all places of `jax.vmap`,
    is a program under the same layout.
    """
    imported = _imported(expect("compiled", compiled, Compiled).function)
    stages, _ = compiled._for(args or (imported.specs if imported is not None else ()))
    structure, traceable = stages.structure, compiled.array_function(stages)
    shapes = [tuple(d.size for d in v.dims) for v in stages.graph.ins]

    def called(leaves: list[Any]) -> list[Any]:
        return traceable(*leaves) if traced_by_jax(leaves) else run(stages, leaves)

    if imported is not None:
        outs = [v.dims for v in stages.graph.outs]

        def of_arrays(*arrays: Any) -> Any:
            results = map(tensor, called(imported.split(*arrays)), outs)
            return imported.arrays(tree.tree_unflatten(stages.result, results))

        return of_arrays

    def function(*arrays: Any) -> Any:
        leaves, own = flatten(arrays)
        if own != structure:
            raise ShapeError(f"md.jaxify was called for {structure}, and the function with {own}")
        if [jax.numpy.shape(x) for x in leaves] != shapes:
            raise ShapeError(f"the function takes arrays of {shapes}, got {list(map(jax.numpy.shape, leaves))}")
        return tree.tree_unflatten(stages.result, called(leaves))

    function.in_shardings = tree.tree_unflatten(structure, stages.typed(stages.program.ins))  # pyright: ignore[reportFunctionMemberAccess]
    function.out_shardings = tree.tree_unflatten(stages.result, stages.results)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def _imported(f: Any) -> Any:
    """The `md.from_jax` that a function is, or was made of by `md.grad` and the like; None if there is none."""
    while f is not None and not hasattr(type(f), "names_to_paste"):
        f = getattr(f, "__wrapped__", None)
    return f
