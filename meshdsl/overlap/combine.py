"""Combine the gradients' collectives of a planned program: several small ones become one.

The compiler of a device combines collectives up to some bytes (`network.combine` of a machine file). It cannot combine
started ones without moving their windows, so a plan does it. Only collectives on which no product of the backward
pass depends are combined (of gradients, and of updated weights): to wait for the others delays nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..ir import Eqn, Var
from ..lowering.program import Program
from ..updates.bucket_collectives import Group, Key, bucket_key, in_rounds
from .fences import is_product


def combine(program: Program, limits: Mapping[str, float]) -> Program:
    """The program with consecutive gradients' collectives of each kind combined, up to `limits[kind]` bytes each.

    `limits` counts the bytes of one device's operand or result, whichever is larger. Values, shardings and bytes sent
    stay the same. The same program if nothing is combined.
    """
    groups = [group for group in _groups(program, limits) if len(group) > 1]
    return program.replace(eqns=tuple(in_rounds(program, program.eqns, groups))) if groups else program


def _groups(program: Program, limits: Mapping[str, float]) -> Iterator[Group]:
    """Runs of collectives, in program order, that can share one."""
    alike: dict[tuple[int, Key], list[tuple[Eqn, int]]] = defaultdict(list)
    late = _read_by_updates(program)
    depth: dict[Var, int] = {}  # collectives in the longest chain to a value
    for eqn in program.eqns:
        level = max((depth.get(v, 0) for v in eqn.ins), default=0)
        key = bucket_key(eqn)
        size = max((program.local_bytes(v) for v in (*eqn.ins, *eqn.outs)), default=0)
        if key is not None and eqn in late and 0 < size <= limits.get(key[0], 0):
            alike[level, key].append((eqn, size))
            level += 1
        depth.update((v, level) for v in eqn.outs)
    for (_, key), eqns in alike.items():
        yield from _runs(eqns, limits[key[0]])


def _runs(eqns: Sequence[tuple[Eqn, int]], limit: float) -> Iterator[Group]:
    run: list[Eqn] = []
    total = 0
    for eqn, size in eqns:
        if run and total + size > limit:
            yield tuple(run)
            run, total = [], 0
        run.append(eqn)
        total += size
    yield tuple(run)


def _read_by_updates(program: Program) -> set[Eqn]:
    """The equations on whose results no product and no exchange of the backward pass depends."""
    needed: set[Var] = set()
    readers: set[Eqn] = set()
    for eqn in reversed(program.eqns):
        works = is_product(eqn) or (eqn.collective is not None and bucket_key(eqn) is None) or eqn.control is not None
        if (eqn.backward and works) or not needed.isdisjoint(eqn.outs):
            needed.update(eqn.ins)
        else:
            readers.add(eqn)
    return readers
