"""Find the loop over micro-batches whose layers a layout maps to stages, and sort its equations by when they run.

A micro-batch's equations are FIXED if they read no micro-batch, BEFORE its layers, BETWEEN the forward and the backward
loop over them, and AFTER the backward loop. Only sums leave the loop, so each term of a sum can be added in the tick
that computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import jax.numpy as jnp
import numpy as np

from ...control.host import OFFLOAD
from ...dims import Dim, show
from ...errors import LayoutError, MeshdslError, at
from ...ir import Eqn, Graph, Linear, Scan, Var, acts, computed_from, dce, read_by, walk
from ...layouts import Layout, Mesh
from ...ops.elementwise import ADD
from ...ops.linear import is_linear, together
from ..accumulate import number_in_all, running_sum
from .schedule import Schedule


class Level(IntEnum):
    """When a value of a micro-batch is computed."""

    FIXED = 0
    BEFORE = 1
    BETWEEN = 2
    AFTER = 3


@dataclass(frozen=True)
class Terms:
    """The terms that a micro-batch adds to one sum, by what computes them."""

    linear: tuple[Var, ...]  # of gradients of weights alone: their sums are computed from the sums of the gradients
    between: tuple[Var, ...]
    after: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop over micro-batches, the loops over layers in its body, and the schedule of its ticks."""

    eqn: Eqn
    forward: Eqn
    backward: Eqn
    dim: Dim  # of the layers
    schedule: Schedule
    levels: dict[Var, Level]
    terms: tuple[Terms, ...]  # for each carry of the loop over micro-batches
    rows: dict[int, np.dtype]  # stacked results of the backward loop that are summed: gradients of the layers' weights
    carries: dict[int, np.dtype]  # last carries of it that sum over layers: gradients of shared weights

    @property
    def shipped(self) -> tuple[int, ...]:
        """The carries of the backward loop that go from stage to stage; the others are sums over layers."""
        return tuple(i for i in range(loop_of(self.backward).carries) if i not in self.carries)

    @property
    def body(self) -> Graph:
        """The computation of one micro-batch."""
        return loop_of(self.eqn).body


def loop_of(eqn: Eqn) -> Scan:
    """The loop of an equation that is known to be one."""
    assert isinstance(eqn.control, Scan)
    return eqn.control


def values(body: Graph, given: Sequence[Var], wanted: Sequence[Var]) -> Graph:
    """The part of a body that computes some of its values from others."""
    known = set(given)
    eqns = tuple(eqn for eqn in body.eqns if known.isdisjoint(eqn.outs))
    return dce(Graph(tuple(given), eqns, tuple(wanted)))


def find(eqn: Eqn, mesh: Mesh, layout: Layout, chunks: int = 1, late: bool = False) -> Loop | None:
    """The pipeline of an equation; None if it is no loop over micro-batches of layers that are mapped to stages.

    Raises `LayoutError`, with the user's line, for such a loop that cannot run as a pipeline.
    """
    if not isinstance(eqn.control, Scan):
        return None
    pairs = list(_pairs(eqn.control, mesh, layout))
    if not pairs:
        return None
    forward, backward = pairs[0]
    dim = loop_of(forward).dim
    stages = mesh.count(layout.axes(dim.name))
    _check(eqn, pairs, stages, chunks)
    levels = _levels(eqn.control, forward, backward)
    if max((levels[v] for v in forward.ins), default=Level.FIXED) > Level.BEFORE:
        raise _refused(forward, dim, "its layers read what a later part of the same micro-batch computes")
    terms, sums = _terms(eqn.control, backward, levels)
    carries, rows = ({i: sums[v] for i, v in enumerate(each) if v in sums} for each in _results(backward))
    return Loop(eqn, forward, backward, dim, Schedule(stages, eqn.trips, chunks, late), levels, terms, rows, carries)


