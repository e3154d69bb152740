"""`md.jaxify`: a compiled function as a plain function of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import ShapeError, expect
from ..trace import flatten, tree
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

    `args` are specs or tensors of one signature. Where they have tensors, the function takes arrays of the same
    shapes, and returns arrays: global ones, in the program's shardings, `.in_shardings` and `.out_shardings`. It can be
    called inside `jax.jit`, and transformed by `jax.grad`, `jax.jvp`, `jax.vmap` and what is made of them, in any
    order: each derivative, and the function of all places of `jax.vmap`, is a program under the same layout.
    """
    stages, _ = expect("compiled", compiled, Compiled)._for(args)
    structure, traceable = stages.structure, compiled.array_function(stages)
    shapes = [tuple(d.size for d in v.dims) for v in stages.graph.ins]

    def function(*arrays: Any) -> Any:
        leaves, own = flatten(arrays)
        if own != structure:
            raise ShapeError(f"md.jaxify was called for {structure}, and the function with {own}")
        if [jax.numpy.shape(x) for x in leaves] != shapes:
            raise ShapeError(f"the function takes arrays of {shapes}, got {list(map(jax.numpy.shape, leaves))}")
        results = traceable(*leaves) if traced_by_jax(leaves) else run(stages, leaves)
        return tree.tree_unflatten(stages.result, results)

    function.in_shardings = tree.tree_unflatten(structure, stages.typed(stages.program.ins))  # pyright: ignore[reportFunctionMemberAccess]
    function.out_shardings = tree.tree_unflatten(stages.result, stages.results)  # pyright: ignore[reportFunctionMemberAccess]
    return function
