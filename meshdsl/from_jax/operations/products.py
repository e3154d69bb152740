"""Products, sums and other reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import meshdsl as md

from ..axes import dims
from ..replay import NotImportedError, Replay
from ..steps import BodyStep
from ..tensors import Move, Part, fit, fresh, lacking, single, whole, wholes
from .registry import operation


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


def _reduced(
    step: BodyStep, x: Any, function: Callable[..., Any], repeated: Callable[[Any, int], Any] | None = None
) -> Any:
    """Reduce over some axes; `repeated` accounts for the axes that the tensor lacks."""
    v, out, over = step.ins[0], step.outs[0], step.params["axes"]
    x = x if isinstance(x, md.Tensor) else whole(v, x)
    gone = [d for d in dims(v.axes[i] for i in over) if d in x.dims]
    times = lacking(x, [v.axes[i] for i in over])
    y = function(x, gone) if gone else x
    y = repeated(y, times) if repeated is not None and times != 1 else y
    kept = [a for i, a in enumerate(v.axes) if i not in over]
    return fit(y, *(([a], [b]) for a, b in zip(kept, out.axes, strict=True)))


def _of_dtype(step: BodyStep, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, over: md.cast(function(x, over), step.outs[0].dtype)


@operation("reduce_sum")
def reduce_sum(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return _reduced(step, xs[0], _of_dtype(step, md.sum), lambda y, n: y * np.asarray(n, step.outs[0].dtype)[()])


@operation("reduce_prod")
def reduce_prod(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    return _reduced(step, xs[0], _of_dtype(step, md.prod), lambda y, n: y**n)


@operation("reduce_max", "reduce_min", "reduce_and", "reduce_or")
def reduce_extreme(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    functions = {"reduce_max": md.max, "reduce_min": md.min, "reduce_and": md.all, "reduce_or": md.any}
    if step.primitive in ("reduce_and", "reduce_or") and step.ins[0].dtype != np.bool_:
        raise NotImportedError("it works on the bits of integers here\n  write it as a comparison of booleans")
    return _reduced(step, xs[0], functions[step.primitive])


@operation("argmax", "argmin")
def extreme_index(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    v, out, (i,) = step.ins[0], step.outs[0], step.params["axes"]
    x, d = single(whole(v, xs[0]), v.axes[i])
    y = md.cast((md.argmax if step.primitive == "argmax" else md.argmin)(x, d), out.dtype)
    kept = [a for k, a in enumerate(v.axes) if k != i]
    return fit(y, *(([a], [b]) for a, b in zip(kept, out.axes, strict=True)))


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