def _pairs(loop: Scan, mesh: Mesh, layout: Layout) -> Iterator[tuple[Eqn, Eqn]]:
    """The forward and backward loops over layers that are mapped to stages."""
    weights = _weights(loop)
    for forward in _scans(loop):
        here = loop_of(forward)
        in_stages = mesh.count(layout.axes(here.dim.name)) > 1
        if in_stages and not forward.backward and not weights.isdisjoint(here.inputs(forward.ins)[2]):
            backward = _backward_of(forward, loop)
            if backward is not None and not _is_over_steps(loop, forward, backward):
                yield forward, backward


def _is_over_steps(loop: Scan, forward: Eqn, backward: Eqn) -> bool:
    """True if the layers read a carry that their own gradients change: then each trip is a step of training."""
    changed = computed_from(loop.body.eqns, backward.outs)
    carries = zip(loop.inputs(loop.body.ins)[1], loop.results(loop.body.outs)[0], strict=True)
    trained = [v for v, out in carries if out in changed]
    return not computed_from(loop.body.eqns, trained).isdisjoint(forward.ins)


def _scans(loop: Scan) -> list[Eqn]:
    return [eqn for eqn in loop.body.eqns if isinstance(eqn.control, Scan)]


def _weights(loop: Scan) -> set[Var]:
    """The numbers that are computed from operands that no micro-batch changes.

    Layers have such stacks. A loop over positions, as of a recurrent network, has none.
    """
    consts, _, rows = loop.inputs(loop.body.ins)
    eqns = loop.body.eqns
    return {v for v in computed_from(eqns, consts) - computed_from(eqns, rows) if v.dtype.kind in "fV"}


def _backward_of(forward: Eqn, loop: Scan) -> Eqn | None:
    """The backward loop over the same layers in reverse: one that reads the forward loop's results, if there is one."""
    here = loop_of(forward)
    after = [
        eqn
        for eqn in _scans(loop)
        if eqn.backward and loop_of(eqn).dim == here.dim and loop_of(eqn).reverse != here.reverse
    ]
    reading = [eqn for eqn in after if not set(eqn.ins).isdisjoint(forward.outs)]
    return next(iter(reading or after), None)


def _leaves(loop: Scan, i: int) -> list[Var]:
    """The terms that the body adds to carry i; the values themselves if it does not only add to it."""
    body = loop.body
    carry, out = body.ins[loop.consts + i], body.outs[i]
    added = running_sum(body, carry, out)
    if added is None:
        return []
    reads = [v for eqn in body.eqns for v in eqn.ins] + list(body.outs)
    pending, leaves = [v for v in added.ins if v is not carry], list[Var]()
    while pending:
        v = pending.pop()
        eqn = body.producers.get(v)
        if eqn is not None and eqn.op is ADD and reads.count(v) == 1 and all(x.type == v.type for x in eqn.ins):
            pending += eqn.ins
        else:
            leaves.append(v)
    return leaves


def _check(eqn: Eqn, pairs: Sequence[tuple[Eqn, Eqn]], stages: int, chunks: int) -> None:
    """Raise `LayoutError` for a loop over micro-batches that cannot run as a pipeline."""
    forward, _ = pairs[0]
    dim = loop_of(forward).dim
    if stages > dim.size:
        raise _refused(
            forward, dim, f"{dim.name!r} has {dim.size} layers for {stages} stages; a stage has at least one"
        )
    if chunks > 1:
        _check_chunks(forward, dim, eqn.trips, stages, chunks)
    _check_layers(loop_of(eqn), pairs)
    _check_bubbles(loop_of(eqn), forward)
    _check_sums(eqn, dim)


def _check_layers(loop: Scan, pairs: Sequence[tuple[Eqn, Eqn]]) -> None:
    """There is one stack of layers in stages, from the first to the last."""
    forward, _ = pairs[0]
    dim = loop_of(forward).dim
    same = [eqn for eqn in _scans(loop) if loop_of(eqn).dim == dim]
    if len(pairs) > 1 or len(same) > 2:
        other = next(eqn for pair in [*pairs, same] for eqn in pair if eqn not in pairs[0])
        raise _refused(other, dim, "a step has one stack of layers in stages, and here is a second one")
    if loop_of(forward).reverse:
        raise _refused(forward, dim, "its layers run from the last to the first")


