"""`md.local` with a JAX function: its results by `jax.eval_shape`, their dims, and the first check."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..dims import Dim, DimsLike, Shape, pick, show, split_items
from ..errors import ShapeError
from ..trace import Tensor, bind, tree
from .blocks import JAX_BLOCKS
from .function import JaxFunction


def apply(
    f: Callable[..., Any],
    tensors: Sequence[Tensor],
    out: Any,
    declared: tuple[Sequence[str], Sequence[str]],
    unchecked: bool,
    cost: float | None,
) -> Any:
    """The results of a JAX function on blocks; `declared` are the dims that may be split and those that it sums."""
    types = tuple(x.type for x in tensors)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors]
    structure, avals = _result(f, structs)
    shapes = _shapes(out, structure, avals, tensors)
    split, contract = map(tuple, declared)
    name = getattr(f, "__name__", type(f).__name__)
    flat: Callable[..., Any] = lambda *xs: tree.tree_leaves(f(*xs))  # noqa: E731 - a function without a name of its own
    function = JaxFunction(flat, name, types, shapes, split, contract, not unchecked, cost)
    _check_dims(function, avals)
    function.require()
    params = {"key": object(), "follows": False, "unchecked": True if unchecked else None}
    return tree.tree_unflatten(
        structure, bind(JAX_BLOCKS, *tensors, f=function, results=shapes, **function.stated, **params)
    )


def _result(f: Callable[..., Any], structs: Sequence[Any]) -> tuple[Any, list[Any]]:
    result = jax.eval_shape(lambda *xs: f(*xs), *structs)  # jit crashes on a callable without weak references
    avals, structure = tree.tree_flatten(result)
    if not avals:
        raise ShapeError("the function of md.local returned no array")
    return structure, avals


def _shapes(out: Any, structure: Any, avals: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """The dims of every result: one `out` for an array; for several, one each, as the function returns them."""
    if tree.treedef_is_leaf(structure):
        out_dims = [out]
    elif isinstance(out, dict):
        out_dims = structure.flatten_up_to(out)
    else:
        out_dims = [out] if isinstance(out, str) else list(out)
    if len(out_dims) != len(avals):
        raise ShapeError(
            f"the function of md.local returned {len(avals)} arrays, and out= has dims for {len(out_dims)}\n"
            "  give the dims of each, in order: out=('batch n k', 'batch k m')"
        )
    return tuple(_shape(dims, aval, tensors) for dims, aval in zip(out_dims, avals, strict=True))


def _shape(dims: DimsLike, aval: Any, tensors: Sequence[Tensor]) -> Shape:
    items = split_items(dims)
    if len(items) != len(aval.shape):
        raise ShapeError(
            f"the function of md.local returned an array of shape {tuple(aval.shape)}, and "
            f"out= names {len(items)} dims ({' '.join(map(str, items))})\n  name every axis once, in order"
        )
    sized = [
        Dim(item, size) if isinstance(item, str) and ":" not in item else item
        for item, size in zip(items, aval.shape, strict=True)
    ]
    shape = pick(sized, (), new=True)
    known = {d.name: d.size for x in tensors for d in x.dims}
    wrong = [d for d, size in zip(shape, aval.shape, strict=True) if d.size != size or known.get(d.name, size) != size]
    if wrong:
        raise ShapeError(
            f"the function of md.local returned an array of shape {tuple(aval.shape)}, and out= names it "
            f"{show(shape)}; {wrong[0].name!r} has {known.get(wrong[0].name, wrong[0].size)} elements\n"
            "  a dim of another size needs a name of its own"
        )
    return shape


def _check_dims(f: JaxFunction, avals: Sequence[Any]) -> None:
    """Raise `ShapeError` for dims that no operand has, that a result cannot have, or that cannot be summed."""
    operand = {d.name for t in f.operands for d in t.dims}
    results = {d.name for shape in f.results for d in shape}
    lost = [name for name in f.split if name not in results]
    if lost:
        raise ShapeError(
            f"md.local splits {lost[0]!r}, which no result has\n"
            f"  if {f.name} sums over it, name it in contract=; otherwise leave it out, so that it is gathered"
        )
    kept = [name for name in f.contract if name in results]
    if kept:
        raise ShapeError(
            f"md.local sums over {kept[0]!r} (contract=), and a result has it\n  name it in split= instead"
        )
    unknown = [name for name in (*f.split, *f.contract) if name not in operand]
    if unknown:
        raise ShapeError(f"no operand of md.local has the dim {unknown[0]!r}")
    if f.contract and any(aval.dtype == np.dtype(bool) for aval in avals):
        raise ShapeError("md.local sums booleans over contract=; return integers")
