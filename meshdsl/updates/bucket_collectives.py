"""Bucket collectives: several of one kind over the same axes, none of which depends on another, become one.

Values and shardings of all results stay the same. Single numbers that the weight update sums (norms) are always
bucketed; the caller chooses tensors by their bytes. Two parts of a step are bucketed, neither of which delays other
work:

- the update, which follows the last operation of the backward pass: reduce_scatters, all_reduces and all_gathers.
  Equations that need one of them are moved behind them; the others keep their order.
- the start of the step: all_gathers of its inputs (weights as stored between steps), which move to the first of them.

The body of a loop over steps or micro-batches is such a step (Xu et al., 2020, section 5.2). In the body of any other
loop, such as one over layers, the all_gathers of its rows are bucketed at its start, and the collectives on which no
later trip depends, those of the layer's gradients, at its end.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..control import BARRIER
from ..dims import Dim, fresh_dim
from ..errors import InternalError
from ..ir import Because, Cause, Eqn, Fuses, Op, Var, sources_of, walk
from ..layouts import Sharding
from ..layouts.sharding import Axes
from ..lowering.collectives import AllGather, AllReduce, ReduceScatter
from ..lowering.packing import PACK, UNPACK
from ..lowering.program import Program
from .regions import is_loop_over_parts

# (kind, axes, bytes of each collective) -> how many of the collectives, smallest first, to bucket. Bytes ascend; each
# is the larger of one device's operand and result
Joins = Callable[[str, Axes, Sequence[int]], int]

Key = tuple[Any, ...]  # equal for collectives that can share a bucket
Group = tuple[Eqn, ...]


def bucket_collectives(program: Program, joins: Joins | None = None) -> Program:
    """Send several small tensors of the program's update, and of those in its loops over steps, with one collective.

    Scalars share one. Of the collectives of tensors that could share a bucket, `joins(kind, axes, sizes)` is the
    number of them, smallest first, that do; None leaves tensors alone. `sizes` are their bytes, ascending.

    >>> import meshdsl as md
    >>> def step(params, x):
    ...     grads = md.grad(lambda p: md.mean(md.square(md.dot(x, p["w"], "io") + p["b"])))(params)
    ...     return {k: p - 0.1 * grads[k] for k, p in params.items()}
    >>> types = {"w": md.spec("io:8 hidden:8"), "b": md.spec("hidden:8")}, md.spec("batch:16 io:8")
    >>> program = md.compile(step, "rows:4", "batch:rows", weight_update="sharded").program(*types)
    >>> for record in bucket_collectives(program, lambda kind, axes, sizes: len(sizes)).collectives:
    ...     print(record.kind, list(record.shape), record.cause)
    all_gather [1, 18] 2 tensors together: params/w is used here, its update is split, ...
    reduce_scatter [4, 18] 2 tensors together: sum over 'batch' of sum, ...
    """
    ticks = frozenset(name for schedule in program.schedules for name in schedule.loops)
    return _bucketed(program, joins, ticks)


def _bucketed(program: Program, joins: Joins | None, ticks: frozenset[str]) -> Program:
    """The program, or the body of a loop over steps, with buckets; `ticks` are the loops of pipelines, by their dim."""
    steps = {eqn for eqn in program.eqns if is_loop_over_parts(eqn) and eqn.scan and eqn.scan.dim.name not in ticks}
    eqns = [
        eqn.map_graphs(lambda body: _bucketed(body, joins, ticks)) if eqn in steps else _in_layers(eqn, joins, ticks)
        for eqn in program.eqns
    ]
    backward = [i for i, eqn in enumerate(program.eqns) if (eqn.backward and isinstance(eqn.op, Op)) or eqn in steps]
    program = program.replace(eqns=tuple(eqns))
    start = backward[-1] + 1 if backward else len(program.eqns)
    early, late = program.eqns[:start], program.eqns[start:]
    at_start = [] if joins is None else _groups(program, _given(program.ins, early), joins)
    in_update = _groups(program, _levels(late), joins)
    if not at_start and not in_update:
        return program
    eqns = *_at_first(program, early, at_start), *in_rounds(program, late, in_update)
    return program.replace(eqns=eqns)


def _in_layers(eqn: Eqn, joins: Joins | None, ticks: frozenset[str]) -> Eqn:
    """A loop that is no loop over steps with buckets in each trip, also in those of loops inside."""
    if joins is None:
        return eqn

    def bucketed(body: Program) -> Program:
        body = body.replace(eqns=tuple(_in_layers(inner, joins, ticks) for inner in body.eqns))
        if eqn.scan is None or eqn.scan.dim.name in ticks:
            return body
        consts, _, rows = eqn.scan.inputs(body.ins)
        eqns = _at_first(body, body.eqns, _groups(body, _given([*consts, *rows], body.eqns, again=True), joins))
        needed = sources_of(eqns, eqn.scan.results(body.outs)[0])
        late = _groups(body, _levels([each for each in eqns if each not in needed]), joins)
        return body.replace(eqns=tuple(in_rounds(body, eqns, late)))

    return eqn.map_graphs(bucketed)


def bucketed_tensors(program: Program) -> int:
    """The number of tensors in buckets, not counting single numbers."""
    return sum(bool(v.dims) for eqn, _ in walk(program) if eqn.op is PACK for v in eqn.ins)


def _is_number(eqn: Eqn) -> bool:
    return isinstance(eqn.op, AllReduce) and not eqn.ins[0].dims


def bucket_key(eqn: Eqn) -> Key | None:
    """The key that two collectives must share to be bucketed together; None if this one cannot be bucketed."""
    op: Any = eqn.op
    if not isinstance(op, AllReduce | AllGather | ReduceScatter) or eqn.ins[0].dtype.kind not in "fV":
        return None
    if isinstance(op, AllReduce) and op.kind != "sum":
        return None
    before = eqn.ins[0].sharding
    others = frozenset(before.split_axes) - set(op.axes)
    return op.name, op.axes, eqn.ins[0].dtype, others, before.partial


def _given(inputs: Sequence[Var], eqns: Sequence[Eqn], again: bool = False) -> dict[Eqn, int]:
    """The all_gathers of these inputs, or of elementwise results of these; of those that are gathered `again`, too."""
    ready = set(inputs)
    levels: dict[Eqn, int] = {}
    for eqn in eqns:
        if not ready.issuperset(eqn.ins) or not eqn.ins:
            continue
        if isinstance(eqn.op, AllGather) and bucket_key(eqn) is not None:
            levels[eqn] = 0
        elif isinstance(eqn.op, Op) and eqn.op.fuses in (Fuses.MAP, Fuses.VIEW) and (again or eqn.op is not BARRIER):
            ready.update(eqn.outs)
    return levels


def _levels(eqns: Sequence[Eqn]) -> dict[Eqn, int]:
    """The collectives, with the length of the longest chain of collectives that each depends on."""
    depth: dict[Var, int] = {}
    levels: dict[Eqn, int] = {}
    for eqn in eqns:
        level = max((depth.get(v, 0) for v in eqn.ins), default=0)
        if bucket_key(eqn) is not None:
            levels[eqn] = level
            level += 1
        depth.update((v, level) for v in eqn.outs)
    return levels


def _groups(program: Program, levels: Mapping[Eqn, int], joins: Joins | None) -> list[Group]:
    """The groups of collectives to bucket, each in program order."""
    alike: dict[Key, list[Eqn]] = defaultdict(list)
    for eqn, level in levels.items():
        if (joins is not None or _is_number(eqn)) and program.local_bytes(eqn.ins[0]):
            alike[level, bucket_key(eqn)].append(eqn)
    groups: list[Group] = []
    for eqns in alike.values():
        size = {eqn: program.record(eqn, 1).bytes for eqn in eqns}
        ordered = sorted(eqns, key=lambda eqn: (not _is_number(eqn), size[eqn]))
        numbers, first = sum(map(_is_number, eqns)), eqns[0].collective
        assert first is not None
        count = numbers if joins is None else joins(first.name, first.axes, [size[eqn] for eqn in ordered])
        chosen = set(ordered[: max(numbers, count)])
        if len(chosen) > 1:
            groups.append(tuple(eqn for eqn in eqns if eqn in chosen))
    return groups


def _at_first(program: Program, eqns: Sequence[Eqn], groups: Sequence[Group]) -> list[Eqn]:
    """Place each group where its first member was, behind the equations that compute the other members' operands."""
    of = {eqn: group for group in groups for eqn in group}
    done: dict[Eqn, None] = {}
    moved: list[Eqn] = []
    for eqn in eqns:
        if eqn in done:
            continue
        if eqn not in of:
            done[eqn] = None
            moved.append(eqn)
            continue
        makers = sources_of(eqns, [v for member in of[eqn] for v in member.ins])
        moved += [source for source in eqns if source in makers and source not in done]
        done.update(dict.fromkeys((*makers, *of[eqn])))
        moved += _as_one(program, of[eqn])
    return moved


