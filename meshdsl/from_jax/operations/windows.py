"""Convolutions, and reductions over windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import meshdsl as md

from ..axes import dims
from ..replay import Replay, operation
from ..steps import BodyStep
from ..tensors import Move, Part, fit, fresh, single, whole, wholes
from ..unions import is_depthwise
from .fallback import through_local


@operation("conv_general_dilated")
def convolution(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    p, (v, _), (out,) = step.params, step.ins, step.outs
    d, (x, k) = p["dimension_numbers"], wholes(step, xs)
    x, k, features = _channels(step, x, k)
    names, made = dict[str, str](), list[tuple[str, int]]()
    for s, m, t in zip(d.lhs_spec[2:], d.rhs_spec[2:], d.out_spec[2:], strict=True):
        x, a = single(x, v.axes[s])
        k, b = single(k, step.ins[1].axes[m])
        own = fresh(b.size, "window")
        k, b = md.rename(k, **{b.name: own}), own
        names[a.name] = b.name
        made.append((a.name, t))
    per = lambda values: {name: int(n) for (name, _), n in zip(made, values, strict=True)}  # noqa: E731
    padding = {name: tuple(map(int, each)) for (name, _), each in zip(made, p["padding"], strict=True)}
    batch, channels = (out.axes[i] for i in d.out_spec[:2])
    kept = [*dims([batch, *features]), *(name for name, _ in made)]
    y = md.conv(x, k, window=names, out=kept, stride=per(p["window_strides"]), padding=padding, dtype=out.dtype,
                dilation=per(p["rhs_dilation"]), base_dilation=per(p["lhs_dilation"]))  # fmt: skip
    for name, t in made:
        if out.shape[t] == 1:
            y = md.squeeze(y, name)
    moves = [([md.Dim(name, out.shape[t])], [out.axes[t]]) for name, t in made if out.shape[t] != 1]
    return fit(y, (features, [channels]), *moves)


def _channels(step: BodyStep, x: md.Tensor, k: md.Tensor) -> tuple[md.Tensor, md.Tensor, list[Part]]:
    """The image and the kernel with one dim for the channels that are summed, and the parts of the result's channels.

    A group dim is in both, and the first part: of the image's channels, or of its batch.
    """
    p, (v, w), (out,) = step.params, step.ins, step.outs
    d, (of_features, of_batch) = p["dimension_numbers"], (p["feature_group_count"], p["batch_group_count"])
    (n, c), (o, i), (on, oc) = d.lhs_spec[:2], d.rhs_spec[:2], d.out_spec[:2]
    size, groups, features = w.shape[i], list[Part](), list[Part]([out.axes[oc]])
    if is_depthwise(step):
        groups = features
    elif of_features * of_batch > 1:
        groups = [fresh(of_features * of_batch, "group")]
        features = [*groups, *_dim(w.shape[o] // (of_features * of_batch), "feature")]
    taken = {*dims([*out.axes, *features]), *dims([v.axes[n], w.axes[o], *(v.axes[s] for s in d.lhs_spec[2:])])}
    shared = [
        a for a in (v.axes[c], w.axes[i]) if a.size == size and len(a.atoms()) == 1 and taken.isdisjoint(dims([a]))
    ]
    summed = list[Part](shared[:1]) or _dim(size, "channel")
    batch, own = ([*groups, out.axes[on]], summed) if of_batch > 1 else ([out.axes[on]], [*groups, *summed])
    x, k = fit(x, ([v.axes[n]], batch), ([v.axes[c]], own)), fit(k, ([w.axes[o]], features), ([w.axes[i]], summed))
    return x, k, features


def _dim(size: int, name: str) -> list[Part]:
    return [fresh(size, name)] if size > 1 else []


def _pooled(step: BodyStep, x: md.Tensor) -> tuple[md.Tensor, list[dict[str, Any]], list[Move]]:
    """The operand with one dim for each windowed axis; windows, strides and paddings; the moves to the result."""
    p, v, out = step.params, step.ins[-1], step.outs[0]
    options: list[dict[str, Any]] = [{}, {}, {}]
    moves: list[Move] = []
    for i, (n, stride, padding) in enumerate(
        zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    ):
        if (n, stride, tuple(padding)) == (1, 1, (0, 0)):
            moves.append(([v.axes[i]], [out.axes[i]]))
            continue
        x, d = single(x, v.axes[i])
        for option, value in zip(options, (n, stride, tuple(padding)), strict=True):
            option[d.name] = value
        moves.append(([md.Dim(d.name, out.shape[i])], [out.axes[i]]))
    return x, options, moves


def _after(y: md.Tensor, moves: list[Move]) -> md.Tensor:
    gone = [d.name for have, want in moves for d in dims(have) if d.size == 1 and not dims(want)]
    return fit(md.squeeze(y, gone) if gone else y, *(m for m in moves if dims(m[1])))


@operation("reduce_window_max", "reduce_window_sum", "reduce_window_min")
def pool(replay: Replay, step: BodyStep, xs: list[Any]) -> Any:
    p, v = step.params, step.ins[0]
    if {*p["base_dilation"], *p["window_dilation"]} != {1} or not np.issubdtype(v.dtype, np.floating):
        return through_local(replay, step, xs)
    x, (window, stride, padding), moves = _pooled(step, whole(v, xs[0]))
    if not window:
        return fit(x, *moves)
    if step.primitive == "reduce_window_max":
        return _after(md.max_pool(x, window, stride, padding), moves)
    if step.primitive == "reduce_window_min":
        return _after(-md.max_pool(-x, window, stride, padding), moves)
    for name, (low, high) in padding.items():
        x = md.pad(x, name, low, high) if low or high else x
    y = md.avg_pool(x, window, stride)
    return _after(y * np.asarray(math.prod(window.values()), v.dtype)[()], moves)
