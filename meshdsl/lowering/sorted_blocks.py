"""The local steps of a sort along a sharded dim. Only lowering creates them, around exchanges of whole blocks.

Each operation takes and returns a run of elements as one value, or as two: the elements and their global indices. With
indices, runs are sorted by element (NaN last), then by index, so the sort is stable. Padding has the value that sorts
last and indices beyond all elements, so it also sorts after real elements of that value. Without indices, equal
elements are interchangeable: -0 with 0, any NaN with any other, and padding with real elements of its value.
"""

# pyright: standard
# (kernels work on arrays of NumPy or JAX, as those in ops do)

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backend import Local
from ..dims import Dim
from ..ir import Fuses, Op, Type
from ..ops.index_map import one_label, replaced


def last(dtype: np.dtype) -> Any:
    """The value that sorts last in a dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(np.nan, np.nan)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    return True if dtype == np.dtype(bool) else jnp.iinfo(dtype).max


def _begin(c: Local, x: Any, *, over: Dim, run: Dim, place: Any) -> Any:
    """Sort the block, with all padding last: the dim's padding, and padding up to the run's stored size."""
    axis = c.ins[0].position(over)
    position = c.positions(c.ins[0], over)
    fill = c.xp.asarray(last(x.dtype), x.dtype)
    x = c.xp.where(position < over.size, x, fill)
    more = c.outs[0].size(run) - x.shape[axis]
    pads = [(0, more if i == axis else 0) for i in range(x.ndim)]
    x = c.xp.pad(x, pads, constant_values=last(x.dtype)) if more else x
    if place is None:
        return (c.xp.sort_by((x,), axis)[0],)
    position = c.xp.broadcast_to(position.astype(place), c.ins[0].sizes)
    position = c.xp.pad(position, pads, constant_values=run.size - 1) if more else position
    return c.xp.sort_by((x, position), axis)


def _begin_type(x: Type, *, over: Dim, run: Dim, place: Any) -> tuple[Type, ...]:
    shape = replaced(x.dims, over, run)
    return (Type(shape, x.dtype),) if place is None else (Type(shape, x.dtype), Type(shape, place))


BEGIN_SORT = Op(
    "begin_sort",
    type=_begin_type,
    kernel=_begin,
    rule=lambda x, *, over, run, place: one_label((over,), (x,), run, results=1 if place is None else 2),
    inside_blocks=True,
)


def _keep(c: Local, *items: Any, run: Dim, part: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """Merge this device's run with its partner's; keep the lower half (part -1) or the upper half (1).

    A device without a partner (part 0) keeps its run.
    """
    n = len(items) // 2
    own, partner = items[:n], items[n:]
    axis = c.ins[0].position(run)
    size = own[0].shape[axis]
    sorted_items = c.xp.sort_by(tuple(c.xp.concatenate([a, b], axis) for a, b in zip(own, partner, strict=True)), axis)
    side = c.xp.asarray(np.array(part, np.int32))[c.index(axes)]
    lower, upper = ((slice(None),) * axis + (half,) for half in (slice(0, size), slice(size, None)))
    halves = (c.xp.where(side < 0, b[lower], b[upper]) for b in sorted_items)
    return tuple(c.xp.where(side == 0, a, b) if 0 in part else b for a, b in zip(own, halves, strict=True))


KEEP_PART = Op(
    "keep_part",
    type=lambda *items, run, part, axes: items[: len(items) // 2],
    kernel=_keep,
    fuses=Fuses.PICK,
    inside_blocks=True,
)