def _check_bubbles(loop: Scan, forward: Eqn) -> None:
    """Nothing has an effect in the ticks that compute nothing of use, or leaves the device."""
    dim = loop_of(forward).dim
    if any(e.op is OFFLOAD for e, _ in walk(loop.body)):
        raise _refused(forward, dim, "it stores values in the host's memory, and the ring of a stage is on the device")
    printing = next((e for e in loop.body.eqns if acts(e)), None)
    if printing is not None:
        raise _refused(printing, dim, f"{printing.op} would run in the ticks that compute nothing too")


def _check_sums(eqn: Eqn, dim: Dim) -> None:
    """Only sums leave the loop over micro-batches."""
    loop, way_out = loop_of(eqn), "let micro-batches only add to carries, as those of md.accumulate do"
    if len(loop.body.outs) > loop.carries:
        raise _refused(eqn, dim, "the loop over micro-batches also returns one value for each of them", way_out)
    for i in range(loop.carries):
        if running_sum(loop.body, loop.body.ins[loop.consts + i], loop.body.outs[i]) is None:
            why = "a micro-batch reads what another one computed, and they run at the same time"
            raise _refused(eqn, dim, why, way_out)


def _check_chunks(forward: Eqn, dim: Dim, microbatches: int, stages: int, chunks: int) -> None:
    most = min(-(-dim.size // stages), stages)
    if chunks > most:
        why = f"{dim.size} layers in {stages} stages take chunks={most} at most, not {chunks}"
        raise _refused(forward, dim, why, f"give at most chunks={most}" if most > 1 else "leave chunks out")
    if microbatches % stages:
        why = f"{chunks} chunks need a multiple of {stages} micro-batches, not {microbatches}"
        raise _refused(forward, dim, why, "give such a multiple, or leave chunks out")


def _refused(eqn: Eqn, dim: Dim, why: str, way_out: str = "") -> MeshdslError:
    otherwise = (
        f"map {dim.name!r} to no axis, or run the step without micro-batches: then {dim.name!r} only says where "
        "weights are stored"
    )
    problem = LayoutError(
        f"the layout maps {dim.name!r} to pipeline stages, and this step cannot run in stages\n"
        f"  {why}\n  {way_out or otherwise}"
    )
    return at(problem, eqn.where)


def _levels(loop: Scan, forward: Eqn, backward: Eqn) -> dict[Var, Level]:
    body = loop.body
    levels = dict.fromkeys(body.ins[: loop.consts], Level.FIXED)
    levels |= dict.fromkeys(body.ins[loop.consts + loop.carries :], Level.BEFORE)
    for eqn in body.eqns:
        if not all(v in levels for v in eqn.ins):
            continue  # it adds to a sum
        level = max((levels[v] for v in eqn.ins), default=Level.FIXED)
        level = Level.BETWEEN if eqn is forward else Level.AFTER if eqn is backward else level
        levels |= dict.fromkeys(eqn.outs, level)
    return levels


def _terms(loop: Scan, backward: Eqn, levels: dict[Var, Level]) -> tuple[tuple[Terms, ...], dict[Var, np.dtype]]:
    """The terms of each sum, and the results of the backward loop that are summed, with the dtypes of their sums."""
    leaves = [_leaves(loop, i) for i in range(loop.carries)]
    added = Counter(v for each in leaves for v in each)
    carries = _summed_carries(loop, backward)
    carries -= _linear(loop, levels, carries, added)[1]
    rows = _results(backward)[1]
    linear, kept = _linear(loop, levels, carries.union(rows), added)
    _check_rows(loop, backward, linear, kept)

    def split(each: list[Var]) -> Terms:
        plain = [v for v in each if v not in linear]
        return Terms(
            tuple(v for v in each if v in linear),
            tuple(v for v in plain if levels[v] < Level.AFTER),
            tuple(v for v in plain if levels[v] is Level.AFTER),
        )

    terms = tuple(map(split, leaves))
    return terms, _dtypes_of_sums(loop, terms, carries.union(rows))


def _check_rows(loop: Scan, backward: Eqn, linear: set[Var], kept: set[Var]) -> None:
    """The gradients of the layers are only added to sums."""
    for v in kept.intersection(_results(backward)[1]):
        readers = [e for e in loop.body.eqns if not kept.isdisjoint(e.ins) and linear.isdisjoint(e.outs)]
        reader = next((e for e in readers if e.op is not ADD), readers[0])
        why = f"{reader.op} reads the gradient {show(v.dims)} of its layers before the micro-batches are added up"
        raise _refused(reader, loop_of(backward).dim, why, "let it read the sum that md.accumulate returns")


def _dtypes_of_sums(loop: Scan, terms: Sequence[Terms], summed: set[Var]) -> dict[Var, np.dtype]:
    """The results of the backward loop that terms are computed from, with the widest dtype of the terms' sums."""
    dtypes: dict[Var, np.dtype] = {}
    for each, total in zip(terms, loop.body.outs, strict=True):
        graph = values(loop.body, [*loop.body.ins, *summed], each.linear)
        for v in read_by(graph.eqns, graph.outs) & summed:
            dtypes[v] = jnp.promote_types(dtypes.get(v, v.dtype), total.dtype)
    return dtypes


def _linear(loop: Scan, levels: dict[Var, Level], of: set[Var], added: Counter[Var]) -> tuple[set[Var], set[Var]]:
    """Linear functions of these values and of values that no micro-batch changes, and those not only added to sums."""
    linear, counts, summed = set(of), _reads(loop), added.copy()
    fixed = {v for v, level in levels.items() if level is Level.FIXED}
    zeros, through = _zeros(loop), list[Eqn]()
    for eqn in loop.body.eqns:
        if _stays_linear(eqn, linear, fixed, zeros, added):
            linear.update(eqn.outs)
            through.append(eqn)
    for eqn in reversed(through):
        if all(counts[v] == summed[v] for v in eqn.outs):
            summed.update(eqn.ins)
    return linear, {v for v in linear if counts[v] != summed[v]}


def _stays_linear(eqn: Eqn, linear: set[Var], fixed: set[Var], zeros: set[Var], added: Counter[Var]) -> bool:
    """True if an operation is linear in those of its operands that are, and no micro-batch changes the others."""
    inside = linear.intersection(eqn.ins)
    if not inside or eqn.control or not fixed.issuperset({*eqn.ins} - inside):
        return False
    others = {*together(eqn)} - inside
    alone = bool(together(eqn)) or len(inside) == 1
    rounds = eqn.operation.linear is Linear.WIDENING and added[eqn.outs[0]] > 0  # its sum is rounded instead
    return alone and others <= zeros and (rounds or all(is_linear(eqn, v) for v in inside))


def _zeros(loop: Scan) -> set[Var]:
    """The values of the body that are zeros."""
    producers = loop.body.producers
    return {v for v in producers if number_in_all(v, producers) == 0}


def _summed_carries(loop: Scan, backward: Eqn) -> set[Var]:
    """The last carries of the backward loop that are sums over layers, from zero: gradients of shared weights."""
    there = loop_of(backward)
    (last, _), (_, first, _) = there.results(backward.outs), there.inputs(backward.ins)
    (after, _), (_, before, _) = there.results(there.body.outs), there.inputs(there.body.ins)
    each = zip(last, first, before, after, strict=True)
    return {
        v
        for v, start, x, y in each
        if number_in_all(start, loop.body.producers) == 0 and running_sum(there.body, x, y) is not None
    }


def _results(eqn: Eqn) -> tuple[Sequence[Var], Sequence[Var]]:
    """The last carries and the rows of a loop."""
    return loop_of(eqn).results(eqn.outs)


def _reads(loop: Scan) -> Counter[Var]:
    """The number of times that the equations of the loop's body read each value."""
    return Counter(v for eqn in loop.body.eqns for v in eqn.ins)
