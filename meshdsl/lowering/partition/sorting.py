"""Sort along a split dim, so that each device stores its block of the sorted dim, by the cheapest of three methods.

* `other dim`: an all_to_all moves the split to another dim; each device sorts, and a second
  all_to_all moves the split back.
* `merge`: Batcher's merge exchange on sorted blocks (Knuth, The Art of Computer Programming 3, 5.2.2,
  algorithm M), correct for any number of blocks; of two merged blocks, one device keeps the lower half.
* `gather`: all_gather, then every device sorts everything.

The first two methods store at most two blocks per device. Ties are broken in this order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...dims import Dim
from ...ir import NO_CAUSE, Because, Cause, Collective, Eqn, Op, Var
from ...layouts.sharding import Axes
from ...ops.dtypes import CAST
from ...ops.index_map import IndexMap, Piece
from .. import sorted_blocks as blocks
from ..collectives import AllToAll, Slice
from .index_map import Exchange, gathered, lower_index_map, resized
from .scope import Scope

Items = list[Var]  # the elements, or the elements and their indices


@dataclass(frozen=True)
class _Job:
    """One sort to be lowered: along `over`, split over `axes` into n blocks."""

    scope: Scope
    eqn: Eqn
    x: Var
    outs: Sequence[Var]
    axes: Axes
    values: bool  # whether the sorted elements are read
    places: bool  # whether the indices are read

    @property
    def over(self) -> Dim:
        return self.eqn.params["over"]

    @property
    def n(self) -> int:
        return self.scope.setting.mesh.count(self.axes)

    @property
    def length(self) -> int:
        return self.scope.setting.extents.padded(self.over) // self.n

    def add(
        self, op: Op | Collective, ins: Sequence[Var], outs: Sequence[Var], cause: Cause = NO_CAUSE, **params: object
    ):
        self.scope.add(op, ins, outs, self.eqn, cause, **params)

    def each(self, items: Items, op: Collective, cause: Cause) -> Items:
        """Apply the same collective to the elements and to their indices."""
        results = [Var(v.dims, v.dtype, "", op.step(v.sharding, self.scope.setting.mesh)) for v in items]
        for v, out in zip(items, results, strict=True):
            self.add(op, [v], [out], cause)
        return results


def build(scope: Scope, eqn: Eqn, ins: Sequence[Var], assigned: Mapping[str, Axes], outs: Sequence[Var]) -> None:
    """Add the equations of the cheapest method."""
    users = [scope.demand.sums.users.get(v, []) or [v for out in scope.graph.outs if out is v] for v in eqn.outs]
    job = _Job(scope, eqn, ins[0], outs, assigned[eqn.params["over"].name], bool(users[0]), bool(users[1]))
    kept, offers = scope.eqns, list[tuple[int, list[Eqn]]]()
    for method in (_by_other_dim, _by_merges, _by_gathering):
        scope.eqns = []
        if method(job):
            offers.append((_bytes_sent(job, scope.eqns), scope.eqns))
    scope.eqns = kept
    scope.eqns += min(offers, key=lambda offer: offer[0])[1]


def _bytes_sent(job: _Job, eqns: Sequence[Eqn]) -> int:
    """The bytes that one device sends, without those for results that are never read."""
    mesh, extents = job.scope.setting.mesh, job.scope.setting.extents
    live = {v for v, read in zip(job.outs, (job.values, job.places), strict=True) if read}
    total = 0
    for eqn in reversed(eqns):
        if live.isdisjoint(eqn.outs):
            continue
        live.update(eqn.ins)
        if eqn.collective is not None:
            v = eqn.ins[0]
            local = math.prod(extents.local_shape(v.dims, v.sharding, mesh)) * v.dtype.itemsize
            total += eqn.collective.bytes_sent(local, mesh)
    return total


def _by_gathering(job: _Job) -> bool:
    cause = Cause(Because.WHOLE, "sort", (job.over.name,), what="; merging blocks would send more")
    x = gathered(job.scope, job.eqn, job.x, job.over, job.axes, cause)
    sorted_values = [Var(v.dims, v.dtype, "", x.sharding) for v in job.outs]
    job.add(job.eqn.operation, [x], sorted_values, **job.eqn.params)
    for v, out in zip(sorted_values, job.outs, strict=True):
        job.add(Slice(job.over.name, job.axes), [v], [out], Cause(Because.READ, "sort"))
    return True


def _by_other_dim(job: _Job) -> bool:
    setting = job.scope.setting
    local = setting.extents.local_shape(job.x.dims, job.x.sharding, setting.mesh)
    others = (d for d, size in zip(job.x.dims, local, strict=True) if d != job.over and size and size % job.n == 0)
    to = next(others, None)
    if to is None:
        return False
    out = AllToAll(job.over.name, to.name, job.axes)
    (x,) = job.each([job.x], out, Cause(Because.CUT_INSTEAD, "sort", (job.over.name, to.name)))
    sorted_values = [Var(v.dims, v.dtype, "", x.sharding) for v in job.outs]
    job.add(job.eqn.operation, [x], sorted_values, **job.eqn.params)
    back = Cause(Because.BACK, "sort", (to.name, job.over.name))
    for v, result in zip(sorted_values, job.outs, strict=True):
        job.add(AllToAll(to.name, job.over.name, job.axes), [v], [result], back)
    return True


def _begin(job: _Job, run: Dim) -> Items:
    """Pad the blocks to the run's stored size and sort each of them."""
    place = np.dtype(np.uint8 if run.size <= 1 << 8 else np.uint16 if run.size <= 1 << 16 else np.int32)
    kinds = [job.x.dtype, place] if job.places else [job.x.dtype]
    items = [dataclasses.replace(resized(job.x, job.over, run, job.axes), dtype=kind) for kind in kinds]
    job.add(blocks.BEGIN_SORT, [job.x], items, over=job.over, run=run, place=place if job.places else None)
    return items


