"""Rows of operations that move elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ops.slicing import swap_blocks

from .operands import INTS, REAL, X, size_of
from .row import INDEX, In, Row

# ruff: noqa: E501, E731 - a table: a row is a line, and its functions are lambdas or have a name beside it
# fmt: off


def shapes() -> Iterator[Row]:
    every = (*REAL, *INTS)
    cube = In("a b c")
    yield Row("rename", lambda x: md.rename(x, b="c"), (X,), np.asarray, every)
    yield Row("transpose", lambda x: md.transpose(x, "c a b"), (cube,), lambda x: x.transpose(2, 0, 1), every)
    yield Row("flatten", lambda x: md.flatten(x, "a b", "n"), (cube,), lambda x: x.reshape(-1, x.shape[2]), every)
    yield Row("flatten_apart", lambda x: md.flatten(x, "c a", "n"), (cube,), lambda x: x.transpose(1, 2, 0).reshape(x.shape[1], -1), every)
    unflat = lambda x: md.unflatten(x, "n", [Dim("a", size_of(x, "n") // 2), Dim("d", 2)])
    yield Row("unflatten", unflat, (In("n=a*2 b"),), lambda x: x.reshape(-1, 2, x.shape[1]), every)
    again = lambda x: md.reshape(x, [Dim("d", 2), Dim("n", size_of(x, "a") * size_of(x, "b") // 2)])
    yield Row("reshape", again, (In("a b=2*c"),), lambda x: x.reshape(2, -1), every)
    mixed = lambda x: md.reshape(x, [Dim("a", size_of(x, "a")), Dim("n", size_of(x, "m") // 3 * size_of(x, "c")), Dim("e", 3)])
    yield Row("reshape_mixed", mixed, (In("a m=3*b c"),), lambda x: x.reshape(x.shape[0], -1, 3), every)
    yield Row("concat", lambda x, y: md.concat([x, y, x], "b"), (X, In("b=c a")), lambda x, y: np.concatenate([x, y.T, x], 1), every)
    yield Row("stack", lambda x, y: md.stack([x, y], "new"), (X, In("b a")), lambda x, y: np.stack([x, y.T]), every)
    ends = lambda x: [part * (k + 1) for k, part in enumerate(md.unstack(x, "b"))][-2:]
    yield Row("unstack", ends, (X,), lambda x: [x[:, k] * (k + 1) for k in range(x.shape[1])][-2:], every)
    yield Row("squeeze", lambda x: md.squeeze(x, "e"), (In("a e=1 b"),), lambda x: x[:, 0], every)
    yield Row("tril", lambda x: md.tril(x, "a", "b", -1), (X,), lambda x: np.tril(x, -1), every)
    yield Row("triu", lambda x: md.triu(x, "b", "a", 1), (In("a b c"),), lambda x: np.triu(x.T, 1).T, every)
    swapped = lambda x: x.reshape(2, 3, x.shape[0] // 6, x.shape[1]).swapaxes(0, 1).reshape(x.shape)
    yield Row("swap_blocks", lambda x: swap_blocks(x, "n", 2, 3), (In("n=6*a b"),), swapped, every)
    part = lambda x: md.slice(x, "a", size_of(x, "a") // 3, size_of(x, "a") - size_of(x, "a") // 3)
    yield Row("slice", part, (X,), lambda x: x[len(x) // 3 :], every)
    yield Row("slice_stride", lambda x: md.slice(x, "b", 0, (size_of(x, "b") + 1) // 2, 2), (X,), lambda x: x[:, ::2], every)
    place = In("", "place:a", INDEX)
    start = lambda i, last: min(max(int(i), 0), last)
    yield Row("dynamic_slice", lambda x, i: md.dynamic_slice(x, "a", i, 1), (X, place), lambda x, i: x[start(i, len(x) - 1) :][:1], every, empty=False)
    clipped = lambda x, i: md.dynamic_slice(x, "a", i, size_of(x, "a"))
    yield Row("dynamic_slice_clipped", clipped, (X, place), lambda x, i: x, every)
    update = lambda x, u, i: md.dynamic_update_slice(x, u, "a", i)

    def updated(x: Any, u: Any, i: Any) -> Any:
        x, i = np.array(x), start(i, len(x) - u.shape[1])
        x[i : i + u.shape[1]] = u.T
        return x

    yield Row("dynamic_update_slice", update, (In("a=d+1 b"), In("b a=d"), In("", "place:d", INDEX)), updated, every)
    yield Row("pad", lambda x: md.pad(x, "a", 1, 2, value=3), (X,), lambda x: np.pad(x, [(1, 2), (0, 0)], constant_values=3), every)
    yield Row("pad_zero", lambda x: md.pad(x, "b", 2, 0), (X,), lambda x: np.pad(x, [(0, 0), (2, 0)]), every)
    yield Row("pad_cut", lambda x: md.pad(x, "a", -1, 2), (In("a=a+1 b"),), lambda x: np.pad(x[1:], [(0, 2), (0, 0)]), every)

    def spread(x: Any) -> Any:
        out = np.zeros((max(0, 3 * len(x) - 2), x.shape[1]), x.dtype)
        out[::3] = x
        return np.pad(out, [(1, 0), (0, 0)])

    yield Row("pad_inner", lambda x: md.pad(x, "a", 1, 0, inner=2), (X,), spread, every)
    modes: list[Any] = ["edge", "reflect", "wrap"]
    for mode in modes:
        padded = lambda x, mode=mode: md.pad(x, "a", 1, min(1, size_of(x, "a") - 1), mode=mode)
        yield Row(f"pad_{mode}", padded, (In("a=a+1 b"),), lambda x, mode=mode: np.pad(x, [(1, min(1, len(x) - 1)), (0, 0)], mode), every, empty=False, composed=True)
    yield Row("repeat", lambda x: md.repeat(x, "a", 3), (X,), lambda x: np.repeat(x, 3, 0), every, composed=True)
    yield Row("tile", lambda x: md.tile(x, "b", 3), (X,), lambda x: np.tile(x, (1, 3)), every, composed=True)
    for method in ("nearest", "linear", "cubic"):
        image = lambda x, method=method: jax.image.resize(x, (2 * len(x) - 1, x.shape[1]), method)
        yield Row(f"resize_{method}", lambda x, method=method: md.resize(x, "a", 2 * size_of(x, "a") - 1, method), (X,), image, ("float32",), exact=method == "nearest", empty=False, odd=method == "nearest", composed=True)
    heads = lambda x: md.rearrange(x, "a n=(b d) c -> m=(c b) d a", d=2)
    yield Row("rearrange", heads, (In("a n=b*2 c"),), lambda x: np.moveaxis(x.reshape(len(x), -1, 2, x.shape[2]), (0, 3), (3, 0)).reshape(-1, 2, len(x)), every, composed=True)
    yield Row("reverse", lambda x: md.reverse(x, "a"), (X,), lambda x: x[::-1], every)
    yield Row("roll", lambda x: md.roll(x, "a", 2), (X,), lambda x: np.roll(x, 2, 0), every)
    yield Row("roll_back", lambda x: md.roll(x, "b", -1), (X,), lambda x: np.roll(x, -1, 1), every)
    yield Row("shift", lambda x: md.shift(x, "b", 1), (X,), lambda x: np.pad(x, [(0, 0), (1, 0)])[:, : x.shape[1]], every)
    yield Row("shift_back", lambda x: md.shift(x, "b", -2, fill=1), (X,), lambda x: np.pad(x, [(0, 0), (0, 2)], constant_values=1)[:, 2:], every)
