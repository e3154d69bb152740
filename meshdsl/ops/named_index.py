"""`x["a", 1, "b", i]` and `x.at["a", 1].set(v)`: read and replace the elements at places along named dims.

Numbers and slices cut first, as `md.slice` does; then one gather or scatter serves all index tensors.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dims import Dim, find
from ..errors import ShapeError, TraceError
from ..trace import Tensor, as_tensor, bind1
from .dtypes import cast
from .elementwise import maximum, minimum, where
from .indexing import iota
from .joining import INDEX
from .reductions import broadcast
from .reshape import transpose
from .scattering import points_of, scattered, take_points
from .slicing import pad, reverse, slice


@dataclass(frozen=True)
class _Cut:
    """`count` elements of a dim, every `step`-th from `start`, in reverse order if `back`; one alone drops the dim."""

    dim: Dim
    start: int
    count: int
    step: int
    back: bool
    alone: bool


def _cut(dim: Dim, index: Any) -> _Cut:
    if isinstance(index, builtins.slice):
        places = range(*index.indices(dim.size))
        first = min(places[0], places[-1]) if places else 0
        return _Cut(dim, first, len(places), abs(places.step), places.step < 0, False)
    at = index.__index__()
    if not -dim.size <= at < dim.size:
        raise ShapeError(f"index {at} is outside {dim!r}: an index is from {-dim.size} to {dim.size - 1}")
    return _Cut(dim, at % dim.size, 1, 1, False, True)


def _read(x: Tensor, key: Any) -> tuple[list[_Cut], dict[Dim, Tensor]]:
    """The key as cuts at numbers and slices, and the tensors that index the other dims."""
    items = list(key) if isinstance(key, tuple) else [key]
    if isinstance(key, Mapping):
        pairs = list(key.items())
    elif len(items) % 2 or not all(isinstance(name, str | Dim) for name in items[::2]):
        dim = x.dims[0].name if x.dims else "dim"
        raise TraceError(
            f"a tensor {x.type} is indexed by name: x[{dim!r}, 3], x[{dim!r}, 1:5], or x[{dim!r}, i] "
            "with a tensor of integers"
        )
    else:
        pairs = list(zip(items[::2], items[1::2], strict=True))
    cuts, tensors, seen = list[_Cut](), dict[Dim, Tensor](), set[Dim]()
    for name, index in pairs:
        dim = find(name, x.dims)
        if dim in seen:
            raise ShapeError(f"{dim.name!r} is indexed twice")
        seen.add(dim)
        number = isinstance(index, int | np.integer) and not isinstance(index, bool)
        if number or isinstance(index, builtins.slice):
            cuts.append(_cut(dim, index))
        elif isinstance(index, Tensor) and index.dtype.kind == "b":
            raise ShapeError(f"x[{dim.name!r}, mask] has no size before it runs\n  use md.where(mask, x, other)")
        else:
            tensors[dim] = as_tensor(index)
    return cuts, tensors


def _part(x: Tensor, cuts: list[_Cut]) -> Tensor:
    for cut in cuts:
        if cut.alone:
            x = bind1(INDEX, x, dim=cut.dim, at=cut.start)
        elif (cut.count, cut.step) != (cut.dim.size, 1):
            x = slice(x, cut.dim, cut.start, cut.count, cut.step)
        x = reverse(x, cut.dim.name) if cut.back else x
    return x


def named_index(x: Tensor, key: Any) -> Tensor:
    """The elements of x at numbers, slices and index tensors, each after the name of its dim."""
    cuts, tensors = _read(x, key)
    x = _part(x, cuts)
    return (
        take_points(x, points_of("take", list(tensors.values()), tuple(tensors), False), tuple(tensors))
        if tensors
        else x
    )


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "set": lambda x, y: y,
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "max": maximum,
    "min": minimum,
}


def _put(x: Tensor, cuts: list[_Cut], how: str, value: Tensor) -> Tensor:
    """x with `value`, which has the dims of the part, written over the part or combined with it."""
    if any(not cut.count for cut in cuts):
        return x
    inside = None
    for cut in cuts:
        value = broadcast(value, (Dim(cut.dim.name, 1), *value.dims)) if cut.alone else value
        value = reverse(value, cut.dim.name) if cut.back else value
        last = cut.start + (cut.count - 1) * cut.step
        value = pad(value, cut.dim.name, cut.start, cut.dim.size - last - 1, inner=cut.step - 1)
        at = iota(cut.dim)
        here = (at >= cut.start) & (at <= last) & ((at - cut.start) % cut.step == 0)
        shape = (cut.dim,) if inside is None else (cut.dim, *inside.dims)
        inside = here if inside is None else broadcast(here, shape) & inside
    combined = _COMBINE[how](x, transpose(value, x.dims))
    return combined if inside is None else where(inside, combined, x)


class _Place:
    """The places of a tensor that a key names; its methods return the tensor with new elements there."""

    def __init__(self, x: Tensor, key: Any):
        self._x, self._cuts, self._tensors = x, *_read(x, key)

    def _update(self, how: str, value: Any) -> Tensor:
        x, cuts, tensors = self._x, self._cuts, self._tensors
        part, value = _part(x, cuts), cast(as_tensor(value), x.dtype)
        if tensors:
            value, how_cut = scattered(how, part, list(tensors.values()), value, tuple(tensors)), "set"
        else:
            extra = [d for d in value.dims if d not in part.dims]
            if extra:
                raise ShapeError(f"the value {value.type} has {extra[0]!r}, which the part {part.type} lacks")
            missing = [d for d in part.dims if d not in value.dims]
            value, how_cut = broadcast(value, (*missing, *value.dims)), how
        return _put(x, cuts, how_cut, value)


def _method(how: str) -> Callable[[_Place, Any], Tensor]:
    def update(self: _Place, value: Any) -> Tensor:
        return self._update(how, value)

    update.__name__ = how
    return update


for _how in _COMBINE:
    setattr(_Place, _how, _method(_how))


class _At:
    def __init__(self, x: Tensor):
        self._x = x

    def __getitem__(self, key: Any) -> _Place:
        return _Place(self._x, key)


at = property(_At)
