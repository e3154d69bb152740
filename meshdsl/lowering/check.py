"""The law of a program: the stored sharding of every value is the one that the rule of its equation infers.

A loop or a branch follows the law when its operands are sharded as its bodies take them, its results as the bodies
return them, and its bodies follow it too. The row that a body sees is a slice along the stacked dim, which is
replicated; a predicate is replicated and complete, so that all devices go the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..dims import names
from ..errors import InternalError
from ..ir import Eqn, Graph, Op, Var
from ..layouts import Sharding
from .asynchrony import check_pairs
from .labels import out_shardings
from .program import Program

__all__ = ["check"]

Pairs = Iterator[tuple[str, Var, Var]]  # a role, and two values of it that are sharded alike


def check(program: Program, made_by: str) -> Program:
    """The program itself; raises `InternalError`, naming the pass, where a stored sharding breaks the law."""
    check_pairs(program, made_by)
    _check(program, made_by)
    return program


def _check(program: Program, made_by: str) -> None:
    for var in (*program.ins, *(v for eqn in program.eqns for v in eqn.outs)):
        lacking = [dim for dim, _ in var.sharding.split if dim not in names(var.shape)]
        if lacking:
            raise InternalError(
                f"{made_by}: {var} is stored as {var.sharding}: split by {lacking[0]!r}, which it lacks"
            )
        program.local_shape(var)
    for eqn in program.eqns:
        for problem in _problems(eqn, program):
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} {problem}")
        for _, body in eqn.graphs():
            assert isinstance(body, Program)
            _check(body, made_by)


def _problems(eqn: Eqn, program: Program) -> Iterator[str]:
    if isinstance(eqn.op, Op) and eqn.op.control:
        yield from _control_problems(eqn)
        return
    inferred: Sequence[Sharding | None]
    if isinstance(eqn.op, Op):
        inferred = out_shardings(eqn)
    else:
        inferred = [eqn.op.step(eqn.ins[0].sharding, program.mesh)]
    for var, sharding in zip(eqn.outs, inferred, strict=True):
        if sharding is not None and sharding != var.sharding:
            yield f"stores {var.sharding}, its rule infers {sharding} from {[v.sharding for v in eqn.ins]}"


def _control_problems(eqn: Eqn) -> Iterator[str]:
    pairs = {"scan": _scan_pairs, "while_loop": _while_pairs, "cond": _cond_pairs}[eqn.op.name]
    for role, outer, inner in pairs(eqn):
        if outer.sharding != inner.sharding:
            yield f"has {role} stored as {outer.sharding}, and its body stores it as {inner.sharding}"
    for predicate in _predicates(eqn):
        if predicate.sharding != Sharding():
            yield f"has a predicate stored as {predicate.sharding}; it must be replicated and complete"


def _scan_pairs(eqn: Eqn) -> Pairs:
    body: Graph = eqn.params["body"]
    consts, carries = eqn.params["consts"], eqn.params["carries"]
    first = consts + carries
    yield from _alike("a constant", eqn.ins[:consts], body.ins[:consts])
    yield from _alike("a carry", eqn.ins[consts:first], body.ins[consts:first])
    yield from _alike("a carry", body.ins[consts:first], body.outs[:carries])
    yield from _alike("a stack and its row", eqn.ins[first:], body.ins[first:])
    yield from _alike("a result", eqn.outs, body.outs)


def _while_pairs(eqn: Eqn) -> Pairs:
    test: Graph = eqn.params["test"]
    body: Graph = eqn.params["body"]
    for graph in (test, body):
        yield from _alike("an operand", eqn.ins, graph.ins)
    yield from _alike("a carry", body.ins[eqn.params["consts"] :], body.outs)
    yield from _alike("a result", eqn.outs, body.outs)


def _cond_pairs(eqn: Eqn) -> Pairs:
    for branch in (eqn.params["yes"], eqn.params["no"]):
        yield from _alike("an operand", eqn.ins[1:], branch.ins)
        yield from _alike("a result", eqn.outs, branch.outs)


def _predicates(eqn: Eqn) -> tuple[Var, ...]:
    if eqn.op.name == "while_loop":
        return eqn.params["test"].outs
    return eqn.ins[:1] if eqn.op.name == "cond" else ()


def _alike(role: str, outer: Sequence[Var], inner: Sequence[Var]) -> Pairs:
    for a, b in zip(outer, inner, strict=True):
        yield role, a, b
