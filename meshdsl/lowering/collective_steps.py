"""Collectives in steps: one over axes of several levels of a network becomes one for each level.

Values and shardings of all results stay the same. With axes (slow, fast), of n devices along fast, an all_reduce
becomes a reduce_scatter over fast, an all_reduce of 1/n over slow, and an all_gather over fast. An all_gather goes over
slow first, a reduce_scatter and an all_to_all over fast first, so that the slow axis carries 1/n of the bytes, or, for
an all_to_all, messages n times as large. A dim that is split over both is regrouped into one dim for each level, which
moves no data. (Xu et al., 2020, section on large topologies; Thakur et al., 2005.)
"""

# pyright: standard
# (parameters of equations are only partly typed)

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from ..backend import Local
from ..dims import Dim, Shape, fresh_dim
from ..errors import InternalError
from ..errors.no_effect import NoEffectError
from ..ir import Because, Cause, Collective, Eqn, Fuses, Labels, Linear, Op, Type, Var, no_flops
from ..layouts import Sharding
from ..ops.reshape import resized
from .collectives import AllGather, AllReduce, AllToAll, ReduceScatter
from .packing import PACK, UNPACK
from .program import CollectiveRecord, Program

Regrouping = Mapping[str, Shape]  # a dim -> the dims, major to minor, into which it is regrouped


def _regrouped(eqn: Eqn) -> list[Sharding]:
    """The shardings of the results; raises `InternalError` if blocks are not the row-major blocks of the whole dim."""
    parts: Regrouping = eqn.params["dims"]
    joins = any(set(dims) <= set(eqn.ins[0].dims) for dims in parts.values())
    whole, fine = (eqn.outs[0], eqn.ins[0]) if joins else (eqn.ins[0], eqn.outs[0])
    split = {d.name: fine.sharding.axes(d) for d in fine.dims}
    for name, dims in parts.items():
        axes = [split.pop(d.name) for d in dims]
        split[name] = tuple(axis for each in axes for axis in each)
    expected = Sharding.of(split, fine.sharding.partial, fine.sharding.kind)
    if expected != whole.sharding:
        raise InternalError(f"{eqn.op} at {eqn.where} has {whole} as {whole.sharding} and as {fine.sharding}")
    return [eqn.outs[0].sharding]


def _regroup(c: Local, x: Any, dims: Regrouping) -> Any:
    """A block with its dims in parts, or with these joined: a dim that is cut is padded before, and trimmed after."""
    (before,), (after,) = c.ins, c.outs
    whole, fine = (after, before) if len(after.sizes) < len(before.sizes) else (before, after)
    of_parts = {whole.position(name): math.prod(map(fine.size, parts)) for name, parts in dims.items()}
    if whole is before:
        return c.xp.reshape(resized(c, x, of_parts), after.sizes)
    joined = c.xp.reshape(x, tuple(of_parts.get(i, n) for i, n in enumerate(after.sizes)))
    return resized(c, joined, {i: after.sizes[i] for i in of_parts})


def _apart(x: Type, shape: Shape) -> Labels:
    return Labels(({d.name: None for d in x.dims},), ({d.name: None for d in shape},))


REGROUP = Op(  # dims as several dims, one for each level of the network, or back: a reshape of one device's block
    "regroup",
    type=lambda x, *, shape, dims: Type(shape, x.dtype),
    kernel=lambda c, x, *, shape, dims: _regroup(c, x, dims),
    linear=Linear.JOINT,
    flops=no_flops,
    shardings=_regrouped,
    rule=lambda x, *, shape, dims: _apart(x, shape),
    fuses=Fuses.VIEW,
    inside_blocks=True,
)


class PlacedNetwork(Protocol):
    """The placement of a mesh on a network, as `cost.network.place` returns it."""

    @property
    def levels(self) -> Mapping[str, int]: ...
    def seconds_of(self, record: CollectiveRecord) -> float: ...


def has_slow(program: Program, placement: PlacedNetwork) -> bool:
    """True if the program sends over a mesh axis of an outer level of the network, and has axes of an inner one."""
    levels = placement.levels
    fastest = min(levels.values(), default=0)
    return any(levels.get(axis, fastest) > fastest for record in program.collectives for axis in record.axes)


