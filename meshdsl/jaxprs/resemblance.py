"""True if a function does the same on blocks of one element, where JAX leaves out broadcasts, reshapes and batch dims.

Two jaxprs do the same if they have equal forms. A form lists the equations with their operands, their parameters and
their shapes, all without axes of one element, and without equations that only add, remove or move such axes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from .dependence import FREE, Problem, same_values, simple
from .factors import MixesError
from .primitives import CALLS, inner

__all__ = ["Sized", "resembles"]

_VIEWS = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "copy_p"}
# Parameters that number axes of the first operand, and those that have an entry for each of its axes, with the entry
# of an axis to which nothing happens.
_NUMBERS = {"axes", "axis", "dimension", "dimensions", "index_vector_dim"}
_ENTRIES: dict[str, Any] = {
    "start_indices": 0, "strides": 1, "padding_config": (0, 0, 0), "window_strides": 1,
    "base_dilation": 1, "window_dilation": 1, "window_dimensions": 1, "padding": (0, 0),
}  # fmt: skip


class Sized(NamedTuple):
    """A jaxpr with one dim twice as long, and the share of the dim that one block has."""

    jaxpr: ClosedJaxpr
    share: Fraction


def resembles(full: ClosedJaxpr, block: ClosedJaxpr, doubled: Sequence[Sized]) -> Problem | None:
    """The problem that a jaxpr does something else on a block of one element; None if both have the same form.

    `doubled` has one jaxpr for each dim that is split: an axis that is longer there has that dim.

    >>> import jax, jax.numpy as jnp
    >>> def compared(f, n=6, block=1):
    ...     arrays = (jax.ShapeDtypeStruct((m, 4, 4), "float32") for m in (n, 2 * n, block))
    ...     full, twice, small = map(jax.make_jaxpr(f), arrays)
    ...     return resembles(full, small, [Sized(twice, Fraction(block, n))])
    >>> compared(lambda x: x @ x.mT + 1)
    >>> compared(lambda x: jnp.cumsum(jnp.squeeze(x), axis=1).reshape(x.shape)).what
    'does something else on a block of one element'
    >>> compared(lambda x: x if x.shape[0] == 1 else 2 * x).what
    'does something else on a block of one element'
    """
    try:
        whole = _form(_Walk([full, *(each.jaxpr for each in doubled)], [each.share for each in doubled]))
        same = whole == _form(_Walk([block], []))
    except MixesError:
        same = False
    return None if same else Problem("", "does something else on a block of one element")


class _Walk(NamedTuple):
    """Jaxprs of one function: at the full sizes, then with each dim twice as long; the shares that a block has."""

    jaxprs: Sequence[ClosedJaxpr]
    shares: Sequence[Fraction]

    def inside(self, parts: Sequence[tuple[Any, Sequence[Any]]]) -> _Walk:
        return _Walk([ClosedJaxpr(body, list(consts)) for body, consts in parts], self.shares)

    def size(self, sizes: Sequence[int]) -> int:
        """The size on a block, of sizes in each jaxpr."""
        size = Fraction(sizes[0])
        for share, longer in zip(self.shares, sizes[1:], strict=True):
            size *= share if longer != sizes[0] else 1
        if size.denominator != 1:
            raise MixesError("has no whole number of elements on a block")
        return int(size)

    def shape(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """The shape on a block."""
        shapes = [getattr(v.aval, "shape", ()) for v in variables]
        return tuple(map(self.size, zip(*shapes, strict=True)))


def _form(walk: _Walk) -> tuple[Any, ...]:
    env: dict[Any, Any] = {}
    first = walk.jaxprs[0]
    for v, value in zip(first.jaxpr.constvars, first.consts, strict=True):
        env[v] = _value(value)
    env.update((v, ("operand", k)) for k, v in enumerate(first.jaxpr.invars))
    lines: list[Any] = []
    results = _lines(walk, env, lines)
    return tuple(lines), tuple(results)


def _value(x: Any) -> Any:
    """A constant; arrays of equal values are numbers."""
    try:
        array = np.asarray(x)
    except (TypeError, ValueError):  # a random key, for example
        return ("constant", repr(x))
    if array.size and (array == array.flat[0]).all():
        return ("number", repr(array.flat[0].item()))
    return ("array", _long(array.shape), array.tobytes())


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _lines(walk: _Walk, env: dict[Any, Any], lines: list[Any]) -> list[Any]:
    """Append the equations of a jaxpr to the lines of a form; return what its results are."""
    counts = {len(jaxpr.jaxpr.eqns) for jaxpr in walk.jaxprs}
    if len(counts) != 1:
        raise MixesError("has other equations with longer dims")

    def read(v: Any) -> Any:
        return _value(v.val) if isinstance(v, Literal) else env[v]

    for eqns in zip(*(jaxpr.jaxpr.eqns for jaxpr in walk.jaxprs), strict=True):
        eqn = eqns[0]
        name, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
        bodies = list(zip(*(inner(each) for each in eqns), strict=True))
        if name in CALLS and bodies:
            body = walk.inside(bodies[0])
            known = dict(zip(body.jaxprs[0].jaxpr.invars, operands, strict=True))
            known.update(zip(body.jaxprs[0].jaxpr.constvars, map(_value, body.jaxprs[0].consts), strict=True))
            env.update(zip(eqn.outvars, _lines(body, known, lines), strict=True))
            continue
        ins = [walk.shape(vs) for vs in zip(*(each.invars for each in eqns), strict=True)]
        outs = [walk.shape(vs) for vs in zip(*(each.outvars for each in eqns), strict=True)]
        if _same_view(name, eqn.params, ins, outs):
            env[eqn.outvars[0]] = operands[0]
            continue
        types = [(_long(shape), str(getattr(v.aval, "dtype", ""))) for v, shape in zip(eqn.outvars, outs, strict=True)]
        inside = [_form(walk.inside(parts)) for parts in bodies]
        params = tuple(_params(walk, eqns, ins, outs))
        env.update((v, ("line", len(lines), k)) for k, v in enumerate(eqn.outvars))
        lines.append((name, operands, [_long(shape) for shape in ins], types, params, inside))
    return [read(v) for v in walk.jaxprs[0].jaxpr.outvars]


def _same_view(name: str, params: Mapping[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> bool:
    """True if an equation only adds, removes or moves axes of one element."""
    if name == "transpose":
        order = [i for i in params["permutation"] if ins[0][int(i)] != 1]
        return order == sorted(order)
    return name in _VIEWS and _long(ins[0]) == _long(outs[0])


def _params(
    walk: _Walk, eqns: Sequence[Any], ins: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]]
) -> Iterator[Any]:
    shape = ins[0] if ins else outs[0]
    name = eqns[0].primitive.name
    for key, value in sorted(eqns[0].params.items()):
        if key == "dimension_numbers":
            yield key, _dimension_numbers(name, value, ins, outs)
        elif key == "permutation":
            yield key, _places(shape, value)
        elif key == "broadcast_dimensions":
            yield key, [(_place(shape, i), _place(outs[0], int(to))) for i, to in enumerate(value) if shape[i] != 1]
        elif key in _NUMBERS and (isinstance(value, tuple | list | int)):
            yield key, _places(shape, value if isinstance(value, tuple | list) else (value,))
        elif key in _ENTRIES and isinstance(value, tuple | list):
            yield key, [entry for entry in value if entry != _ENTRIES[key]]
        elif key == "grid_mapping":
            yield key, _grid(walk, [eqn.params[key] for eqn in eqns])
        elif simple(value) and key not in FREE:
            yield key, _Raw(value)


class _Raw:
    """A parameter, compared like those of the check."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Raw) and same_values(self.value, other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _place(shape: Sequence[int], axis: int) -> int | None:
    """The number of an axis among those of more than one element."""
    return None if shape[axis] == 1 else sum(n != 1 for n in shape[:axis])


