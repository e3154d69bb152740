"""A `Sharding` mentions each mesh axis at most once: in one dim's split, or in `partial`.

`split` says which axes cut a dim, major to minor. `partial` says over which axes the value is still an unreduced
sum (or max, min). A device holds one block of every split dim. A dim that does not divide is stored padded at its
end to a common multiple (`Extents`), the same in every sharding of the program, so blocks always nest; the padding
holds anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ..dims import Dim, Shape
from .mesh import Mesh

__all__ = ["Axes", "Extents", "Sharding"]

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """How one value is laid out over a mesh.

    >>> Sharding.of({"batch": ("rows",)}, partial=("cols",))
    {batch:rows | sum over cols}
    """

    split: tuple[tuple[str, Axes], ...] = ()  # sorted by dim name; never an empty tuple of axes
    partial: Axes = ()  # sorted
    kind: str = "sum"  # how partial values combine: sum, max or min

    def __post_init__(self):
        used = [axis for _, axes in self.split for axis in axes] + list(self.partial)
        if len(used) != len(set(used)):
            raise ValueError(f"a sharding mentions each mesh axis at most once: {self.split} {self.partial}")

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Sharding):
            return self is other
        return self.split == other.split and self.partial == other.partial and self.kind == other.kind

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.split, self.partial, self.kind))

    @staticmethod
    def of(split: Mapping[str, Iterable[str]], partial: Iterable[str] = (), kind: str = "sum") -> Sharding:
        """The sharding in normal form: empty splits dropped, dims and partial axes sorted."""
        pairs = tuple(sorted([(name, cut) for name, axes in split.items() if (cut := tuple(axes))]))
        partial = tuple(sorted(partial))
        return _known(pairs, partial, kind if partial else "sum")

    def axes(self, dim: Dim | str) -> Axes:
        """The axes that cut a dim, major to minor; empty when it is whole on every device."""
        name = dim if isinstance(dim, str) else dim.name
        for d, axes in self.split:
            if d == name:
                return axes
        return ()

    @property
    def split_axes(self) -> Axes:
        """Every axis that cuts some dim."""
        return tuple(axis for _, axes in self.split for axis in axes)

    @property
    def varying(self) -> frozenset[str]:
        """The axes along which devices may hold different bits (JAX calls this varying)."""
        return frozenset(self.split_axes + self.partial)

    def with_split(self, name: str, axes: Iterable[str]) -> Sharding:
        """The same, with one dim cut by other axes."""
        return Sharding.of({**dict(self.split), name: tuple(axes)}, self.partial, self.kind)

    def whole(self) -> Sharding:
        """The same split with nothing pending."""
        return Sharding(self.split)

    def __repr__(self) -> str:
        parts = [f"{name}:{','.join(axes)}" for name, axes in self.split]
        text = " ".join(parts)
        if self.partial:
            text += f"{' ' if text else ''}| {self.kind} over {','.join(self.partial)}"
        return "{" + text + "}"


@lru_cache(maxsize=65536)
def _known(split: tuple[tuple[str, Axes], ...], partial: Axes, kind: str) -> Sharding:
    """One object for equal shardings, which are compared often."""
    return Sharding(split, partial, kind)


@dataclass(frozen=True)
class Extents:
    """The stored size of every dim of a program: its size rounded up to a multiple fixed per dim name.

    >>> Extents({"batch": 4}).padded(Dim("batch", 10))
    12
    """

    multiple: Mapping[str, int] = field(default_factory=dict[str, int])

    def padded(self, dim: Dim) -> int:
        """The stored global size."""
        m = self.multiple.get(dim.name, 1)
        return dim.size if m == 1 else -(-dim.size // m) * m

    def is_padded(self, dim: Dim) -> bool:
        """Whether some stored elements are padding."""
        return self.padded(dim) != dim.size

    def global_shape(self, shape: Shape) -> tuple[int, ...]:
        """Stored sizes of the whole value."""
        return tuple([self.padded(dim) for dim in shape])

    def local_shape(self, shape: Shape, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
        """Stored sizes of one device's block.

        >>> Extents({"batch": 4}).local_shape((Dim("batch", 10),), Sharding.of({"batch": ("r",)}), Mesh("r:4"))
        (3,)
        """
        if not sharding.split:
            return self.global_shape(shape)
        split = dict(sharding.split)
        return tuple(
            [self.padded(d) // mesh.count(split[d.name]) if d.name in split else self.padded(d) for d in shape]
        )
