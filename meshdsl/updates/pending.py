"""Find the pending sums (gradients) from which an update starts, and the order in which they are scattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir import Cond, Eqn, Graph, Linear, Var
from ..layouts import Extents, Layout, Mesh, Sharding
from ..lowering.partition.control import LARGE_STACK
from ..ops.dtypes import CAST, CAST_PARTS
from ..ops.reshape import RENAME, RESHAPE
from ..ops.slicing import SLICE
from ..passes.accumulate import running_sum
from .regions import is_loop_over_parts, uses

SAME_ELEMENTS = (RENAME, RESHAPE, SLICE)  # a pipeline's gradients have the dims stage and layer_of_stage


@dataclass(frozen=True)
class ShardedGraph:
    """A graph with the sharding of every value, as the partitioner found it without this pass."""

    graph: Graph
    results: Sequence[str]  # the paths of the results
    shardings: Mapping[Var, Sharding]
    mesh: Mesh
    extents: Extents
    layout: Layout
    regather: bool = False  # gather weights again for the backward pass; those of a loop's layers one layer at a time

    def is_pending(self, v: Var) -> bool:
        """True if a value is a sum that is not complete."""
        sharding = self.shardings.get(v, Sharding())
        return bool(sharding.partial) and sharding.kind == "sum"

    def bytes(self, v: Var) -> int:
        """The bytes of a value that one device stores."""
        sizes = self.extents.local_shape(v.dims, self.shardings.get(v, Sharding()).whole(), self.mesh)
        return math.prod(sizes) * v.dtype.itemsize


@dataclass(frozen=True)
class Sums:
    """The pending sums from which an update starts, in one graph.

    `loops` has the sums inside loop bodies, by loop and result number; `branches` those inside branches, by branch and
    name of its graph.
    """

    in_graph: tuple[Var, ...] = ()
    loops: tuple[tuple[Eqn, int, Sums], ...] = ()
    branches: tuple[tuple[Eqn, str, Sums], ...] = ()

    def all(self) -> Iterator[Var]:
        """Iterate over every pending sum."""
        yield from self.in_graph
        for _, _, inner in (*self.loops, *self.branches):
            yield from inner.all()


def pending_sums(placed: ShardedGraph, graph: Graph, out: Var) -> Sums:
    """The first pending sums from which a value is computed element by element, also through renames, loops, branches.

    A gradient starts in the backward pass: sums of activations, which it also depends on, do not count.
    """
    return _pending_sums(placed, graph, [out])[0]


def _pending_sums(placed: ShardedGraph, graph: Graph, outs: Sequence[Var]) -> tuple[Sums, set[Var]]:
    """The pending sums of several values, and all values from which they are computed up to these."""
    producers = graph.producers
    queue, seen = list(outs), set(outs)
    sums: list[Var] = []
    loops: list[tuple[Eqn, int, Sums]] = []
    branches: list[tuple[Eqn, str, Sums]] = []
    while queue:
        v = queue.pop()
        eqn, before = producers.get(v), list[Var]()
        if eqn is not None:
            if (inner := _in_loop(placed, eqn, v)) is not None:
                loops.append(inner)
                continue
            found, before = (
                _in_branches(placed, eqn, v) if isinstance(eqn.control, Cond) else ([], _same_elements(eqn, v))
            )
            branches += found
            if eqn.backward:  # its forward operands are factors, not gradients
                before = [x for x in before if x not in producers or producers[x].backward]
        if _is_first(placed, v, eqn, before):
            sums.append(v)
            continue
        queue += [x for x in before if x not in seen]
        seen.update(before)
    return Sums(_totals(placed, graph, sums), tuple(loops), tuple(branches)), seen


def _is_first(placed: ShardedGraph, v: Var, eqn: Eqn | None, before: Sequence[Var]) -> bool:
    """True if a value is a pending sum that is not computed from others."""
    narrow = eqn is not None and eqn.op is CAST_PARTS  # devices send their rounded parts
    partial = any(placed.shardings.get(x, Sharding()).partial for x in before)
    return placed.is_pending(v) and (narrow or not partial)


def cast_each_part(graph: Graph) -> Graph:
    """The graph in which loops over parts of the data cast the parts of a sum, and not their total, to the dtype in
    which devices add them up: where each part is reduced, totals stay wide.
    """
    readers = uses(graph).readers
    eqns, now = list[Eqn](), dict[Var, Var]()  # a cast total -> the total
    for eqn in graph.eqns:
        eqn = eqn.map_graphs(cast_each_part).replace(ins=tuple(now.get(v, v) for v in eqn.ins))
        if is_loop_over_parts(eqn) and eqn.scan is not None:
            for total in eqn.outs[: eqn.scan.carries]:
                narrow, *wide = _narrow_casts(total, readers, graph.outs) or (None,)
                if narrow is not None:
                    eqn, cast = _with_cast_part(eqn, eqn.outs.index(total), narrow)
                    now |= dict.fromkeys((narrow.outs[0], *(x.outs[0] for x in wide)), total) if cast else {}
        if not (eqn.outs and eqn.outs[0] in now):
            eqns.append(eqn)
    return graph.replace(eqns=tuple(eqns), outs=tuple(now.get(v, v) for v in graph.outs))


def _narrow_casts(total: Var, readers: Mapping[Var, set[Eqn]], results: Sequence[Var]) -> list[Eqn]:
    """The cast of a total to the dtype of its reduction, and the casts back, if nothing else reads either."""
    if total in results or len(readers[total]) != 1:
        return []
    (narrow,) = readers[total]
    if narrow.op is not CAST_PARTS or narrow.outs[0] in results:
        return []
    wide = readers[narrow.outs[0]]
    back = wide and all(each.op is CAST and each.outs[0].type == total.type for each in wide)
    return [narrow, *wide] if back else []


def _with_cast_part(loop: Eqn, i: int, narrow: Eqn) -> tuple[Eqn, bool]:
    """The loop that adds up parts cast as `narrow` casts their total, and whether it adds up parts at all."""
    scan = loop.scan
    assert scan is not None
    body, carry = scan.body, scan.body.ins[scan.consts + i]
    added = running_sum(body, carry, body.outs[i])
    if added is None:
        return loop, False
    part = next(x for x in added.ins if x is not carry)
    cut, back = Var(part.dims, narrow.outs[0].dtype), Var(part.dims, part.dtype)
    casts = (
        narrow.replace(ins=(part,), outs=(cut,), backward=True),
        Eqn(CAST, (cut,), (back,), {"dtype": part.dtype}, narrow.where, True),
    )
    step = added.replace(ins=tuple(back if x is part else x for x in added.ins))
    eqns = [each for eqn in body.eqns for each in ((*casts, step) if eqn is added else (eqn,))]
    return loop.with_control(body=body.replace(eqns=tuple(eqns))), True


def _in_loop(placed: ShardedGraph, eqn: Eqn, v: Var) -> tuple[Eqn, int, Sums] | None:
    """The pending sums of one row in a loop that stacks v, or of one part in a loop that adds up v, if an update can
    start there. Parts are reduced one by one only if weights are gathered for each part too.
    """
    whole = placed.is_pending(v) and not placed.regather and placed.bytes(v) < LARGE_STACK
    if eqn.scan is None or whole:
        return None
    i, body = eqn.outs.index(v), eqn.scan.body
    one = body.outs[i]
    if i < eqn.scan.carries:
        carry = body.ins[eqn.scan.consts + i]
        added = running_sum(body, carry, one) if placed.regather and is_loop_over_parts(eqn) else None
        if added is None or not placed.is_pending(v):
            return None
        one = next(x for x in added.ins if x is not carry)
    elif body.outs.count(one) > 1:
        return None
    inner = pending_sums(placed, body, one)
    return (eqn, i, inner) if any(inner.all()) else None


def _in_branches(placed: ShardedGraph, eqn: Eqn, v: Var) -> tuple[list[tuple[Eqn, str, Sums]], list[Var]]:
    """The pending sums of a branch's result in each of its graphs, and the operands from which it is computed."""
    found: list[tuple[Eqn, str, Sums]] = []
    before: list[Var] = []
    for key, branch in eqn.graphs().items():
        inner, seen = _pending_sums(placed, branch, [branch.outs[eqn.outs.index(v)]])
        found += [(eqn, key, inner)] if any(inner.all()) else []
        before += [outer for outer, x in zip(eqn.ins[1:], branch.ins, strict=True) if x in seen]
    return found, before


