"""Pairs of values that must agree at the border of a loop, branch or call: in type, and in sharding in a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .graph import Call, Cond, Eqn, Scan, Var, While


class Border(NamedTuple):
    """Two values with equal types and shardings: outside and inside a body, or inside before and after one trip.

    With `stacked`, `inner` is a slice of `outer` along its first dim.
    """

    role: str
    outer: Var
    inner: Var
    stacked: bool = False


def borders(eqn: Eqn) -> Iterator[Border]:
    """Yield every pair of values at the border of a loop, branch or call; yield nothing for other equations."""
    match eqn.control:
        case Scan() as loop:
            consts, carries, stacks = loop.inputs(eqn.ins)
            inner_consts, inner_carries, rows = loop.inputs(loop.body.ins)
            last, out_stacks = loop.results(eqn.outs)
            next_carries, out_rows = loop.results(loop.body.outs)
            yield from _pairs("a constant", consts, inner_consts)
            yield from _pairs("a first carry", carries, inner_carries)
            yield from _pairs("a carry after one trip", next_carries, inner_carries)
            yield from _pairs("a last carry", last, inner_carries)
            yield from _pairs("a stack and its rows", stacks, rows, stacked=True)
            yield from _pairs("a stacked result and its rows", out_stacks, out_rows, stacked=True)
        case While() as loop:
            _, carries = loop.inputs(loop.body.ins)
            for graph in (loop.test, loop.body):
                yield from _pairs("an operand", eqn.ins, graph.ins)
            yield from _pairs("a carry after one trip", loop.body.outs, carries)
            yield from _pairs("a last carry", eqn.outs, carries)
        case Cond() as branch:
            for graph in (branch.yes, branch.no):
                yield from _pairs("an operand", eqn.ins[1:], graph.ins)
                yield from _pairs("a result", eqn.outs, graph.outs)
        case Call() as call:
            yield from _pairs("an operand", eqn.ins, call.graph.ins)
            yield from _pairs("a result", eqn.outs, call.graph.outs)
        case None:
            return


def predicates(eqn: Eqn) -> Sequence[Var]:
    """The predicates of a loop or branch; every device must hold the same value."""
    match eqn.control:
        case While() as loop:
            return loop.test.outs
        case Cond():
            return eqn.ins[:1]
        case _:
            return ()


def _pairs(role: str, outer: Sequence[Var], inner: Sequence[Var], stacked: bool = False) -> Iterator[Border]:
    for a, b in zip(outer, inner, strict=True):
        yield Border(role, a, b, stacked)
