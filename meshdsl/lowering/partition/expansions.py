"""Operations along a split dim that lower to several equations: local work, a collective, local work.

`EXPANSIONS` maps an operation to its labels while the dim may stay split, and to the function that builds its
equations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ...control.associative import ASSOCIATIVE_SCAN, BLOCK_SCAN, BLOCK_SUMMARY, JOIN_SUMMARIES, labels
from ...dims import Dim, names
from ...ir import Because, Cause, Eqn, Labels, Op, Var, named
from ...layouts import Sharding
from ...layouts.sharding import Axes
from ...ops.conv import CONV
from ...ops.masking import identity
from ...ops.ordering import CUMSUM, SORT, TOP_K
from ...ops.pooling import COUNT_EQUAL, MAX_POOL, SUM_EQUAL, SUM_POOL
from ...ops.printing import PRINT
from ...ops.reductions import PROD
from ...ops.reshape import RESHAPE
from .. import blocks
from . import reshapes, sorting, windows
from .index_map import gathered, resized
from .scope import Scope

Assigned = Mapping[str, Axes]


@dataclass(frozen=True)
class Expansion:
    """The lowering of an operation along a split dim.

    `needed` returns whether `build` is required under an assignment of axes to labels; otherwise the equation stays
    unchanged.
    """

    labels: Callable[[Scope, Eqn], Labels]
    needed: Callable[[Scope, Eqn, Assigned], bool]
    build: Callable[[Scope, Eqn, Sequence[Var], Assigned, Sequence[Var]], None]
    sums: bool = True  # whether a vanishing label leaves a pending sum
    # (equation, number of an operand) -> its dims along which `build` drops padding, if they are split
    trimmed: Callable[[Eqn, int], Collection[str]] = lambda eqn, k: ()


def _by_name(scope: Scope, eqn: Eqn) -> Labels:
    return Labels(tuple(named(v.dims) for v in eqn.ins), tuple(named(v.dims) for v in eqn.outs))


def _along(param: str) -> Callable[[Scope, Eqn, Assigned], bool]:
    """The check that the dim in this parameter is split."""
    return lambda scope, eqn, assigned: bool(assigned.get(eqn.params[param].name))


def _summary(eqn: Eqn, what: str, dim: Dim) -> Cause:
    return Cause(Because.SUMMARY, eqn.op.name, (dim.name,), what=what)


def _cumsum(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Assigned, outs: Sequence[Var]) -> None:
    """Sum within each block, all-gather the blocks' totals, and add the totals of the preceding blocks."""
    dim, reverse = eqn.params["dim"], eqn.params["reverse"]
    axes = assigned[dim.name]
    (x,) = ins
    x = scope.masked(x, (dim,), 0, eqn) if reverse else x  # in reverse order, the padding comes first
    parts = scope.fresh_dim(f"{dim.name}__parts", scope.setting.mesh.count(axes))
    sums, totals = Var(x.dims, x.dtype, "", x.sharding), resized(x, dim, parts, axes)
    scope.add(blocks.BLOCK_CUMSUM, [x], [sums], eqn, dim=dim, reverse=reverse)
    scope.add(blocks.BLOCK_TOTAL, [sums], [totals], eqn, dim=dim, parts=parts, reverse=reverse)
    totals = gathered(scope, eqn, totals, parts, axes, _summary(eqn, "a total for", dim))
    scope.add(blocks.ADD_PARTS, [sums, totals], outs, eqn, dim=dim, parts=parts, reverse=reverse, axes=axes)


def _associative_scan(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Assigned, outs: Sequence[Var]) -> None:
    """Scan each block, all-gather one summary of each, and combine the block with those before it."""
    dim, axes = eqn.params["dim"], assigned[eqn.params["dim"].name]
    parts = scope.fresh_dim(f"{dim.name}__parts", scope.setting.mesh.count(axes))
    scanned = [Var(x.dims, x.dtype, "", x.sharding) for x in ins]
    scope.add(BLOCK_SCAN, ins, scanned, eqn, **eqn.params)
    summaries = [resized(x, dim, parts, axes) for x in ins]
    scope.add(BLOCK_SUMMARY, scanned, summaries, eqn, **eqn.params, parts=parts)
    cause = _summary(eqn, "a summary for", dim)
    others = [gathered(scope, eqn, x, parts, axes, cause) for x in summaries]
    scope.add(JOIN_SUMMARIES, [*scanned, *others], outs, eqn, **eqn.params, parts=parts, axes=axes)


