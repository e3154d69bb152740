"""Ring attention: keys and values go around the devices that split their positions (Liu et al., 2023).

Each device attends with its own queries to the block of keys and values that it has, while it sends that block on. The
gradient sends the blocks around again, with their cotangents. A window limits how far blocks go.

Half blocks in zigzag order, so that every device has equal work under a causal mask.

Device i of n has the half blocks i and 2 n - 1 - i instead of 2 i and 2 i + 1: its queries then see the same number of
keys as any other's (Brandon et al., "Striped Attention", 2023, give every device equal work by another order). A block
takes two permutes of half a block to get there, and two to get back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....control import SCAN
from ....dims import Dim
from ....ir import NO_CAUSE, Because, Cause, Eqn, Scan, Var
from ....layouts.sharding import Axes
from ....ops.attention.blocks import RESIDUALS, wide_dtype
from ....ops.dtypes import CAST
from ....ops.index_map import PLACE, ROWS, PlaceTable, replaced
from ....ops.indexing import IOTA
from ....trace import FULL, number
from ...program import Program
from ..index_map import Exchange
from ..scope import Scope
from .call import AttentionCall
from .turn import ATTENTION_TURN, ATTENTION_TURN_GRAD

MOVES = ("k", "v", "memory_segments")  # the operands that go around
ALONG = ("q", "k", "v", "segments", "memory_segments", *RESIDUALS)  # the operands that may change places for balance


def hops(call: AttentionCall) -> int:
    """The number of times that a block is sent on: n - 1, or until no query sees it."""
    n, params = call.count, call.eqn.params
    if not params["causal"] or params["window"] is None or "offset" in call.roles:
        return n - 1
    setting, how = call.scope.setting, call.how
    keys, queries = (setting.extents.padded(call.dim(r, name)) // n for r, name in (("k", how.keys), ("q", how.length)))
    if keys != queries:
        return n - 1
    return min(n - 1, -(-(params["window"] - 1) // max(1, keys)))


def is_zigzag(call: AttentionCall) -> bool:
    """True if blocks change places for balance: under a causal mask of equal blocks of an even size, with no array of
    scores whose rows would have to move too."""
    setting, how, n = call.scope.setting, call.how, call.count
    length, keys = call.dim("q", how.length), call.dim("k", how.keys)
    size = setting.extents.padded(length) // n
    rows = [r for r in ("bias", "mask") if r in call.roles and length in call.roles[r].dims]
    even = length.size == keys.size and size == setting.extents.padded(keys) // n and size % 2 == 0
    plain = call.eqn.params["causal"] and call.eqn.params["window"] is None and "offset" not in call.roles
    return plain and even and size > 0 and n > 1 and not rows


class _Ring:
    """The equations of one ring."""

    def __init__(self, call: AttentionCall, cause: Cause):
        self.call, self.eqn, self.scope, self.cause = call, call.eqn, call.scope, cause
        self.n, self.hops, self.zigzag = call.count, hops(call), is_zigzag(call)
        self.how = dataclasses.replace(call.how, wide=True)

    def equation(self, op: Any, ins: Sequence[Var], out: Var, cause: Cause = NO_CAUSE, **params: Any) -> Eqn:
        return Eqn(op, tuple(ins), (out,), params, self.eqn.where, self.eqn.backward, cause)

    def exchange(self, x: Var, out: Var, routes: tuple[tuple[int, int], ...], cause: Cause) -> Eqn:
        name = next(d.name for d in x.dims if d.name == self.how.keys)
        return self.equation(Exchange(name, self.call.keys, routes), [x], out, cause)

    def add(self) -> None:
        """Add the operands, the loop, the last turn, and the results."""
        ins = self.operands()
        outs = self.call.outs(ins)
        sums = self.zeros(outs)
        held = [ins[i] for i in self.moving()]
        if self.hops:
            held, sums = self.loop(ins, held, sums)
        end = self.number(self.hops)
        sums = self.turn(self.scope.eqns, self.with_held(ins, held), sums, end)
        sums = self.at_owners(sums) if self.call.gradient else sums
        self.finish(sums, outs)

    def operands(self) -> list[Var]:
        ins = self.call.ins()
        if not self.zigzag:
            return ins
        moved = [
            r in ALONG and {self.how.length, self.how.keys} & {d.name for d in v.dims}
            for r, v in zip(self.call.roles, ins, strict=True)
        ]
        return [self.places(v, in_zigzag) if along else v for v, along in zip(ins, moved, strict=True)]

    def places(self, x: Var, change: Any) -> Var:
        """The value with its half blocks in another order, along the dim that the ring's axes split."""
        dim = next(d for d in x.dims if x.sharding.axes(d) == self.call.keys)
        return change(self.scope, self.eqn, x, dim, self.call.keys)

    def moving(self) -> list[int]:
        return [i for i, role in enumerate(self.call.roles) if role in MOVES]

    def with_held(self, ins: Sequence[Var], held: Sequence[Var]) -> list[Var]:
        """The operands, with the blocks that the device has now in the place of its own."""
        now = dict(zip(self.moving(), held, strict=True))
        return [now.get(i, v) for i, v in enumerate(ins)]

    def zeros(self, outs: Sequence[Var]) -> list[Var]:
        """The initial sums of the turns: results of attention without keys, or zero cotangents, in the wide dtype."""
        sums: list[Var] = []
        for k, v in enumerate(outs):
            initial = Var(v.dims, wide_dtype(v.dtype), "", v.sharding)
            value = -math.inf if k == 1 and not self.call.gradient else 0
            value = number(value, initial.dtype)
            self.scope.eqns.append(self.equation(FULL, [], initial, value=value, shape=v.dims))
            sums.append(initial)
        return sums

    def number(self, value: int) -> Var:
        constant = Var((), np.dtype(np.int32), "", self.scalar)
        self.scope.eqns.append(self.equation(FULL, [], constant, value=np.int32(value), shape=()))
        return constant

    @property
    def scalar(self) -> Any:
        return self.call.eqn.outs[0].sharding.of({})

    def turn(self, eqns: list[Eqn], ins: Sequence[Var], sums: Sequence[Var], turn: Var) -> list[Var]:
        """Add one turn; returns the sums after it."""
        op = ATTENTION_TURN_GRAD if self.call.gradient else ATTENTION_TURN
        sums_after = [_like(v) for v in sums]
        keys, own = self.call.keys, self.eqn.params
        how = {"how": self.how, "causal": own["causal"], "window": own["window"], "axes": keys}
        how |= {"zigzag": self.zigzag or None, "turns": self.hops + 1}
        eqns.append(Eqn(op, (*ins, *sums, turn), tuple(sums_after), how, self.eqn.where, self.eqn.backward))
        return sums_after

    def loop(self, ins: Sequence[Var], held: Sequence[Var], sums: Sequence[Var]) -> tuple[list[Var], list[Var]]:
        """Add the loop of all turns but the last; returns the blocks and the sums after it."""
        dim = Dim("turn", self.hops)
        turns = Var((dim,), np.dtype(np.int32), "", self.scalar)
        self.scope.eqns.append(self.equation(IOTA, [], turns, dim=dim, dtype=turns.dtype))
        moving = self.moving()
        consts = [v for i, v in enumerate(ins) if i not in moving]
        inner, blocks, inner_sums = [_like(v) for v in consts], [_like(v) for v in held], [_like(v) for v in sums]
        t = Var((), turns.dtype, "", self.scalar)
        own, eqns = iter(inner), list[Eqn]()
        body_ins = self.with_held([blocks[0] if i in moving else next(own) for i in range(len(ins))], blocks)
        received = [_like(v) for v in blocks]
        on = tuple((i, (i + 1) % self.n) for i in range(self.n))
        eqns += [self.exchange(v, out, on, self.cause) for v, out in zip(blocks, received, strict=True)]
        after = self.turn(eqns, body_ins, inner_sums, t)
        if self.call.gradient:
            after = self.passed_on(eqns, after, on, self.cause)
        mesh, extents = self.scope.setting.mesh, self.scope.setting.extents
        body = Program((*inner, *blocks, *inner_sums, t), tuple(eqns), (*received, *after), mesh=mesh, extents=extents)
        outs = [_like(v) for v in (*held, *sums)]
        control = Scan(body, len(consts), len(outs), dim)
        self.scope.eqns.append(
            Eqn(
                SCAN,
                (*consts, *held, *sums, turns),
                tuple(outs),
                {"control": control},
                self.eqn.where,
                self.eqn.backward,
            )
        )
        return outs[: len(held)], outs[len(held) :]

    def passed_on(self, eqns: list[Eqn], sums: list[Var], routes: Any, cause: Cause) -> list[Var]:
        """The cotangents after those of keys and values were sent with their blocks, if anything reads them."""
        graph, users = self.scope.graph, self.scope.demand.sums.users
        read = [k for k in (1, 2) if self.eqn.outs[k] in users or self.eqn.outs[k] in graph.outs]
        received = {k: _like(sums[k]) for k in read}
        eqns += [self.exchange(sums[k], out, routes, cause) for k, out in received.items()]
        return [received.get(k, v) for k, v in enumerate(sums)]

    def at_owners(self, sums: list[Var]) -> list[Var]:
        """The cotangents of keys and values on the devices that own the blocks."""
        if not self.hops:
            return sums
        routes = tuple((i, (i - self.hops) % self.n) for i in range(self.n))
        cause = Cause(Because.HOME, self.eqn.operation.name, (self.how.keys,))
        return self.passed_on(self.scope.eqns, sums, routes, cause)

    def finish(self, sums: Sequence[Var], outs: Sequence[Var]) -> None:
        """The results in their own dtypes, and in order."""
        for x, out in zip(sums, outs, strict=True):
            along = self.zigzag and any(x.sharding.axes(d) == self.call.keys for d in x.dims)
            if x.dtype != out.dtype:
                narrow = Var(x.dims, out.dtype, "", x.sharding)
                self.scope.eqns.append(self.equation(CAST, [x], narrow, dtype=out.dtype))
                x = narrow
            if along:
                x = self.places(x, in_order)
            _define(self.scope.eqns, x, out)


