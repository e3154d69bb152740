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
from ....ir import Because, Cause, Eqn, Scan, Var
from ....layouts.sharding import Axes
from ....ops.attention.sees import Sees
from ....ops.attention.spec import RESIDUALS, wide_dtype
from ....ops.attention.turns import ATTENTION_TURN, ATTENTION_TURN_GRAD
from ....ops.dtypes import CAST
from ....ops.indexing import IOTA
from ....trace import FULL, number
from ...program import Program
from ..index_map import Exchange, place_in_order, sent_rows
from ..scope import Scope
from .call import AttentionCall

MOVES = ("k", "v", "memory_segments")  # the operands that go around
ALONG = ("q", "k", "v", "segments", "memory_segments", *RESIDUALS)  # the operands that may change places for balance


def hops(call: AttentionCall) -> int:
    """The number of times that a block is sent on: n - 1, or until no query sees it."""
    n, sees = call.count, call.how.sees
    if not sees.causal or sees.window is None or "offset" in call.roles:
        return n - 1
    setting, how = call.scope.setting, call.how
    keys, queries = (setting.extents.local(call.dim(r, name), n) for r, name in (("k", how.keys), ("q", how.length)))
    if keys != queries:
        return n - 1
    return min(n - 1, -(-(sees.window - 1) // max(1, keys)))


def is_zigzag(call: AttentionCall) -> bool:
    """True if blocks change places for balance: under a causal mask of equal blocks of an even size, with no array of
    scores whose rows would have to move too."""
    setting, how, n = call.scope.setting, call.how, call.count
    length, keys = call.dim("q", how.length), call.dim("k", how.keys)
    size = setting.extents.local(length, n)
    rows = [r for r in ("bias", "mask") if r in call.roles and length in call.roles[r].dims]
    even = length.size == keys.size and size == setting.extents.local(keys, n) and size % 2 == 0
    plain = call.how.sees == Sees(causal=True) and "offset" not in call.roles
    return plain and even and size > 0 and n > 1 and not rows


class _Ring:
    """The equations of one ring."""

    def __init__(self, call: AttentionCall, cause: Cause):
        self.call, self.eqn, self.scope, self.cause = call, call.eqn, call.scope, cause
        self.n, self.hops, self.zigzag = call.count, hops(call), is_zigzag(call)
        self.how = dataclasses.replace(call.how, wide=True)

    def exchange(self, x: Var, out: Var, routes: tuple[tuple[int, int], ...], cause: Cause) -> Eqn:
        op = Exchange(self.how.keys, self.call.keys, routes)
        return Eqn(op, (x,), (out,), {}, self.eqn.where, self.eqn.backward, cause)

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
        return [self.places(v) if along else v for v, along in zip(ins, moved, strict=True)]

    def places(self, x: Var, back: bool = False) -> Var:
        """The value with its half blocks in zigzag order, along the dim that the ring's axes split; or in order again.

        The even half block is the first half of each device's block.
        """
        dim = next(d for d in x.dims if x.sharding.axes(d) == self.call.keys)
        routes = [_routes(self.n, half) for half in (0, 1)]
        if back:
            routes = [tuple(sorted((target, source) for source, target in route)) for route in routes]
        return _moved(self.scope, self.eqn, x, dim, self.call.keys, routes)

    def moving(self) -> list[int]:
        return [i for i, role in enumerate(self.call.roles) if role in MOVES]

    def with_held(self, ins: Sequence[Var], held: Sequence[Var]) -> list[Var]:
        """The operands, with the blocks that the device has now in the place of its own."""
        now = dict(zip(self.moving(), held, strict=True))
        return [now.get(i, v) for i, v in enumerate(ins)]

    def zeros(self, outs: Sequence[Var]) -> list[Var]:
        """Sums before the first step: results of attention over no keys, or zero cotangents, in the wide dtype."""
        sums: list[Var] = []
        for k, v in enumerate(outs):
            initial = Var(v.dims, wide_dtype(v.dtype), "", v.sharding)
            value = -math.inf if k == 1 and not self.call.gradient else 0
            value = number(value, initial.dtype)
            self.scope.add(FULL, [], [initial], self.eqn, value=value, shape=v.dims)
            sums.append(initial)
        return sums

    def number(self, value: int) -> Var:
        constant = Var((), np.dtype(np.int32))
        self.scope.add(FULL, [], [constant], self.eqn, value=np.int32(value), shape=())
        return constant

    def turn(self, eqns: list[Eqn], ins: Sequence[Var], sums: Sequence[Var], turn: Var) -> list[Var]:
        """Add one turn; returns the sums after it."""
        op = ATTENTION_TURN_GRAD if self.call.gradient else ATTENTION_TURN
        sums_after = [_like(v) for v in sums]
        params = {"how": self.how, "axes": self.call.keys, "zigzag": self.zigzag or None, "turns": self.hops + 1}
        eqns.append(Eqn(op, (*ins, *sums, turn), tuple(sums_after), params, self.eqn.where, self.eqn.backward))
        return sums_after

    def loop(self, ins: Sequence[Var], held: Sequence[Var], sums: Sequence[Var]) -> tuple[list[Var], list[Var]]:
        """Add the loop of all turns but the last; returns the blocks and the sums after it."""
        dim = self.scope.fresh_dim("turn", self.hops)
        turns = Var((dim,), np.dtype(np.int32))
        self.scope.add(IOTA, [], [turns], self.eqn, dim=dim, dtype=turns.dtype)
        moving = self.moving()
        consts = [v for i, v in enumerate(ins) if i not in moving]
        inner, blocks, inner_sums = [_like(v) for v in consts], [_like(v) for v in held], [_like(v) for v in sums]
        t = Var((), turns.dtype)
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
        self.scope.add(SCAN, [*consts, *held, *sums, turns], outs, self.eqn, control=control)
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
                self.scope.add(CAST, [x], [narrow], self.eqn, dtype=out.dtype)
                x = narrow
            if along:
                x = self.places(x, back=True)
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


def _moved(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes, routes: list[tuple[tuple[int, int], ...]]) -> Var:
    mesh, extents = scope.setting.mesh, scope.setting.extents
    n = mesh.count(axes)
    stored = n * extents.local(dim, n)
    size = stored // n // 2
    half = scope.fresh_dim(f"{dim.name}__half", stored // 2)
    cause = Cause(Because.BALANCE, eqn.operation.name, (dim.name,))
    came = [
        sent_rows(scope, eqn, x, dim, half, [k * size] * n, Exchange(half.name, axes, route), cause)
        for k, route in enumerate(routes)
    ]
    out = Var(x.dims, x.dtype, x.name, x.sharding)
    place_in_order(scope, eqn, came, [half, half], out, dim, 2 * size, axes)
    return out