def _prod(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Assigned, outs: Sequence[Var]) -> None:
    """Multiply within each block, all-gather the products, and multiply them on every device."""
    (x,), over = ins, eqn.params["over"]
    cut = {d: assigned[d.name] for d in over if assigned.get(d.name)}
    parts = {d: scope.fresh_dim(f"{d.name}__parts", scope.setting.mesh.count(axes)) for d, axes in cut.items()}
    split = dict(x.sharding.split) | {parts[d].name: axes for d, axes in cut.items()}
    shape = tuple(parts.get(d, d) for d in x.dims if d in parts or d not in over)
    y = Var(shape, x.dtype, "", Sharding.of({d: split[d] for d in names(shape) if d in split}))
    scope.add(blocks.BLOCK_PROD, [x], [y], eqn, over=over, parts=tuple(parts.items()))
    for d, axes in cut.items():
        y = gathered(scope, eqn, y, parts[d], axes, _summary(eqn, "a product for", d))
    scope.add(eqn.operation, [y], outs, eqn, over=tuple(parts.values()))


def _top_k(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Assigned, outs: Sequence[Var]) -> None:
    """Take each block's k best, all-gather them, and pick the k best of all on every device."""
    over, k = eqn.params["over"], eqn.params["k"]
    axes = assigned[over.name]
    n = scope.setting.mesh.count(axes)
    (x,) = ins
    x = scope.masked(x, (over,), identity("low", x.dtype), eqn)
    parts = scope.fresh_dim(f"{over.name}__parts", n * min(k.size, scope.setting.extents.local(over, n)))
    best = resized(x, over, parts, axes)
    best_parts = [best, Var(best.dims, outs[1].dtype, "", best.sharding)]
    scope.add(blocks.BLOCK_TOP_K, [x], best_parts, eqn, over=over, parts=parts)
    cause = _summary(eqn, f"the {k.size} best of", over)
    values, index = (gathered(scope, eqn, v, parts, axes, cause) for v in best_parts)
    place = Var(outs[1].dims, outs[1].dtype, "", outs[1].sharding)
    scope.add(blocks.MERGE_TOP_K, [values], [outs[0], place], eqn, parts=parts, k=k)
    scope.add(blocks.PICK, [index, place], [outs[1]], eqn, parts=parts, k=k)


def _print(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Assigned, outs: Sequence[Var]) -> None:
    """Name the axes of the mesh, so that of several copies the first device's is printed."""
    scope.add(PRINT, ins, outs, eqn, **eqn.params, axes=tuple(scope.setting.mesh.axes))


EXPANSIONS: dict[Op, Expansion] = {
    PRINT: Expansion(_by_name, lambda scope, eqn, assigned: True, _print),
    CUMSUM: Expansion(_by_name, _along("dim"), _cumsum),
    ASSOCIATIVE_SCAN: Expansion(
        lambda scope, eqn: labels([v.type for v in eqn.ins], eqn.params["f"], eqn.params["dim"].name),
        _along("dim"),
        _associative_scan,
    ),
    PROD: Expansion(
        _by_name,
        lambda scope, eqn, assigned: any(assigned.get(d.name) for d in eqn.params["over"]),
        _prod,
        sums=False,
    ),
    TOP_K: Expansion(
        lambda scope, eqn: Labels(
            (named(eqn.ins[0].dims),), tuple(named(v.dims, [eqn.params["k"].name]) for v in eqn.outs)
        ),
        _along("over"),
        _top_k,
        sums=False,
    ),
    RESHAPE: Expansion(reshapes.labels, reshapes.needed, reshapes.build),
    SORT: Expansion(_by_name, _along("over"), sorting.build),
    **dict.fromkeys(
        (CONV, SUM_POOL, MAX_POOL, COUNT_EQUAL, SUM_EQUAL),
        Expansion(windows.labels, windows.needed, windows.build, trimmed=windows.trimmed),
    ),
}
