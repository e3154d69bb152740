"""A `Dim` is a name with a size. A shape is a tuple of dims; its order is the storage order.

Operations match dims by name, in any order. A name appears at most once in a shape, and all operands of an operation
have the same size for a name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, overload

from .errors import ShapeError, nearest

LARGEST = 2**63 - 1  # of a dim, as in NumPy and XLA


@dataclass(frozen=True, order=True)
class Dim:
    """A dim: a name and a size.

    >>> Dim("batch", 512)
    batch=512
    """

    name: str
    size: int

    def __post_init__(self):
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name):
            raise ShapeError(f"a dim is named like a Python variable, got {self.name!r}")
        if isinstance(self.size, bool) or not hasattr(self.size, "__index__"):
            raise ShapeError(f"dim {self.name!r} needs a whole size, got {self.size!r}")
        object.__setattr__(self, "size", self.size.__index__())
        if not 0 <= self.size <= LARGEST:
            size = f"the negative size {self.size}" if -LARGEST <= self.size < 0 else f"a size above {LARGEST}"
            raise ShapeError(f"dim {self.name!r} cannot have {size}")

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"


class Dims(tuple[Dim, ...]):
    """The dims of a tensor, in storage order; `x.dims["batch"]` is the dim of that name."""

    @overload
    def __getitem__(self, key: SupportsIndex | str, /) -> Dim: ...

    @overload
    def __getitem__(self, key: slice, /) -> tuple[Dim, ...]: ...

    def __getitem__(self, key: Any, /) -> Any:
        return find(key, self) if isinstance(key, str) else super().__getitem__(key)


Shape = tuple[Dim, ...]
DimLike = Dim | str
DimsLike = str | Dim | Iterable[DimLike]
_T = TypeVar("_T")
ByDim = Mapping[str, _T] | Mapping[Dim, _T] | Mapping[DimLike, _T]  # a mapping's type is invariant in its keys


def dims(text: DimsLike, of: Iterable[Dim] | None = None) -> Shape:
    """Parse dims from text; spaces, commas or semicolons separate them.

    >>> batch, io = dims("batch:512 io:1024")
    >>> io
    io=1024
    >>> dims("io batch", of=(batch, io))
    (io=1024, batch=512)

    Also takes a `Dim`, or several dims as a sequence, as every function that takes dims. `of` are the dims to choose
    from, for example `x.dims`; names alone will do then. Raises `ShapeError` for an item that is not of the form
    name:size without `of`, and for one that is not among `of`.
    """
    return pick(text, of or (), new=of is None)


def name_of(dim: DimsLike) -> str:
    """The name of one dim, in any form; raises `ShapeError` for several.

    >>> name_of("batch:512"), name_of([Dim("io", 4)])
    ('batch', 'io')
    """
    items = split_items(dim)
    if len(items) != 1 or not isinstance(items[0], Dim | str):
        raise ShapeError(f"one dim is a md.Dim or a name; got {dim!r}")
    return items[0].name if isinstance(items[0], Dim) else items[0].partition(":")[0]


def check_shape(shape: Iterable[Dim], what: str = "a tensor") -> Shape:
    """Return the shape as a tuple; raise `ShapeError` if a name appears twice."""
    shape = tuple(shape)
    if len({dim.name for dim in shape}) == len(shape):
        return shape
    seen: dict[str, Dim] = {}
    for dim in shape:
        if dim.name in seen:
            sizes = "" if seen[dim.name] == dim else f" (sizes {seen[dim.name].size} and {dim.size})"
            raise ShapeError(
                f"{what} cannot have the dim {dim.name!r} twice{sizes}\n"
                f"  the dims asked for are {show(shape)}; a name appears once in a shape\n"
                f"  give the second one another name, for example md.Dim('{dim.name}_2', {dim.size})"
            )
        seen[dim.name] = dim
    return shape


def pick(dims_like: DimsLike, known_dims: Iterable[Dim], *, new: bool = False, what: str = "dim") -> Shape:
    """Resolve the user's dims (a `Dim`, a name, text, or a sequence of them) against the known dims.

    With `new`, an unknown dim is allowed if it has a size. Raises `ShapeError` for other unknown dims, for a size that
    differs from the known one, and for a name given twice.
    """
    table: dict[str, Dim] = {dim.name: dim for dim in known_dims}
    resolved = []
    for item in split_items(dims_like):
        dim = _resolve(item, table, new, what)
        resolved.append(dim)
    return check_shape(resolved, f"{what}s")


def of_size(dim: DimLike, size: int, rule: str) -> Dim:
    """The dim of this name and size; raises `ShapeError` with the `rule` if the dim is given with another size."""
    named = Dim(name_of(dim), size)
    if any(
        (item if isinstance(item, Dim) else _sized(item) if ":" in item else named) != named
        for item in split_items(dim)
    ):
        raise ShapeError(f"{rule}; got {dim!r}")
    return named


def find(dim_like: DimLike, known_dims: Iterable[Dim], what: str = "dim") -> Dim:
    """Resolve exactly one known dim; see `pick`."""
    resolved = pick(dim_like, known_dims, what=what)
    if len(resolved) != 1:
        raise ShapeError(f"expected one {what}, got {show(resolved)}")
    return resolved[0]


def fresh_dim(dim: DimLike, *taken: DimsLike) -> Dim:
    """The dim, with underscores after its name until no dim of `taken` has that name.

    >>> x = dims("io:8 two:3")
    >>> fresh_dim("two:2", x), fresh_dim("pair:2", x)
    (two_=2, pair=2)

    For a dim that a layer or a pass makes up: the model may use any name. `taken` are dims in any form, or names.
    """
    (dim,) = dims(dim)
    items = [item for shape in taken for item in (shape if isinstance(shape, frozenset) else split_items(shape))]
    used = {item.name if isinstance(item, Dim) else item.partition(":")[0] for item in items}
    name = dim.name
    while name in used:
        name += "_"
    return Dim(name, dim.size)


def names(shape: Iterable[Dim]) -> tuple[str, ...]:
    """The names of a shape, in storage order."""
    return tuple(dim.name for dim in shape)


def size_of(shape: Iterable[Dim]) -> int:
    """The number of elements."""
    return math.prod(dim.size for dim in shape)


def show(shape: Iterable[Dim]) -> str:
    """The shape as text, for errors and printed programs.

    >>> show(dims("batch:512 io:1024"))
    '[batch=512 io=1024]'
    """
    return "[" + " ".join(f"{dim.name}={dim.size}" for dim in shape) + "]"


def merge(shapes: Iterable[Shape]) -> dict[str, Dim]:
    """All dims of several shapes, by name; raises `ShapeError` if a name has two sizes."""
    table: dict[str, Dim] = {}
    shapes = tuple(shapes)
    for shape in shapes:
        for dim in shape:
            if table.setdefault(dim.name, dim) != dim:
                raise ShapeError(
                    f"dim {dim.name!r} has two sizes, {table[dim.name].size} and {dim.size}, in one operation\n"
                    f"  the dims are {', '.join(map(show, shapes))}; a name has one size\n"
                    f"  rename one of the two, for example md.rename(x, {dim.name}='{dim.name}_2')"
                )
    return table


def _resolve(item: DimLike, table: Mapping[str, Dim], new: bool, what: str) -> Dim:
    if isinstance(item, str) and ":" in item:
        item = _sized(item)
    if isinstance(item, str):
        _check_known(item, table, new, what)
        return table[item]
    if not isinstance(item, Dim):
        way_out = f"\n  a size needs a name: 'NAME:{item}'; x.dims are the dims of x" if isinstance(item, int) else ""
        raise ShapeError(f"a {what} is a md.Dim or a name, got {item!r}{way_out}")
    known_dim = table.get(item.name)
    if known_dim is None and not new:
        raise ShapeError(f"no {what} {item.name!r} here; {nearest(item.name, table)}")
    if known_dim not in (None, item):
        raise ShapeError(
            f"{what} {item.name!r} has size {known_dim.size} here, and size {item.size} was asked for\n"
            f"  the dims are {show(table.values())}; give the name alone, or rename one of the two with md.rename"
        )
    return item


def _check_known(name: str, table: Mapping[str, Dim], new: bool, what: str) -> None:
    """Raise `ShapeError` if no dim of the table has this name, which was given without a size."""
    if name in table:
        return
    if not name.isidentifier():
        raise ShapeError(f"a dim is written name or name:size, for example 'batch:512'; got {name!r}")
    if new and not table:
        _sized(name)  # raises that the size is missing
    way_out = f"; to introduce it, give its size: '{name}:SIZE'" if new else ""
    raise ShapeError(f"no {what} {name!r} here; {nearest(name, table)}{way_out}")


def split_items(dims_like: DimsLike) -> list[DimLike]:
    """The user's dims as a list with one item per dim; text is split at spaces, commas and semicolons."""
    if isinstance(dims_like, Dim):
        return [dims_like]
    if isinstance(dims_like, str):
        return list(_words(dims_like))
    if not isinstance(dims_like, Iterable):
        raise ShapeError(f"dims are text such as 'batch:8 io:4', a md.Dim, or several of them; got {dims_like!r}")
    return [word for item in dims_like for word in (_words(item) if isinstance(item, str) else [item])]


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,;]+", text) if word]


def _sized(word: str) -> Dim:
    name, colon, size = word.partition(":")
    if not colon or not size.isdigit():
        raise ShapeError(f"a new dim is written name:size, for example 'batch:512'; got {word!r}")
    return Dim(name, int(size))
