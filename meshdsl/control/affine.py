"""The gradient of an associative scan: the cotangents obey a linear recurrence in the other direction.

With y[i] = f(y[i-1], x[i]), the cotangent of y[i] is c[i] = ct[i] + A[i+1]' c[i+1], where A[i] is the derivative of
f(y[i-1], x[i]) with respect to y[i-1]; that of x[i] is B[i]' c[i]. If f is elementwise, A[i] is a small matrix at each
place, and the recurrence is an associative scan of affine maps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..dims import Dim
from ..ops.creation import zeros_like
from ..ops.dtypes import cast, kind
from ..ops.elementwise import add, where
from ..ops.indexing import iota
from ..ops.reductions import broadcast
from ..ops.reshape import transpose
from ..ops.slicing import shift
from ..trace import Tensor, as_tensor, trace
from .autodiff import pullback
from .combine import Combine
from .loops import scan

Entries = dict[tuple[int, int], Tensor]  # the entries of a matrix that are not zero everywhere
Scan = Callable[..., Sequence[Tensor]]


def cotangents(
    f: Combine, dim: Dim, reverse: bool, xs: Sequence[Tensor], ys: Sequence[Tensor], cts: Sequence[Tensor], run: Scan
) -> list[Tensor | None]:
    """The cotangents of the elements; `run(f, xs, dim, reverse)` is the scan."""
    on = [i for i, x in enumerate(xs) if kind(x.dtype) in "fc"]
    before = [shift(y, dim, -1 if reverse else 1) for y in ys]
    alike = all(set(x.dims) == set(xs[0].dims) for x in xs)
    pairs = (_by_scan if f.elementwise and alike else _by_loop)(f, dim, reverse, on, before, xs, cts, run)
    first = iota(dim) == (dim.size - 1 if reverse else 0)  # nothing was combined with the first element
    result: list[Tensor | None] = [None] * len(xs)
    for i, (total, pulled) in zip(on, pairs, strict=True):
        result[i] = where(first, total, pulled)
    return result


def _pulled(f: Combine, dim: Dim, on: Sequence[int], before: Sequence[Tensor], xs: Sequence[Tensor]) -> Any:
    """From cotangents of the results to those of both operands, at all places at once."""
    graph, _, _ = trace(f.along(dim), [_first(x, dim).type for x in (*before, *xs)])
    n = len(xs)
    active = [i % n in on for i in range(2 * n)]
    _, back = pullback(graph, [_first(x, dim) for x in (*before, *xs)], active)

    def pull(cts: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        grads = back([_first(cts[i], dim) if i in cts else None for i in range(n)])
        return [grads[i] for i in on], [grads[n + i] for i in on]

    return pull


def _first(x: Tensor, dim: Dim) -> Tensor:
    return transpose(x, (dim, *(d for d in x.dims if d != dim)))


def _by_scan(
    f: Combine, dim: Dim, reverse: bool, on: Sequence[int], before: Any, xs: Any, cts: Any, run: Scan
) -> list[tuple[Tensor, Tensor]]:
    pull = _pulled(f, dim, on, before, xs)
    matrix: Entries = {}
    for j in on:
        ones = broadcast(as_tensor(1, xs[j].dtype), xs[j].dims)
        for k, slope in zip(on, pull({j: ones})[0], strict=True):
            if slope is not None:  # of result j by operand k; the map of cotangents is the transpose, one place later
                matrix[k, j] = shift(slope, dim, 1 if reverse else -1)
    totals = _recurrence(matrix, {i: cts[i] for i in on}, dim, not reverse, run)
    pulled = pull(totals)[1]
    return [(totals[i], zeros_like(xs[i]) if g is None else g) for i, g in zip(on, pulled, strict=True)]


def _recurrence(matrix: Entries, cts: dict[int, Tensor], dim: Dim, reverse: bool, run: Scan) -> dict[int, Tensor]:
    """The running results of the maps c -> ct + matrix c, from `reverse`'s end."""
    entries, rows = sorted(_closed(set(matrix))), sorted(cts)
    zero = {key: zeros_like(cts[key[0]]) for key in entries if key not in matrix}
    elements = [*(cast(matrix.get(key, zero.get(key)), cts[key[0]].dtype) for key in entries), *(cts[k] for k in rows)]
    elements = [_first(x, dim) for x in elements]

    def then(*ins: Tensor) -> list[Tensor]:
        n, m = len(ins) // 2, len(entries)
        (first, held), (second, ct) = (
            (dict(zip(entries, part[:m], strict=True)), dict(zip(rows, part[m:], strict=True)))
            for part in (ins[:n], ins[n:])
        )
        products: list[Tensor] = []
        for k, c in entries:
            column = {j: x for (j, other), x in first.items() if other == c}
            terms = _terms(second, k, column)
            start = next(terms, None)
            products.append(zeros_like(ct[k]) if start is None else functools.reduce(add, terms, start))
        return [*products, *(functools.reduce(add, _terms(second, k, held), ct[k]) for k in rows)]

    free = frozenset(d.name for x in elements for d in x.dims if d != dim)
    maps = Combine(then, "affine", free, True, 2 * len(elements))
    states = run(maps, elements, dim, reverse)
    return dict(zip(rows, states[len(entries) :], strict=True))


def _terms(matrix: Entries, k: int, vector: Mapping[int, Tensor]) -> Iterator[Tensor]:
    """The terms of row k of a matrix times a vector, whose other entries are zero."""
    return (cast(x * vector[j], x.dtype) for (row, j), x in matrix.items() if row == k and j in vector)


def _closed(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The entries that products of such matrices can have."""
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return pairs
        pairs = pairs | more


def _by_loop(
    f: Combine, dim: Dim, reverse: bool, on: Sequence[int], before: Any, xs: Any, cts: Any, run: Scan
) -> list[tuple[Tensor, Tensor]]:
    n = len(xs)

    def step(carry: list[Tensor], row: Any) -> Any:
        held, elements, ct = row
        totals = [add(a, b) for a, b in zip(carry, ct, strict=True)]
        graph, _, _ = trace(lambda *ins: list(f.flat(*ins)), [x.type for x in (*held, *elements)])
        _, back = pullback(graph, [*held, *elements], [i % n in on for i in range(2 * n)])
        by = dict(zip(on, totals, strict=True))
        grads = back([by.get(i) for i in range(n)])
        cotangents = [zeros_like((*held, *elements)[i]) if g is None else g for i, g in enumerate(grads)]
        return [cotangents[i] for i in on], (totals, [cotangents[n + i] for i in on])

    start = [zeros_like(type(xs[i].type)(tuple(d for d in xs[i].dims if d != dim), xs[i].dtype)) for i in on]
    _, (totals, pulled) = scan(
        step, start, (list(before), list(xs), [cts[i] for i in on]), over=dim, reverse=not reverse
    )
    return list(zip(totals, pulled, strict=True))