def _define(eqns: list[Eqn], x: Var, out: Var) -> None:
    """Let the last equation that computes x compute `out` instead."""
    k = next(i for i in reversed(range(len(eqns))) if x in eqns[i].outs)
    eqns[k] = eqns[k].replace(outs=tuple(out if v is x else v for v in eqns[k].outs))


def _like(v: Var) -> Var:
    return Var(v.dims, v.dtype, "", v.sharding)


def around(call: AttentionCall, cause: Cause) -> None:
    """Add ring attention, or its gradient."""
    _Ring(call, cause).add()


def _routes(n: int, half: int) -> tuple[tuple[int, int], ...]:
    """The owners of the half blocks 2 i + half: in order, and in zigzag order."""
    chunks = [2 * i + half for i in range(n)]
    return tuple((i, chunk if chunk < n else 2 * n - 1 - chunk) for i, chunk in enumerate(chunks))


def in_zigzag(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes) -> Var:
    """The value with its half blocks in zigzag order; the even one is the first half of each device's block."""
    n = scope.setting.mesh.count(axes)
    return _moved(scope, eqn, x, dim, axes, [_routes(n, half) for half in (0, 1)])


def in_order(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes) -> Var:
    """The value with its half blocks in order again."""
    n = scope.setting.mesh.count(axes)
    back = [tuple(sorted((target, source) for source, target in _routes(n, half))) for half in (0, 1)]
    return _moved(scope, eqn, x, dim, axes, back)


