"""Inputs and results of the functions that become graphs: leaves of pytrees, carries, captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..ir import Graph, Type, Var
from ..ops.reshape import transpose
from ..trace import Tensor, as_tensor, flatten


def leaves_of(x: Any) -> tuple[list[Tensor], Any]:
    leaves, structure = flatten(x)
    return [as_tensor(leaf) for leaf in leaves], structure


def carried(after: Any, before: Sequence[Tensor], structure: Any, loop: str) -> list[Tensor]:
    """The carry that a loop's function returned, as tensors with the dim order of `before`.

    Raises `ShapeError` if structure, dims or dtype changed.
    """
    after_leaves, after_structure = flatten(after)
    leaves = [x if isinstance(x, Tensor) else as_tensor(x, k.dtype) for x, k in zip(after_leaves, before, strict=False)]
    same = after_structure == structure and all(
        set(a.dims) == set(b.dims) and a.dtype == b.dtype for a, b in zip(leaves, before, strict=True)
    )
    if not same:
        more = [x.type if isinstance(x, Tensor) else x for x in after_leaves[len(leaves) :]]
        raise ShapeError(
            f"the carry of {loop} changes\n"
            f"  it goes in as {[x.type for x in before]} and comes out as {[*(x.type for x in leaves), *more]}\n"
            "  keep its structure, dims and dtype the same, with md.cast or md.broadcast on the initial value"
        )
    return [transpose(x, k.dims) for x, k in zip(leaves, before, strict=True)]


def arrays_of(xs: Sequence[Tensor]) -> list[jax.Array]:
    """The arrays of concrete tensors, for a loop or a branch of JAX."""
    return [jnp.asarray(x.array, x.dtype) for x in xs]


def tensors_of(arrays: Sequence[jax.Array], types: Sequence[Type]) -> list[Tensor]:
    """Concrete tensors of arrays."""
    return [Tensor(t.dims, t.dtype, array=x) for x, t in zip(arrays, types, strict=True)]


def with_captures_of_both(a: Graph, of_a: Sequence[Tensor], b: Graph, of_b: Sequence[Tensor]) -> tuple[Graph, Graph]:
    """Two graphs whose first inputs are the tensors that a captured, and then those that b captured."""
    only_a, only_b = (tuple(Var(x.dims, x.dtype) for x in captures) for captures in (of_a, of_b))
    n = len(of_a)
    return a.replace(ins=(*a.ins[:n], *only_b, *a.ins[n:])), b.replace(ins=(*only_a, *b.ins))
