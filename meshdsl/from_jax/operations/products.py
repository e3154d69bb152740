"""Products, sums and other reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import meshdsl as md

from ..axes import dims
from ..replay import NotImportedError, Replay, operation
from ..steps import BodyStep
from ..tensors import Move, Part, fit, fresh, renamed, single, whole, wholes


@operation("dot_general")
def dot_general(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (over, _), (v, w), (out,) = step.params["dimension_numbers"], step.ins, step.outs
    moves: tuple[list[Move], list[Move]] = ([], [])
    for k, i, t in step.pairs():
        if isinstance(t, int):
            moves[k].append(([step.ins[k].axes[i]], [out.axes[t]]))
    taken, summed = set(dims(out.axes)), list[Part]()
    for i, j in zip(*over, strict=True):
        choices: list[Part] = [v.axes[i], w.axes[j], fresh(v.shape[i], "sum")]
        axis = next(a for a in choices if taken.isdisjoint(dims([a])))
        if v.axes[i].root is not w.axes[j].root and v.shape[i] > 1:
            a, b, c = (" ".join(d.name for d in dims([each])) for each in (v.axes[i], w.axes[j], axis))
            if a != b:
                replay.note(step, f"a product sums over {a} and {b}, which are two dims; both are {c} here")
        taken.update(dims([axis]))
        summed.append(axis)
        moves[0].append(([v.axes[i]], [axis]))
        moves[1].append(([w.axes[j]], [axis]))
    _same_numbers(replay, step)
    ts = [
        fit(whole(u, x) if not isinstance(x, md.Tensor) else x, *m) for u, x, m in zip(step.ins, xs, moves, strict=True)
    ]
    present = {d for t in ts for d in t.dims}
    times = int(np.prod([d.size for d in dims(summed) if d not in present], dtype=np.int64))
    y = md.einsum(*ts, out=[d for d in dims(out.axes) if d in present], dtype=out.dtype)
    y = replay.preferred(y)
    return y * np.asarray(times, out.dtype)[()] if times != 1 else y


def _same_numbers(replay: Replay, step: BodyStep) -> None:
    precision = step.params.get("precision")
    if precision is not None and any(
        "DEFAULT" not in str(each).upper() for each in (precision if isinstance(precision, tuple) else (precision,))
    ):
        replay.note(step, f"the precision {precision} of a product is not kept; set jax.default_matmul_precision")


# each reduction, and what equal elements along dims that a tensor lacks do to its result
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "reduce_sum": (md.sum, lambda y, n: y * n), "reduce_prod": (md.prod, lambda y, n: y ** int(n)),
    **{f"reduce_{name}": (f, lambda y, n: y)
       for name, f in (("max", md.max), ("min", md.min), ("and", md.all), ("or", md.any))},
}  # fmt: skip


@operation(*REDUCTIONS)
def reduction(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out, over = step.ins[0], step.outs[0], step.params["axes"]
    if step.primitive in ("reduce_and", "reduce_or") and v.dtype != np.bool_:
        raise NotImportedError("it works on the bits of integers here\n  write it as a comparison of booleans")
    function, repeated = REDUCTIONS[step.primitive]
    x = xs[0] if isinstance(xs[0], md.Tensor) else whole(v, xs[0])
    gone = [d for d in dims(v.axes[i] for i in over) if d in x.dims]
    times = math.prod(d.size for d in dims(v.axes[i] for i in over) if d not in x.dims)
    y = md.cast(function(x, gone), out.dtype) if gone else x
    return _kept(step, repeated(y, np.asarray(times, out.dtype)[()]) if times != 1 else y)


def _kept(step: BodyStep, y: Any) -> Any:
    """The result of a reduction, with the dims of the result's axes."""
    kept = [a for i, a in enumerate(step.ins[0].axes) if i not in step.params["axes"]]
    return fit(y, *renamed(kept, step.outs[0].axes))


@operation("argmax", "argmin")
def extreme_index(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out, (i,) = step.ins[0], step.outs[0], step.params["axes"]
    x, d = single(whole(v, xs[0]), v.axes[i])
    y = md.cast((md.argmax if step.primitive == "argmax" else md.argmin)(x, d), out.dtype)
    return _kept(step, y)


@operation("ragged_dot_general")
def ragged_dot(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    (over_x, over_w), _ = step.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (v, w, sizes), out = step.ins, step.outs[0]
    if len(v.shape) != 2 or len(w.shape) != 3 or len(over_x) != 1:
        raise NotImportedError(
            "only rows [token, io] times matrices [group, io, out] are an operation here\n"
            "  import the forward function, and let md.grad make the gradient"
        )
    x, k, counts = wholes(step, xs)
    rows, columns = 1 - over_x[0], 3 - over_w[0]
    x = fit(x, ([v.axes[over_x[0]]], [w.axes[over_w[0]]]), ([v.axes[rows]], [out.axes[0]]))
    k = fit(k, ([w.axes[columns]], [out.axes[1]]))
    group, token = dims([w.axes[0]])[0], dims([out.axes[0]])[0]
    ends = md.cumsum(fit(counts, ([sizes.axes[0]], [w.axes[0]])), group)
    after = md.broadcast(md.cast(md.iota(token), ends.dtype), [token, group]) >= md.broadcast(ends, [token, group])
    owner = md.sum(md.cast(after, "int32"), group)
    return md.grouped_dot(x, k, owner, by=group, over=dims([w.axes[over_w[0]]])[0])
