"""The tensors of values. A tensor has the dims of its value's atoms, or some of them: it is equal along those that it
lacks, so that a broadcast costs nothing until something needs the dim."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

from .axes import Axis, dims
from .steps import BodyStep, Value

Part = Axis | md.Dim
Move = tuple[Sequence[Part], Sequence[Part]]  # axes that a tensor has, and axes that it shall have instead
WORD = md.Dim("key_word", 2)  # of a random key
_numbers: ContextVar[Iterator[int]] = ContextVar("_numbers")


@contextlib.contextmanager
def numbered() -> Iterator[None]:
    """Count the dims of `fresh` from 1, so that a function gives equal programs each time; inside itself, go on."""
    before = _numbers.set(_numbers.get(None) or itertools.count(1))
    try:
        yield
    finally:
        _numbers.reset(before)


def fresh(size: int, name: str = "own") -> md.Dim:
    """A dim that nothing else has."""
    return md.Dim(f"{name}_{next(_numbers.get())}_", size)


def full(t: md.Tensor, wanted: Iterable[md.Dim]) -> md.Tensor:
    """The tensor with all these dims, in this order."""
    wanted = tuple(wanted)
    t = md.broadcast(t, wanted) if len(wanted) > len(t.dims) else t
    return t if t.dims == wanted else md.transpose(t, wanted)


def fit(t: Any, *moves: Move) -> Any:
    """Rename or reshape dims of a tensor; a number is unchanged."""
    if not isinstance(t, md.Tensor):
        return t
    renames: dict[str, md.Dim] = {}
    for have, want in moves:
        h, w = dims(have), dims(want)
        if [d.size for d in h] != [d.size for d in w] and not set(h).isdisjoint(t.dims):
            rest = [d for d in t.dims if d not in h]
            taken = {d.name for d in (*rest, *h)}
            made = tuple(fresh(d.size, d.name) if d.name in taken else d for d in w)
            t, h = md.reshape(full(t, [*rest, *h]), [*rest, *made]), made
        renames.update({a.name: b for a, b in zip(h, w, strict=False) if a != b and a in t.dims})
    return md.rename(t, **renames) if renames else t


def renamed(axes: Sequence[Axis], others: Sequence[Axis]) -> list[Move]:
    """The moves from some axes to others, one after the other."""
    return [([a], [b]) for a, b in zip(axes, others, strict=True)]


def axiswise(v: Value, w: Value, skip: Sequence[int] = (), drop: int = 0, drop_w: int = 0) -> list[Move]:
    """The moves from the axes of one value to those of another, axis by axis."""
    pairs = enumerate(zip(v.axes[drop:], w.axes[drop_w:], strict=True))
    return [([a], [b]) for i, (a, b) in pairs if i not in skip]


def whole(v: Value, t: Any) -> md.Tensor:
    """The tensor of a value with all its dims, in the order of its axes, and with its dtype."""
    t = t if isinstance(t, md.Tensor) else md.full((), t, dtype=v.dtype)
    if v.is_key:
        return full(t, [*dims(v.axes), t.dims[-1]])
    return full(md.cast(t, v.dtype) if t.dtype != v.dtype else t, dims(v.axes))


def wholes(step: BodyStep, xs: Sequence[Any]) -> list[md.Tensor]:
    return [whole(v, x) for v, x in zip(step.ins, xs, strict=True)]


def single(t: md.Tensor, axis: Part) -> tuple[md.Tensor, md.Dim]:
    """The tensor with one dim for an axis, whatever its parts, and that dim."""
    if isinstance(axis, md.Dim):
        return (t if axis in t.dims else md.broadcast(t, [*t.dims, axis])), axis
    atoms = dims([axis])
    if len(atoms) == 1:
        return (t if atoms[0] in t.dims else md.broadcast(t, [*t.dims, atoms[0]])), atoms[0]
    new = fresh(axis.size)
    return fit(md.broadcast(t, [*t.dims, new]) if not atoms else t, ([axis], [new])), new


def moved(step: BodyStep, x: Any, k: int = 0) -> Any:
    """Operand k with the result's dims for the axes that pass."""
    v, out = step.ins[k], step.outs[0]
    kept = [(i, t) for n, i, t in step.pairs() if n == k and isinstance(t, int) and v.shape[i] == out.shape[t]]
    return fit(x, *(([v.axes[i]], [out.axes[t]]) for i, t in kept))


def constant(v: Value) -> Any:
    """A constant as a number, or as a tensor."""
    if v.is_key:
        return md.tensor(v.const, dims(v.axes))
    array = np.asarray(v.const).astype(v.dtype)
    if array.size == 1:
        return array.reshape(())[()]
    return md.tensor(array.reshape([d.size for d in dims(v.axes)]), dims(v.axes))


def stored(v: Value) -> tuple[md.Dim, ...]:
    """The dims of an input or a result."""
    return (*dims(v.axes), WORD) if v.is_key else dims(v.axes)


def spec_of(v: Value) -> Any:
    return md.spec(stored(v), "uint32" if v.is_key else v.dtype)


def in_dims(v: Value, xs: Sequence[Any]) -> Any:
    """An argument as an array with one axis for each dim; None for a type without values.

    `xs` are all arrays of the arguments. Those of equal layers are stacked.
    """
    own = [xs[i] for i in v.places]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in own):
        return None
    x = jnp.stack([jnp.asarray(x, v.dtype) for x in own]) if v.is_stacked else own[0]
    x = jax.random.key_data(x) if v.is_key else jnp.asarray(x, v.dtype)
    return x.reshape([d.size for d in stored(v)])


def in_axes(x: Any, shape: Sequence[md.Dim], v: Value) -> Any:
    """An array with these dims in the axes of a value."""
    wanted = stored(v)
    x = x if tuple(shape) == wanted else jnp.transpose(x, [list(shape).index(d) for d in wanted])
    return jax.random.wrap_key_data(x.reshape((*v.shape, 2))) if v.is_key else jnp.reshape(x, v.shape)