def _same_elements(eqn: Eqn, v: Var) -> list[Var]:
    """The operands with the dims of a result, or the one operand that is renamed, reshaped or sliced."""
    if eqn.control is not None:
        return []
    return [x for x in dict.fromkeys(eqn.ins) if eqn.op in SAME_ELEMENTS or set(x.dims) == set(v.dims)]


def _totals(placed: ShardedGraph, graph: Graph, sums: Sequence[Var]) -> tuple[Var, ...]:
    """The sums, with sums that are only added up, or to constants, replaced by their total.

    If a weight is used several times, its gradients are then reduced once. A sum to which the weight is added is none.
    """
    if len(sums) < 2:
        return tuple(sums)
    readers, results, _ = uses(graph)
    totals = dict(zip(sums, sums, strict=True))  # latest value of a sum -> the sum, or the last addition of several
    constants = _constants(graph)
    for eqn in graph.eqns:
        read = [x for x in dict.fromkeys(eqn.ins) if x in totals]
        others = {*eqn.ins}.difference(read)
        adds_others = eqn.operation.linear is Linear.JOINT and not constants.issuperset(others)
        if (
            not read
            or adds_others
            or len(eqn.outs) != 1
            or any(len(readers[x]) + len(results.get(x, ())) > 1 for x in read)
        ):
            continue
        out = eqn.outs[0]
        if placed.is_pending(out) and set(out.dims) == set(sums[0].dims):
            ours = [totals.pop(x) for x in read]
            totals[out] = out if len(ours) > 1 else ours[0]
    return tuple(totals.values())


def _constants(graph: Graph) -> set[Var]:
    """The values that do not depend on an input."""
    found = set[Var]()
    for eqn in graph.eqns:
        if found.issuperset(eqn.ins):
            found.update(eqn.outs)
    return found