def in_steps(program: Program, mode: str, machine: str, placement: PlacedNetwork) -> Program:
    """The program with collectives in steps: "always", wherever they can be; "auto", where these need less time by the
    formulas and tables of the network of `machine`.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x: md.sum(x, "batch"), "node:4 gpu:8", "batch:node,gpu", steps="always",
    ...                   machine="h100")
    >>> for record in step.program(md.spec("batch:64 io:1024")).collectives:
    ...     print(record.kind, record.axes, record.bytes, record.cause)
    reduce_scatter ('gpu',) 4096 sum over 'batch' of sum, in steps: 'node' is slow on h100
    all_reduce ('node',) 512 sum over 'batch' of sum, in steps: 'node' is slow on h100
    all_gather ('gpu',) 4096 sum over 'batch' of sum, in steps: 'node' is slow on h100

    Raises `NoEffectError` if "always" changes nothing.
    """
    rewriter = _Rewriter(machine, placement, mode == "always")
    stepped = rewriter.program(program)
    if mode == "always" and not rewriter.taken:
        one_level = "none is over mesh axes of several levels of the network"
        placed = "; ".join(str(placement).splitlines())
        reasons = Counter(rewriter.reasons or [f"{one_level} ({placed})"])
        raise NoEffectError(
            "steps='always' has no effect: no collective can be in steps"
            + "".join(f"\n  {reason}{f' ({n} times)' if n > 1 else ''}" for reason, n in reasons.items())
            + "\n  use steps='auto', which takes steps only where they are faster, or leave steps out"
        )
    return stepped


@dataclasses.dataclass(eq=False)
class _Rewriter:
    """Rewrites programs for one machine; keeps what it took in steps, and why it left others flat."""

    machine: str
    placement: PlacedNetwork
    always: bool
    taken: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list[str])

    def program(self, program: Program) -> Program:
        eqns: list[Eqn] = []
        for eqn in program.eqns:
            eqns += self.equation(program, eqn.map_graphs(self.program))
        return program.replace(eqns=tuple(eqns))

    def equation(self, program: Program, eqn: Eqn) -> list[Eqn]:
        op = eqn.collective
        if op is None or not eqn.sends or len({self.placement.levels.get(axis, 0) for axis in op.axes}) < 2:
            return [eqn]
        steps = _Steps(program, eqn, self.placement.levels, self.machine)
        reason = steps.add()
        if reason:
            self.reasons.append(reason)
            flat = Cause(Because.FLAT, parts=(eqn.cause,), what=reason)
            return [eqn.replace(cause=flat)] if self.always else [eqn]
        if not (self.always or self.seconds(program, steps.eqns) < self.seconds(program, [eqn])):
            return [eqn]
        self.taken += 1
        return steps.eqns

    def seconds(self, program: Program, eqns: Sequence[Eqn]) -> float:
        """Seconds of the collectives, one after the other."""
        return sum(self.placement.seconds_of(program.record(eqn, 1)) for eqn in eqns if eqn.sends)