def _finish(job: _Job, items: Items, run: Dim) -> None:
    """Move the elements of the sorted run to the blocks of the sorted dim."""
    for v, out in zip(items, job.outs, strict=False):
        moved = out if v.dtype == out.dtype else Var(out.dims, v.dtype, "", out.sharding)
        moves = IndexMap((run,), job.over, (Piece(0, 0, 0, job.over.size),))
        lower_index_map(job.scope, job.eqn, [v], moves, job.axes, moved)
        if moved is not out:
            job.add(CAST, [moved], [out], dtype=out.dtype)


def merges(n: int) -> list[list[tuple[int, int]]]:
    """Rounds of (lower, upper) blocks to merge; no block appears twice in a round.

    >>> merges(3)
    [[(0, 2)], [(0, 1)], [(1, 2)]]
    """
    rounds: list[list[tuple[int, int]]] = []
    p = top = 1 << max(0, (n - 1).bit_length() - 1)
    while p and n > 1:
        q, r, d = top, 0, p
        while True:
            rounds.append([(i, i + d) for i in range(n - d) if i & p == r])
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return [pairs for pairs in rounds if pairs]


def _by_merges(job: _Job) -> bool:
    run = job.scope.fresh_dim(f"{job.over.name}__run", job.n * job.length)
    items = _begin(job, run)
    rounds = merges(job.n)
    for k, pairs in enumerate(rounds):
        part = [0] * job.n
        for lower, upper in pairs:
            part[lower], part[upper] = -1, 1
        routes = tuple(sorted([*pairs, *((b, a) for a, b in pairs)]))
        exchange = Exchange(run.name, job.axes, routes)
        cause = Cause(Because.MERGE, "sort", (job.over.name,), amounts=(k + 1, len(rounds)))
        came = job.each(items, exchange, cause)
        kept = [Var(v.dims, v.dtype, "", v.sharding) for v in items]
        job.add(blocks.KEEP_PART, [*items, *came], kept, run=run, part=tuple(part), axes=job.axes)
        items = kept
    _finish(job, items, run)
    return True