def _places(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [place for axis in axes if (place := _place(shape, int(axis))) is not None]


def _pairs(a: Sequence[int], b: Sequence[int], axes: Sequence[Sequence[int]]) -> list[Any]:
    return sorted((_place(a, int(i)), _place(b, int(j))) for i, j in zip(*axes, strict=True) if a[int(i)] != 1)


def _dimension_numbers(name: str, d: Any, ins: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]]) -> Any:
    if name == "dot_general":
        return [_pairs(ins[0], ins[1], axes) for axes in d]
    if name == "gather":
        batching = _pairs(ins[0], ins[1], (d.operand_batching_dims, d.start_indices_batching_dims))
        return [_place(ins[0], int(i)) for i in d.start_index_map], batching, _places(outs[0], d.offset_dims)
    if name.startswith("scatter"):
        batching = _pairs(ins[0], ins[1], (d.operand_batching_dims, d.scatter_indices_batching_dims))
        moved = [_place(ins[0], int(i)) for i in d.scatter_dims_to_operand_dims]
        return moved, batching, _places(ins[2], d.update_window_dims)
    return tuple(d)


def _grid(walk: _Walk, mappings: Sequence[Any]) -> Any:
    """The grid of a Pallas kernel, the sizes of its blocks, and which blocks a step has."""
    grid = [walk.size(sizes) for sizes in zip(*(mapping.grid for mapping in mappings), strict=True)]
    blocks = [
        (
            [walk.size([getattr(n, "block_size", n) or 1 for n in sizes]) for sizes in zip(*shapes, strict=True)],
            str(mappings[0].block_mappings[k].index_map_jaxpr),
        )
        for k, shapes in enumerate(
            zip(*([b.block_shape for b in mapping.block_mappings] for mapping in mappings), strict=True)
        )
    ]
    return _long(grid), blocks
