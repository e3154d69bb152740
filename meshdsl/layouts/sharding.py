"""A `Sharding` describes how one value is distributed. It uses each mesh axis at most once, in `split` or `partial`.

`split` lists the mesh axes of each sharded dim, major to minor. `partial` lists the axes over which the value is an
unreduced sum (or max, min). A device stores one block of every sharded dim. A dim that does not divide evenly is
padded at its end (`Extents`), only where it is split, and so that blocks always nest. The padding has arbitrary values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ..dims import Dim, Shape
from .mesh import Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """The sharding of one value over a mesh.

    >>> Sharding.of({"batch": ("rows",)}, partial=("cols",))
    {batch:rows | sum over cols}
    """

    split: tuple[tuple[str, Axes], ...] = ()  # sorted by dim name; each tuple of axes is nonempty
    partial: Axes = ()  # sorted
    kind: str = "sum"  # reduction of partial values: sum, max or min

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
        """The sharding in normal form: empty splits removed, dims and partial axes sorted."""
        pairs = tuple(sorted([(name, cut) for name, axes in split.items() if (cut := tuple(axes))]))
        partial = tuple(sorted(partial))
        return _interned(pairs, partial, kind if partial else "sum")

    def axes(self, dim: Dim | str) -> Axes:
        """The mesh axes of a dim, major to minor; empty if the dim is not sharded."""
        name = dim if isinstance(dim, str) else dim.name
        for d, axes in self.split:
            if d == name:
                return axes
        return ()

    def along(self, dims: Iterable[Dim]) -> Sharding:
        """The split of these dims alone, without partial axes.

        >>> Sharding.of({"batch": ("rows",), "io": ("cols",)}).along([Dim("io", 8), Dim("out", 4)])
        {io:cols}
        """
        return Sharding.of({d.name: self.axes(d) for d in dims})

    @property
    def split_axes(self) -> Axes:
        """All mesh axes that shard some dim."""
        return tuple(axis for _, axes in self.split for axis in axes)

    @property
    def varying(self) -> frozenset[str]:
        """The axes along which devices may hold different values (varying axes in JAX)."""
        return frozenset(self.split_axes + self.partial)

    def with_split(self, name: str, axes: Iterable[str]) -> Sharding:
        """The same sharding with other axes for one dim."""
        return Sharding.of({**dict(self.split), name: tuple(axes)}, self.partial, self.kind)

    def whole(self) -> Sharding:
        """The same split, without partial axes."""
        return _interned(self.split, (), "sum")

    def __repr__(self) -> str:
        parts = [f"{name}:{','.join(axes)}" for name, axes in self.split]
        text = " ".join(parts)
        if self.partial:
            text += f"{' ' if text else ''}| {self.kind} over {','.join(self.partial)}"
        return "{" + text + "}"


@lru_cache(maxsize=65536)
def _interned(split: tuple[tuple[str, Axes], ...], partial: Axes, kind: str) -> Sharding:
    """A cached `Sharding`: equal arguments give one object, which makes comparison fast."""
    return Sharding(split, partial, kind)


@dataclass(frozen=True)
class Extents:
    """The stored sizes of dims in a program. All blocks of a dim have one size, and no block is longer than the dim.

    A dim name has one multiple (default 1), by which every number of blocks divides. The size rounded up to the
    multiple, divided by the number of blocks, is the size of a block, but at most the dim's: blocks nest, and a dim
    that is not split is stored without padding. The multiple is that of all axes that split the dim anywhere, so that
    reshards between them need no gather; if this pads over a sixteenth more than `least`, the least common multiple of
    the rules, it is `least`.

    >>> extents = Extents({"heads": 16})
    >>> [extents.local(Dim("heads", 6), blocks) for blocks in (1, 2, 4, 16)]
    [6, 6, 4, 1]
    >>> Extents({"heads": 8}, {"heads": 4}).padded(Dim("heads", 4))
    4
    """

    multiple: Mapping[str, int] = field(default_factory=dict[str, int])
    least: Mapping[str, int] = field(default_factory=dict[str, int])  # that each rule needs, if not all together

    def padded(self, dim: Dim) -> int:
        """The size of a dim, rounded up to its multiple."""
        m = self.multiple.get(dim.name, 1)
        if m == 1:
            return dim.size
        most, least = (-(-dim.size // n) * n for n in (m, self.least.get(dim.name, m)))
        return most if 16 * most <= 17 * least else least

    def local(self, dim: Dim, blocks: int) -> int:
        """The stored size of one of so many blocks of a dim."""
        return min(self.padded(dim) // blocks, dim.size)

    def is_padded(self, dim: Dim, blocks: int) -> bool:
        """True if some stored elements of so many blocks are padding."""
        return blocks * self.local(dim, blocks) != dim.size

    def divides(self, dim: Dim, blocks: int, parts: int) -> bool:
        """True if each of so many blocks of a dim divides into equal parts, without more padding."""
        n = blocks * parts
        return self.padded(dim) % n == 0 and self.local(dim, blocks) == parts * self.local(dim, n)

    def alike(self, one: Dim, other: Dim, blocks: int) -> bool:
        """True if both dims can be stored in so many blocks, and equal blocks hold the same elements."""
        divides = not any(self.padded(dim) % blocks for dim in (one, other))
        return divides and self.local(one, blocks) == self.local(other, blocks)

    def global_shape(self, shape: Shape, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
        """The stored sizes of a value on all devices together."""
        counts = [mesh.count(sharding.axes(d)) for d in shape]
        return tuple([n * self.local(d, n) for d, n in zip(shape, counts, strict=True)])

    def local_shape(self, shape: Shape, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
        """The stored sizes of one device's block of a value.

        >>> Extents({"batch": 4}).local_shape((Dim("batch", 10),), Sharding.of({"batch": ("r",)}), Mesh("r:4"))
        (3,)
        """
        if not sharding.split:
            return tuple([d.size for d in shape])
        split = dict(sharding.split)
        return tuple([self.local(d, mesh.count(split[d.name])) if d.name in split else d.size for d in shape])
