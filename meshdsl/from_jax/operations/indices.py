"""Gathers, scatters and orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import meshdsl as md

from ..axes import dims
from ..replay import Replay, operation
from ..steps import BodyStep, Value
from ..tensors import Move, Part, axiswise, fit, fresh, single, whole, wholes
from .fallback import through_local
from .shapes import Change, along


def _index(v: Value, t: Any) -> md.Tensor:
    """An index in a dtype that counts places."""
    t = whole(v, t)
    return t if np.dtype(v.dtype).name in ("int32", "uint32") else md.cast(t, "int32")


@operation("gather")
def gather(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (v, i), out, p = step.ins, step.outs[0], step.params
    d, mode = p["dimension_numbers"], str(p["mode"])
    if not d.collapsed_slice_dims and i.shape == (len(d.start_index_map),) and not d.operand_batching_dims:
        if "FILL" not in mode:
            return _at_one_start(step, xs)
        return through_local(replay, step, xs)
    over = _taken_axis(step)
    if over is None:
        return through_local(replay, step, xs)
    x, index = whole(v, xs[0]), _index(i, xs[1])
    if len(d.start_index_map) > 1:  # an axis that is taken whole has no index but 0
        index = md.unstack(index, dims(i.axes[-1:])[0])[d.start_index_map.index(over)]
    table = [(k, s, t) for k, s, t in step.pairs() if isinstance(t, int)]
    x = fit(x, *(([v.axes[s]], [out.axes[t]]) for k, s, t in table if k == 0))
    index = fit(index, *(([i.axes[s]], [out.axes[t]]) for k, s, t in table if k == 1))
    if v.shape[over] == 1:
        x = md.broadcast(x, [*x.dims, dim := fresh(1, "place")])
    else:
        x, dim = single(x, v.axes[over])
    if dim in dims(out.axes):
        new = fresh(dim.size, "place")
        x, dim = md.rename(x, **{dim.name: new}), new
    if "CLIP" in mode:
        index = md.minimum(md.maximum(index, 0), dim.size - 1)
    y = replay.preferred(md.take(x, index, dim))
    if "FILL" in mode:
        inside = index < dim.size if np.dtype(index.dtype).kind == "u" else (index >= 0) & (index < dim.size)
        y = md.where(inside, y, _fill(p["fill_value"], out.dtype))
    return y


def _taken_axis(step: BodyStep) -> int | None:
    """The axis of which a gather takes single places, and the others whole; None for other gathers."""
    d, sizes, shape = step.params["dimension_numbers"], step.params["slice_sizes"], step.ins[0].shape
    found = [a for a in d.start_index_map if sizes[a] != shape[a] or a in d.collapsed_slice_dims]
    others = [a for a in range(len(shape)) if a not in (*found[:1], *d.operand_batching_dims)]
    filled = "FILL" in str(step.params["mode"]) and len(d.start_index_map) > 1
    single = len(found) == 1 and sizes[found[0]] == 1 and all(sizes[a] == shape[a] for a in others)
    return found[0] if single and not filled else None


def _fill(value: Any, dtype: Any) -> Any:
    """What JAX reads out of range: NaN, the smallest integer, the largest unsigned one, or True."""
    dtype = np.dtype(dtype)
    if value is None:
        value = {"i": lambda: np.iinfo(dtype).min, "u": lambda: np.iinfo(dtype).max, "b": lambda: True}.get(
            dtype.kind, lambda: np.nan
        )()
    return np.asarray(value).astype(dtype)[()]


def _at_one_start(step: BodyStep, xs: list[Any]) -> Any:
    """A slice at one start, which XLA moves so that the slice fits."""
    (v, i), out, sizes = step.ins, step.outs[0], step.params["slice_sizes"]
    over, starts = step.params["dimension_numbers"].start_index_map, whole(i, xs[1])
    each = md.unstack(starts, starts.dims[0]) if len(over) > 1 else [starts]
    changes: dict[int, Change] = {}
    for axis, start in zip(over, each, strict=True):
        if sizes[axis] != v.shape[axis]:
            first = md.cast(start, "int32")
            changes[axis] = lambda x, d, first=first, n=sizes[axis]: md.dynamic_slice(x, d, first, n)
    return along(step, xs[0], changes) if changes else fit(whole(v, xs[0]), *axiswise(v, out))


_SCATTERS: dict[str, Callable[..., md.Tensor]] = {
    "scatter": md.scatter_set, "scatter-add": md.scatter_add, "scatter-mul": md.scatter_mul,
    "scatter-max": md.scatter_max, "scatter-min": md.scatter_min,
    "scatter-sub": lambda x, i, u, over, drop: md.scatter_add(x, i, -u, over, drop=drop),
}  # fmt: skip


@operation(*_SCATTERS)
def scatter(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (v, i, u), out, p = step.ins, step.outs[0], step.params
    d, mode = p["dimension_numbers"], str(p["mode"])
    over = tuple(d.scatter_dims_to_operand_dims)
    one = len(over) == 1 and over == tuple(d.inserted_window_dims)
    pair = dict(zip(d.scatter_indices_batching_dims, d.operand_batching_dims, strict=True))
    windows = [k for k in range(len(v.shape)) if k not in (*over, *pair.values())]
    whole_windows = one and all(
        v.shape[w] == u.shape[k] for k, w in zip(sorted(d.update_window_dims), windows, strict=True)
    )
    if not whole_windows or v.shape[over[0]] == 1:
        return through_local(replay, step, xs)
    x, index, update = whole(v, xs[0]), _index(i, xs[1]), whole(u, xs[2])
    places = [k for k in range(len(u.shape)) if k not in d.update_window_dims]
    used, of_index, of_update = {*dims(v.axes)}, list[Move](), list[Move]()
    for k, place in enumerate(places):
        axis: Part = v.axes[pair[k]] if k in pair else i.axes[k]
        if k not in pair and not used.isdisjoint(dims([axis])):
            axis = fresh(i.shape[k], "update")
        of_index.append(([i.axes[k]], [axis]))
        of_update.append(([u.axes[place]], [axis]))
    of_update += [([u.axes[k]], [v.axes[w]]) for k, w in zip(sorted(d.update_window_dims), windows, strict=True)]
    x, dim = single(x, v.axes[over[0]])
    index, update = fit(index, *of_index), fit(update, *of_update)
    if "CLIP" in mode:
        index = md.minimum(md.maximum(index, 0), dim.size - 1)
    y = _SCATTERS[step.primitive](x, index, update, dim, drop=True)
    return fit(y, ([dim], [out.axes[over[0]]]), *axiswise(v, out, skip=over))


@operation("sort")
def sort(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    """A sort by the first operand; the others are taken in its order."""
    if step.params["num_keys"] != 1:
        return through_local(replay, step, xs)
    axis, out, results = step.params["dimension"], step.outs[0], list[Any]()
    ts = [single(fit(t, *axiswise(v, out)), out.axes[axis]) for v, t in zip(step.ins, wholes(step, xs), strict=True)]
    first, d = ts[0]
    if out.shape[axis] == 1:
        return [fit(t, *axiswise(v, o)) for v, o, t in zip(step.ins, step.outs, wholes(step, xs), strict=True)]
    order = md.argsort(first, d) if len(ts) > 1 else None
    for k, (v, (t, _), result) in enumerate(zip(step.ins, ts, step.outs, strict=True)):
        counts = v.maker is not None and v.maker.primitive == "iota" and v.maker.params["dimension"] == axis
        y = md.sort(t, d) if k == 0 else md.cast(order, v.dtype) if counts else md.take(t, order, d)
        results.append(fit(y, ([d], [result.axes[axis]]), *axiswise(out, result, skip=[axis])))
    return results


@operation("top_k")
def top_k(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, results = step.ins[0], list[Any]()
    axis = step.params.get("axis", -1) % len(v.shape)
    x, d = single(whole(v, xs[0]), v.axes[axis])
    k = fresh(step.params["k"], "top")
    for y, out in zip(md.top_k(x, d, k), step.outs, strict=True):
        y = md.squeeze(y, k.name) if k.size == 1 else fit(y, ([k], [out.axes[axis]]))
        results.append(md.cast(fit(y, *axiswise(v, out, skip=[axis])), out.dtype))
    return results
