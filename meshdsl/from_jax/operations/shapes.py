"""Operations that move, merge, cut and join axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import meshdsl as md

from ..axes import dims
from ..replay import Replay, operation
from ..steps import BodyStep
from ..tensors import WORD, Move, axiswise, fit, fresh, full, moved, single, whole, wholes

Change = Callable[[md.Tensor, md.Dim], md.Tensor]


@operation("broadcast_in_dim", "transpose", "squeeze")
def same_elements(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return moved(step, xs[0])


@operation("reshape")
def reshape(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return fit(xs[0], *step.groups)


@operation("iota")
def iota(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    dtype = np.dtype(step.params["dtype"])
    if not step.outs[0].shape[step.params["dimension"]] > 1:
        return np.zeros((), dtype)[()]
    total: Any = None
    for d in reversed(dims([step.outs[0].axes[step.params["dimension"]]])):
        each = md.iota(d, dtype)
        stride = 1 if total is None else math.prod(e.size for e in total.dims)
        total = each if total is None else md.broadcast(each, [d, *total.dims]) * np.asarray(stride, dtype)[()] + total
    return total


def along(step: BodyStep, x: Any, changes: dict[int, Change]) -> Any:
    """Change the first operand along some axes, one after the other; an axis may get another size."""
    v, out = step.ins[0], step.outs[0]
    x, moves = whole(v, x), axiswise(v, out, skip=list(changes))
    for i, change in changes.items():
        x, d = single(x, v.axes[i])
        x = change(x, d)
        if out.shape[i] == 1:
            x = md.squeeze(x, d.name)
        else:
            moves.append(([md.Dim(d.name, out.shape[i])], [out.axes[i]]))
    return fit(x, *moves)


@operation("slice")
def cut(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    p, changes = step.params, dict[int, Change]()
    strides = p["strides"] or [1] * len(step.ins[0].shape)
    for i, (a, b, s, n) in enumerate(
        zip(p["start_indices"], p["limit_indices"], strides, step.ins[0].shape, strict=True)
    ):
        if (a, b, s) != (0, n, 1):
            changes[i] = lambda x, d, a=a, n=-(-(b - a) // s), s=s: md.slice(x, d, a, n, s)
    return along(step, xs[0], changes)


@operation("pad")
def pad(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    changes: dict[int, Change] = {
        i: lambda x, d, c=c: md.pad(x, d, c[0], c[1], xs[1], inner=c[2])
        for i, c in enumerate(step.params["padding_config"])
        if tuple(c) != (0, 0, 0)
    }
    return along(step, xs[0], changes)


@operation("rev")
def reverse(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return along(
        step, xs[0], dict.fromkeys((i for i in step.params["dimensions"] if step.ins[0].shape[i] > 1), md.reverse)
    )


@operation("cumsum", "cumprod")
def running(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    function = md.cumsum if step.primitive == "cumsum" else md.cumprod
    return along(step, xs[0], {step.params["axis"]: lambda x, d: function(x, d, reverse=step.params["reverse"])})


@operation("dynamic_slice")
def dynamic_slice(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out = step.ins[0], step.outs[0]
    changes: dict[int, Change] = {
        i: lambda x, d, i=i: md.dynamic_slice(x, d, _start(xs[1 + i]), out.shape[i])
        for i in range(len(v.shape))
        if v.shape[i] != out.shape[i]
    }
    return along(step, xs[0], changes)


def _start(x: Any) -> Any:
    """The start of a dynamic slice, which JAX may count in any integer dtype."""
    return md.cast(x, "int32") if isinstance(x, md.Tensor) else md.tensor(np.int32(x))


@operation("dynamic_update_slice")
def dynamic_update_slice(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, u, out = step.ins[0], step.ins[1], step.outs[0]
    x, update = whole(v, xs[0]), whole(u, xs[1])
    partial = [i for i in range(len(v.shape)) if v.shape[i] != u.shape[i]]
    update = fit(update, *axiswise(u, v, skip=partial))
    places: list[tuple[md.Dim, Any]] = []
    for i in partial:
        x, d = single(x, v.axes[i])
        part = md.Dim(d.name, u.shape[i])
        if u.shape[i] == 1:
            update = md.broadcast(update, [*update.dims, part])
        else:
            update = fit(update, ([u.axes[i]], [part]))
        places.append((d, _start(xs[2 + i])))
    if not partial:
        return fit(update, *axiswise(v, out))
    sizes = {d.name: d.size for d in update.dims}

    def written(x: md.Tensor, places: list[tuple[md.Dim, Any]]) -> md.Tensor:
        (d, start), *rest = places
        inner = (
            written(md.dynamic_slice(x, d, start, sizes[d.name]), rest) if rest else full(update, _sized(x, sizes, d))
        )
        return md.dynamic_update_slice(x, inner, d.name, start)

    x = written(x, places)
    back: list[Move] = [([d], [v.axes[i]]) for i, (d, _) in zip(partial, places, strict=True)]
    return fit(fit(x, *back), *axiswise(v, out))


def _sized(x: md.Tensor, sizes: dict[str, int], d: md.Dim) -> list[md.Dim]:
    """The dims of x, where d has the size of the update."""
    return [md.Dim(e.name, sizes[e.name]) if e.name == d.name else e for e in x.dims]


@operation("split")
def split(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (v,), axis, start, results = step.ins, step.params["axis"], 0, list[Any]()
    x = whole(v, xs[0])
    if step.parts:
        part, *rest = v.axes[axis].atoms()
        for out, y in zip(step.outs, md.unstack(x, dims([part])[0]), strict=True):
            results.append(fit(y, (rest, [out.axes[axis]]), *axiswise(v, out, skip=[axis])))
        return results
    x, d = single(x, v.axes[axis])
    for out, n in zip(step.outs, step.params["sizes"], strict=True):
        y = md.slice(x, d, start, n)
        y = md.squeeze(y, d.name) if n == 1 else y
        moves: list[Move] = [([md.Dim(d.name, n)], [out.axes[axis]])] if n != 1 else []
        results.append(fit(y, *axiswise(v, out, skip=[axis]), *moves))
        start += n
    return results


@operation("concatenate")
def concatenate(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    axis, out, ts = step.params["dimension"], step.outs[0], wholes(step, xs)
    part, rest = out.axes[axis].atoms()[:1], out.axes[axis].atoms()[1:]
    sizes = [a.size for a in rest]
    if rest and part[0].size == len(ts) and all([a.size for a in v.axes[axis].atoms()] == sizes for v in step.ins):
        each = [d for d in dims(out.axes) if d != dims(part)[0]]
        pairs = zip(step.ins, ts, strict=True)
        alike = [fit(t, (v.axes[axis].atoms(), rest), *axiswise(v, out, skip=[axis])) for v, t in pairs]
        return md.stack([full(t, each) for t in alike], dims(part)[0])
    name, parts = fresh(1).name, list[md.Tensor]()
    if len(out.axes[axis].atoms()) == 1:
        name = dims([out.axes[axis]])[0].name
    others = [d for i, a in enumerate(out.axes) if i != axis for d in dims([a])]
    for v, t in zip(step.ins, ts, strict=True):
        own = md.Dim(name, v.shape[axis])
        moves: list[Move] = [([v.axes[axis]], [own])] if own.size != 1 else []
        t = fit(t, *axiswise(v, out, skip=[axis]), *moves)
        parts.append(full(t, [*others, own]))
    return fit(md.concat(parts, name), ([md.Dim(name, out.shape[axis])], [out.axes[axis]]))


@operation("stack")
def stack(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    out, axis = step.outs[0], step.params["axis"]
    rest = [a for i, a in enumerate(out.axes) if i != axis]
    ts = [
        fit(t, *(([a], [b]) for a, b in zip(v.axes, rest, strict=True)))
        for v, t in zip(step.ins, wholes(step, xs), strict=True)
    ]
    if out.shape[axis] == 1:
        return ts[0]
    d, words = fresh(out.shape[axis]), [WORD] if out.is_key else []
    return fit(md.stack([full(t, [*dims(rest), *words]) for t in ts], d), ([d], [out.axes[axis]]))


@operation("unstack")
def unstack(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, axis = step.ins[0], step.params["axis"]
    x, d = single(whole(v, xs[0]), v.axes[axis])
    rest = [a for i, a in enumerate(v.axes) if i != axis]
    return [
        fit(y, *(([a], [b]) for a, b in zip(rest, out.axes, strict=True)))
        for y, out in zip(md.unstack(x, d), step.outs, strict=True)
    ]


@operation("tile")
def tile(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    """Copies along an axis are a new major dim, which is merged with the axis."""
    v, out, x = step.ins[0], step.outs[0], whole(step.ins[0], xs[0])
    moves: list[Move] = []
    for i, (a, b, n) in enumerate(zip(v.axes, out.axes, step.params["reps"], strict=True)):
        if n > 1:
            copies = fresh(n)
            x = md.broadcast(x, [copies, *x.dims])
            x, d = (x, None) if v.shape[i] == 1 else single(x, a)
            moves.append(([copies] if d is None else [copies, d], [b]))
        else:
            moves.append(([a], [b]))
    return fit(x, *moves)
