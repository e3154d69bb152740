"""One row of the table of operations: a call, its operands and a plain reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ir import Graph, Type
from meshdsl.trace import Tensor, trace, tree

SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "t": 4}
Sizes = Mapping[str, int] | Callable[[str], int]
INDEX = "index"  # the dtype of index operands; each law chooses it
INDICES = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class In:
    """One operand: dims as `"a b=2*c"` (a size may be a sum of products), dtype ("": the row's) and kind of values.

    Values: any, positive, nonzero, unit (inside (-1, 1)), bool, key, `place:a` (indices of dim a; some are out of
    range, up to the limits of the dtype), `inside:a` (indices of dim a, all in range).
    """

    dims: str
    values: str = "any"
    dtype: str = ""


@dataclass(frozen=True)
class Row:
    """An operation as a function of tensors, its operands, and its properties.

    `reference` takes the operands as NumPy arrays. `exact`: on small integers, every evaluation order gives the same
    bits. `empty`: any size may be 0. `smooth`: on integers, with ties and zeros, the gradient equals JAX's. `odd`:
    values may include infinities; not allowed if a factor of a product is summed on several devices, because
    inf * (2 - 1) is inf and inf * 2 - inf * 1 is NaN; nor if products are grouped in any order, because inf * 0 is NaN.
    `by_hand`: JAX does not differentiate the kernel; the gradient has a row of its own.
    `composed`: the operations in it have rows of their own, so that one test and the long laws are enough.
    """

    name: str
    call: Callable[..., Any]
    ins: tuple[In, ...]
    reference: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    differentiable: bool = True
    exact: bool = True
    empty: bool = True
    smooth: bool = True
    odd: bool = True
    by_hand: bool = False
    composed: bool = False

    def dims(self) -> tuple[str, ...]:
        """The dim names whose sizes can be chosen."""
        found: dict[str, None] = {}
        for operand in self.ins:
            for word in operand.dims.split():
                name, _, size = word.partition("=")
                parts = size.replace("+", "*").split("*") if size else [name]
                found |= {part: None for part in parts if not part.isdigit()}
        return tuple(found)

    def types(self, sizes: Sizes = SIZES, dtype: str = "", index: str = INDICES[0]) -> list[Type]:
        """Types of the operands."""
        return [
            Type(
                tuple(_dim(word, sizes) for word in operand.dims.split()),
                np.dtype(jnp.dtype(index if operand.dtype == INDEX else operand.dtype or dtype or self.dtypes[0])),
            )
            for operand in self.ins
        ]

    def arrays(
        self,
        rng: np.random.Generator,
        sizes: Sizes = SIZES,
        integer: bool = True,
        dtype: str = "",
        index: str = INDICES[0],
        odd: bool = False,
    ) -> list[np.ndarray]:
        """Values for the operands; with `integer`, small whole numbers (quarters inside (-1, 1)).

        `odd` adds NaN of either sign, infinities and -0.0 to the floats.
        """
        types = self.types(sizes, dtype, index)
        found = [_values(rng, t, operand.values, integer, sizes) for t, operand in zip(types, self.ins, strict=True)]
        return [_with_odd(rng, x) for x in found] if odd else found

    def make(
        self,
        rng: np.random.Generator,
        sizes: Sizes = SIZES,
        integer: bool = True,
        dtype: str = "",
        index: str = INDICES[0],
        odd: bool = False,
    ) -> list[Tensor]:
        """The operands as concrete tensors."""
        arrays = self.arrays(rng, sizes, integer, dtype, index, odd)
        return [md.tensor(x, t.dims) for x, t in zip(arrays, self.types(sizes, dtype, index), strict=True)]

    def graph(self, sizes: Sizes = SIZES, dtype: str = "", index: str = INDICES[0]) -> Graph:
        """The traced call; its results are the leaves of the returned value."""
        graph, captures, _ = trace(self.call, self.types(sizes, dtype, index))
        assert not captures
        return graph

    def __str__(self) -> str:
        return self.name

    def vectorised(self, mapped: Sequence[bool], call: Callable[..., Any] | None = None) -> Row:
        """The row under `md.vmap` over a dim `v`, which the `mapped` operands have; `call` replaces `md.vmap`."""
        ins = tuple(replace(x, dims=f"v {x.dims}".strip()) if on else x for x, on in zip(self.ins, mapped, strict=True))
        return replace(
            self, name=f"vmap_{self.name}", call=call or md.vmap(self.call, over="v"), ins=ins, reference=None
        )


def looped(row: Row, mapped: Sequence[bool]) -> Callable[..., Any]:
    """The meaning of `md.vmap` of the row: the stacked results of its call on each place of `v`."""

    def call(*xs: Tensor) -> Any:
        cut = [md.unstack(x, "v") if on else None for x, on in zip(xs, mapped, strict=True)]
        n = next(len(parts) for parts in cut if parts is not None)
        results = [row.call(*(x if p is None else p[i] for x, p in zip(xs, cut, strict=True))) for i in range(n)]
        flat = zip(*(leaves(y) for y in results), strict=True)
        return [md.stack(ys, "v") for ys in flat]

    return call


def _dim(word: str, sizes: Sizes) -> Dim:
    name, _, size = word.partition("=")
    choose = sizes if callable(sizes) else sizes.__getitem__

    def number(text: str) -> int:
        return int(text) if text.isdigit() else choose(text)

    return Dim(name, sum(math.prod(number(part) for part in term.split("*")) for term in (size or name).split("+")))


def _values(rng: np.random.Generator, kind: Type, values: str, integer: bool, sizes: Sizes) -> np.ndarray:
    shape = tuple(d.size for d in kind.dims)
    values, _, dim = values.partition(":")
    if values == "key":
        return rng.integers(0, 1 << 32, shape, np.uint32)
    if values in ("place", "inside"):
        size, outside = _dim(dim, sizes).size, values == "place"
        found = rng.integers(-outside, max(size, 1) + outside, shape)
        ends = np.iinfo(kind.dtype)
        found = np.where((found < ends.min) | (found > ends.max), 0, found).astype(kind.dtype)
        end = rng.choice(np.array([ends.min, ends.max], kind.dtype), shape)
        return np.where(rng.random(shape) < 0.1, end, found) if outside else found
    if kind.dtype == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    integer = integer or kind.dtype.kind in "iu"
    sign = 1 if kind.dtype.kind == "u" else rng.choice([-1, 1], shape)
    if values == "unit":
        x = rng.integers(-3, 4, shape) / 4 if integer else rng.uniform(-0.9, 0.9, shape)
    elif values in ("positive", "nonzero"):
        x = rng.integers(1, 5, shape) if integer else rng.uniform(0.5, 2, shape)
        x = x * sign if values == "nonzero" else x
    else:
        x = rng.integers(0, 4, shape) * sign if integer else rng.normal(size=shape)
    if kind.dtype.kind == "c" and values == "any":
        x = x + 1j * (rng.integers(-3, 4, shape) if integer else rng.normal(size=shape))
    return np.asarray(x).astype(kind.dtype)


def _with_odd(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Make an eighth of the floats odd, or only one of them, because many can hide each other in sums."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    odd = rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0]), x.shape).astype(x.dtype)
    chosen = rng.random(x.shape) < 0.125
    if rng.random() < 0.5:
        chosen = np.arange(x.size).reshape(x.shape) == rng.integers(0, max(1, x.size))
    return np.where(chosen, odd, x)


def leaves(x: Any) -> list[Any]:
    """The tensors of a result, in order."""
    return tree.tree_leaves(x)


def widest(dtype: Any) -> np.dtype:
    """The dtype in which values of a narrow float dtype are compared."""
    return np.dtype(np.float32) if np.dtype(dtype) in (ml_dtypes.bfloat16, np.float16) else np.dtype(dtype)