def in_rounds(program: Program, eqns: Sequence[Eqn], groups: Sequence[Group]) -> list[Eqn]:
    """Place each group once all its members can run, behind every equation that can run without the group."""
    of = {eqn: group for group in groups for eqn in group}
    rest, ordered, left = list(eqns), list[Eqn](), list(groups)
    while left:
        blocked: set[Var] = set()
        ready: set[Eqn] = set()
        later: list[Eqn] = []
        for eqn in rest:
            free = blocked.isdisjoint(eqn.ins)
            if free and eqn not in of:
                ordered.append(eqn)
                continue
            ready.update([eqn] if free else [])
            blocked.update(eqn.outs)
            later.append(eqn)
        whole = [group for group in left if ready.issuperset(group)]
        if not whole:
            raise InternalError("collectives that wait for each other were to be joined")
        for group in whole:
            ordered += _as_one(program, group)
        rest = [eqn for eqn in later if of.get(eqn) not in whole]
        left = [group for group in left if group not in whole]
    return [*ordered, *rest]


def _cause(eqn: Eqn) -> Cause:
    """The cause of one member, with its own dim if the cause names none: the bucket's collective has a private dim."""
    op = _joinable(eqn)
    if eqn.cause.about or isinstance(op, AllReduce):
        return eqn.cause
    return dataclasses.replace(eqn.cause, dims=(op.dim,))