class _Steps:
    """The equations that replace one collective."""

    def __init__(self, program: Program, eqn: Eqn, levels: Mapping[str, int], machine: str):
        self.of, self.eqn, self.eqns = program, eqn, list[Eqn]()
        assert eqn.collective is not None
        self.axes = eqn.collective.axes
        self.level: Callable[[str], int] = lambda axis: levels.get(axis, 0)
        slowest = max(map(self.level, self.axes))
        # axes of one level, one after the other in the collective's order
        self.runs = [tuple(run) for _, run in groupby(self.axes, self.level)]
        slow = tuple(axis for axis in self.axes if self.level(axis) == slowest)
        dim = () if eqn.cause.about else tuple(x for x in [getattr(eqn.op, "dim", "")] if x)
        self.cause = Cause(Because.STEPS, dims=dim, axes=slow, what=machine, parts=(eqn.cause,) if eqn.cause else ())

    def add(self) -> str:
        """Add the equations; returns the reason if the collective stays flat."""
        (x, *others), op = self.eqn.ins, self.eqn.op
        if others or not self.of.local_bytes(x):
            return "it sends only filled slots" if others else "it is empty"
        match op:
            case AllReduce(kind="sum"):
                return self.all_reduce(x)
            case AllGather() | ReduceScatter() | AllToAll():
                self.by_level(x, op)
                return ""
            case _:
                return f"a {getattr(op, 'kind', op.name)} cannot be scattered"

    def put(self, op: Op | Collective, x: Var, out: Var, **params: Any) -> Var:
        cause = {} if isinstance(op, Op) else {"cause": self.cause}
        self.eqns.append(Eqn(op, (x,), (out,), params, self.eqn.where, self.eqn.backward, **cause))
        return out

    def send(self, op: Collective, x: Var, out: Var | None = None) -> Var:
        return self.put(op, x, out or Var(x.dims, x.dtype, x.name, op.step(x.sharding, self.of.mesh)))

    def all_reduce(self, x: Var) -> str:
        """Reduce and scatter over the levels from the fastest, reduce over the slowest, and gather back."""
        ordered = sorted(self.axes, key=self.level)
        *fast, slow = [tuple(axes) for _, axes in groupby(ordered, self.level)]
        ways, elements = self.of.mesh.count(sum(fast, ())), math.prod(self.of.local_shape(x))
        if elements < ways:
            return f"{elements} element{'s' * (elements > 1)} for {ways} devices"
        whole = x
        name = next((d.name for d, n in zip(x.dims, self.of.local_shape(x), strict=True) if n % ways == 0), "")
        if not name:  # one flat dim, with zeros at its end
            name = self.private("packed")
            others = tuple(axis for axis in self.of.mesh.axes if axis in x.sharding.split_axes)
            other = Dim(self.private("other"), self.of.mesh.count(others))
            shape = (*([other] if others else []), Dim(name, -(-elements // ways) * ways))
            split = Sharding.of({other.name: others}, x.sharding.partial, x.sharding.kind)
            x = self.put(PACK, x, Var(shape, x.dtype, x.name, split), shape=shape, chunks=(None,))
        for axes in fast:
            x = self.send(ReduceScatter(name, axes), x)
        x = self.send(AllReduce(slow), x)
        for axes in reversed(fast):
            last = axes is fast[0] and whole.dims == x.dims
            x = self.send(AllGather(name, axes), x, self.eqn.outs[0] if last else None)
        if whole.dims != x.dims:
            out = self.eqn.outs[0]
            self.put(UNPACK, x, out, result=(out.dims,), chunks=(None,))
        return ""

    def by_level(self, x: Var, op: AllGather | ReduceScatter | AllToAll) -> None:
        """Regroup the dims, send over one run of axes after another, and join the dims."""
        out = self.eqn.outs[0]
        whole = {op.dim: out if isinstance(op, ReduceScatter) else x}
        if isinstance(op, AllToAll):
            whole[op.to] = out
        parts = {name: self.parts(name, v) for name, v in whole.items()}
        x = self.regroup(x, parts, out=None)
        order = sorted(range(len(self.runs)), key=lambda i: self.level(self.runs[i][0]))
        for i in reversed(order) if isinstance(op, AllGather) else order:
            names = {"dim": parts[op.dim][i].name} | ({"to": parts[op.to][i].name} if isinstance(op, AllToAll) else {})
            x = self.send(dataclasses.replace(op, axes=self.runs[i], **names), x)
        self.regroup(x, parts, out=out)

    def parts(self, name: str, v: Var) -> Shape:
        """One dim for each run of axes, of a dim that is split in `v` over other axes and then over the runs."""
        dim = next(d for d in v.dims if d.name == name)
        before = v.sharding.axes(dim)[: -len(self.axes)]
        count = self.of.mesh.count
        sizes = [count(run) for run in self.runs]
        sizes[0] *= count(before)
        sizes[-1] *= self.of.extents.local(dim, math.prod(sizes))
        runs = ("_".join(run).replace(".", "__") for run in self.runs)  # a divided axis is called rows.inner
        return tuple(Dim(self.private(f"{name}__{run}"), n) for run, n in zip(runs, sizes, strict=True))

    def regroup(self, x: Var, parts: Regrouping, out: Var | None) -> Var:
        """`x` with the dims in parts; or, if `out` is given, with the parts joined to the dims of `out`."""
        if out is not None:
            return self.put(REGROUP, x, out, shape=out.dims, dims=parts)
        shape = tuple(part for d in x.dims for part in parts.get(d.name, (d,)))
        split = dict(x.sharding.split)
        for name, dims in parts.items():
            axes = split.pop(name, ())
            runs = self.runs if axes[len(axes) - len(self.axes) :] == self.axes else [()] * len(self.runs)
            before = axes[: len(axes) - sum(map(len, runs))]
            split |= {d.name: (*before * (i == 0), *runs[i]) for i, d in enumerate(dims)}
        fine = Sharding.of(split, x.sharding.partial, x.sharding.kind)
        return self.put(REGROUP, x, Var(shape, x.dtype, x.name, fine), shape=shape, dims=parts)

    def private(self, name: str) -> str:
        """A dim name for which the layout has no rule, and which the value does not have."""
        values = (*self.eqn.ins, *self.eqn.outs)
        return fresh_dim(Dim(name, 1), self.of.extents.multiple, *(v.dims for v in values)).name