def _moved(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes, routes: list[tuple[tuple[int, int], ...]]) -> Var:
    mesh, extents = scope.setting.mesh, scope.setting.extents
    n, stored = mesh.count(axes), extents.padded(dim)
    size = stored // n // 2
    half = Dim(f"{dim.name}__half", stored // 2)
    sharding = x.sharding.with_split(dim.name, ()).with_split(half.name, axes)
    cause = Cause(Because.BALANCE, eqn.operation.name, (dim.name,))
    came: list[Var] = []

    def var() -> Var:
        return Var(replaced(x.dims, dim, half), x.dtype, "", sharding)

    for k, route in enumerate(routes):
        cut, moved = var(), var()
        rows = {"dim": dim, "rows": half, "starts": (k * size,) * n, "axes": axes}
        scope.eqns.append(Eqn(ROWS, (x,), (cut,), rows, eqn.where, eqn.backward))
        scope.eqns.append(Eqn(Exchange(half.name, axes, route), (cut,), (moved,), {}, eqn.where, eqn.backward, cause))
        came.append(moved)
    out = Var(x.dims, x.dtype, x.name, x.sharding)
    params = {
        "dims": (half, half),
        "whole": (False, False),
        "out": dim,
        "table": PlaceTable((tuple(range(2 * size)),) * n),
        "fill": 0,
        "axes": axes,
    }
    scope.eqns.append(Eqn(PLACE, tuple(came), (out,), params, eqn.where, eqn.backward))
    return out