def _joinable(eqn: Eqn) -> AllReduce | AllGather | ReduceScatter:
    assert isinstance(eqn.op, AllReduce | AllGather | ReduceScatter)
    return eqn.op


def _as_one(program: Program, group: Group) -> list[Eqn]:
    """The group as one collective, between equations that pack its operands and unpack its results."""
    first, mesh = group[0], program.mesh
    op = _joinable(first)
    home = first.ins[0].sharding
    chunks = tuple(map(program.chunk, group))
    ways = 1 if isinstance(op, AllReduce) else mesh.count(op.axes)
    others = tuple(axis for axis in mesh.axes if axis in set(home.split_axes) - set(op.axes))
    elements = sum(math.prod(program.sent_shape(eqn)) for eqn in group)
    flat = elements // ways if isinstance(op, ReduceScatter) else elements
    other, cut, packed = (_unknown(name, program) for name in ("other", "way", "packed"))
    sizes = {other: mesh.count(others), cut: ways}
    shape = (*(Dim(name, n) for name, n in sizes.items() if n > 1), Dim(packed, flat))
    split = {other: others, cut: op.axes if isinstance(op, AllGather) else ()}
    before = Var(shape, first.ins[0].dtype, "", Sharding.of(split, home.partial, home.kind))
    one = op if isinstance(op, AllReduce) else dataclasses.replace(op, dim=cut)
    after = Var(shape, before.dtype, "", one.step(before.sharding, mesh))
    outs = tuple(eqn.outs[0] for eqn in group)
    causes = tuple(dict.fromkeys(_cause(eqn) for eqn in group))
    what = "numbers" if all(map(_is_number, group)) else "tensors"
    cause = Cause(Because.TOGETHER, amounts=(len(group),), what=what, parts=causes)
    result = tuple(v.dims for v in outs)
    ins = tuple(eqn.ins[0] for eqn in group)
    return [
        Eqn(PACK, ins, (before,), {"shape": shape, "chunks": chunks}, first.where, first.backward),
        Eqn(one, (before,), (after,), {}, first.where, first.backward, cause),
        Eqn(UNPACK, (after,), outs, {"result": result, "chunks": chunks}, first.where, first.backward),
    ]


def _unknown(name: str, program: Program) -> str:
    """A dim name for which the layout has no rule."""
    return fresh_dim(Dim(name, 1), program.extents.multiple).name
