"""Check a program: the stored sharding of every value must be the one that its equation's rule infers.

The stored size of a sharded dim is a multiple of its blocks, and so equal blocks hold all of it.
A loop or a branch is valid if its operands have the shardings of its bodies' inputs, its results those of the bodies'
results, and its bodies are valid too. A body reads a stacked value row by row, so the stacked dim must be replicated. A
predicate must be replicated and complete, so that all devices take the same branch. Only `fetch` and loops read values
in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..control.host import FETCH, host_values
from ..dims import names
from ..errors import InternalError
from ..ir import Eqn, Var, borders, known, learn, predicates, walk
from ..layouts import Sharding
from .asynchrony import check_pairs
from .labels import out_shardings
from .program import Program


def check(program: Program, made_by: str) -> Program:
    """Returns the program; raises `InternalError`, naming the pass, if a stored sharding is wrong."""
    check_pairs(program, made_by)
    _check(program, made_by)
    offloaded = host_values(program)
    for eqn, _ in walk(program) if offloaded else ():
        if not (offloaded.isdisjoint(eqn.ins) or eqn.op is FETCH or eqn.scan is not None):
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} reads a value in the host's memory")
    if not offloaded.isdisjoint(program.outs):
        raise InternalError(f"{made_by}: a result is in the host's memory")
    return program


def _check(program: Program, made_by: str) -> None:
    if known(program, "valid"):
        return
    split = [v for v in (*program.ins, *(v for eqn in program.eqns for v in eqn.outs)) if v.sharding.split]
    for var in split:
        missing = [dim for dim, _ in var.sharding.split if dim not in names(var.dims)]
        if missing:
            raise InternalError(
                f"{made_by}: {var} is stored as {var.sharding}: split by {missing[0]!r}, which it lacks"
            )
    for eqn in program.eqns:
        if not known(eqn, "valid on", program.mesh):
            for problem in _problems(eqn, program):
                raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} {problem}")
            learn(eqn, "valid on", program.mesh)
        for body in eqn.graphs().values():
            assert isinstance(body, Program)
            _check(body, made_by)
    for var in split:
        _check_blocks(program, var, made_by)
    learn(program, "valid")


def _check_blocks(program: Program, var: Var, made_by: str) -> None:
    stored = {d.name: program.extents.padded(d) for d in var.dims}
    for dim, axes in var.sharding.split:
        if stored[dim] % (blocks := program.mesh.count(axes)):
            raise InternalError(f"{made_by}: {var} stores {stored[dim]} of {dim!r} in {blocks} equal blocks")


def _problems(eqn: Eqn, program: Program) -> Iterator[str]:
    if eqn.control is not None:
        for role, outer, inner, _ in borders(eqn):
            if outer.sharding != inner.sharding:
                yield f"has {role} stored as {outer.sharding} and as {inner.sharding}"
        for predicate in predicates(eqn):
            if predicate.sharding != Sharding():
                yield f"has a predicate stored as {predicate.sharding}; it must be replicated and complete"
        return
    inferred: Sequence[Sharding | None]
    if eqn.collective is None:
        inferred = out_shardings(eqn)
    else:
        inferred = [eqn.collective.step(eqn.ins[0].sharding, program.mesh)]
    for var, sharding in zip(eqn.outs, inferred, strict=True):
        if sharding is not None and sharding != var.sharding:
            yield f"stores {var.sharding}, its rule infers {sharding} from {[v.sharding for v in eqn.ins]}"
