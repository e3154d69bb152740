"""Lower operations that move elements along a split dim: devices exchange the rows that change owner.

A device keeps the rows that it already stores. The other rows are sent in rounds. In each round, a device sends at most
one run of rows to at most one other device. A shift by a few elements is one round with that many rows (a halo),
regardless of the dim's size. GShard lowers windows the same way (Lepikhin et al., 2020, section 3.3 and appendix A.4).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (NumPy and jax.lax are only partly typed)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ...backend import varying
from ...dims import Dim, Shape
from ...ir import Because, BlockEffect, Blocks, Cause, CollectiveDefaults, Eqn, Pairs, Var
from ...layouts import Mesh, Sharding
from ...layouts.sharding import Axes
from ...ops.index_map import PLACE, ROWS, IndexMap, PlaceTable, replaced, shift_of
from ..collectives import AllGather
from .scope import Scope


@dataclass(frozen=True)
class Exchange(CollectiveDefaults):
    """Send every sender's block to its receiver; a device that receives nothing gets zeros.

    Devices are numbered row-major over `axes`. Like the collectives in `collectives`, but it changes the value and not
    its sharding, so no plan contains it.
    """

    name = "permute"
    sends = True
    dim: str
    axes: Axes
    routes: tuple[tuple[int, int], ...]  # (sender, receiver)

    def __str__(self) -> str:
        return f"permute {self.dim} over {','.join(self.axes)}"

    @property
    def effect(self) -> BlockEffect:
        return BlockEffect(moves=(self.dim,))

    def step(self, before: Sharding, mesh: Mesh) -> Sharding:
        """The sharding does not change."""
        return before

    def bytes_sent(self, local_bytes: int, mesh: Mesh) -> int:
        """The block's bytes: a sender sends its block once."""
        return local_bytes

    def pairs(self, mesh: Mesh) -> Pairs:
        """The routes with devices numbered row-major over `axes` in mesh order, as `lax.ppermute` expects."""
        ordered = [axis for axis in mesh.axes if axis in self.axes]
        at = np.arange(mesh.count(self.axes)).reshape([mesh.axes[axis] for axis in self.axes])
        number = np.argsort(at.transpose([self.axes.index(axis) for axis in ordered]).ravel())
        return [(int(number[a]), int(number[b])) for a, b in self.routes]

    def emit(self, x: Any, shape: Shape, before: Sharding, mesh: Mesh) -> Any:
        """Call `lax.ppermute`."""
        ordered = tuple(axis for axis in mesh.axes if axis in self.axes)
        return lax.ppermute(varying(x, self.axes), ordered, self.pairs(mesh))

    def simulate(self, blocks: Blocks, shape: Shape, before: Sharding, mesh: Mesh) -> Blocks:
        """Copy the blocks along the routes, for each group of devices separately."""
        grid = np.arange(mesh.size).reshape(tuple(mesh.axes.values()))
        at = [list(mesh.axes).index(axis) for axis in self.axes]
        groups = np.moveaxis(grid, at, range(len(at))).reshape(mesh.count(self.axes), -1).T
        received = [np.zeros_like(x) for x in blocks]
        for group in groups.tolist():
            for sender, receiver in self.routes:
                received[group[receiver]] = blocks[group[sender]].copy()
        return received


@dataclass(frozen=True)
class _Run:
    """Rows lo to hi of the sender's block that the receiver needs."""

    sender: int
    receiver: int
    lo: int
    hi: int


@dataclass(frozen=True)
class _Part:
    """A piece of the buffer from which a device picks its block of the result."""

    value: Var
    dim: Dim
    first: np.ndarray  # for each device, the operand's row that is first in this part; -1 if the part is zeros there
    size: int  # rows
    offset: float = 0.0  # mean of sender - receiver; sorting parts by it keeps the operand's order


def lower_index_map(scope: Scope, eqn: Eqn, xs: Sequence[Var], moves: IndexMap, axes: Axes, out: Var) -> None:
    """Add the equations that compute `out`, split over `axes` along `moves.out`, from operands split the same way."""
    rows_of = _rows_of(scope, len(xs), moves, axes)
    n, width = rows_of[0].shape
    dims = list(moves.dims)
    if len(xs) > 1:
        xs, dims, rows_of = _joined_if_less(scope, eqn, xs, dims, rows_of, axes)
    parts: list[_Part] = []
    rows = np.full((n, width), -1, np.int64)
    filled = 0
    for x, dim, mine in zip(xs, dims, rows_of, strict=True):
        for part in _parts(scope, eqn, x, dim, mine, axes):
            first = part.first[:, None]
            inside = (mine >= 0) & (first >= 0) & (mine >= first) & (mine < first + part.size)
            rows = np.where(inside, filled + mine - first, rows)
            parts.append(part)
            filled += part.size
    if rows.size and filled:
        fill = np.asarray(moves.fill)
        zero = fill.dtype != np.bool_ and not any(fill.tobytes())  # rows without a sender are zeros, and none is -0.0
        rows = _in_slices(rows, _unread(rows, moves), _silent(parts) if zero else np.zeros((n, filled), bool))
    dims = tuple(part.dim for part in parts)
    whole = tuple(not part.value.sharding.axes(part.dim) for part in parts)
    table = PlaceTable(tuple(map(tuple, rows.tolist())))
    values = [part.value for part in parts]
    scope.add(PLACE, values, [out], eqn, dims=dims, whole=whole, out=moves.out, table=table, fill=moves.fill, axes=axes)


def _rows_of(scope: Scope, operands: int, moves: IndexMap, axes: Axes) -> list[np.ndarray]:
    """For each operand, the row of each element that each device stores of the result; -1 for those of others."""
    n = scope.setting.mesh.count(axes)
    width = scope.setting.extents.local(moves.out, n)
    operand, index = (_stored(a, n * width).reshape(n, width) for a in moves.sources())
    return [np.where(operand == k, index, -1) for k in range(operands)]


def exchange_price(
    scope: Scope, shardings: Sequence[Sharding], xs: Sequence[Var], moves: IndexMap, assigned: Mapping[str, Axes]
) -> float:
    """The bytes, or picoseconds, of moving the rows of operands in these shardings; at most, of operands apart."""
    setting, axes, total = scope.setting, assigned.get(moves.out.name, ()), 0.0
    if not axes:
        return total
    n = setting.mesh.count(axes)
    for x, sharding, dim, mine in zip(xs, shardings, moves.dims, _rows_of(scope, len(xs), moves, axes), strict=True):
        length = setting.extents.local(dim, n)
        rows = min(_travel(_rounds(mine, length, n)), (n - 1) * length)
        stored = x.dtype.itemsize * math.prod(setting.extents.local_shape(x.dims, sharding, setting.mesh))
        size = rows * stored / max(length, 1)
        total += size if setting.seconds is None else round(1e12 * setting.seconds("permute", axes, size))
    return total


def _joined_if_less(
    scope: Scope, eqn: Eqn, xs: Sequence[Var], dims: list[Dim], rows_of: list[np.ndarray], axes: Axes
) -> tuple[Sequence[Var], list[Dim], list[np.ndarray]]:
    """Concatenate several operands into one, block by block on each device, if that sends fewer rows."""
    n = scope.setting.mesh.count(axes)
    lengths = [scope.setting.extents.local(dim, n) for dim in dims]
    total = sum(lengths)
    together = np.full_like(rows_of[0], -1)
    for k, (mine, length) in enumerate(zip(rows_of, lengths, strict=True)):
        if length:
            at = mine // length * total + sum(lengths[:k]) + mine % length
            together = np.where(mine >= 0, at, together)
    apart = sum(_travel(_rounds(mine, length, n)) for mine, length in zip(rows_of, lengths, strict=True))
    if _travel(_rounds(together, total, n)) >= apart:
        return xs, dims, rows_of
    joined = scope.fresh_dim(f"{dims[0].name}__joined", total * n, *(x.dims for x in xs))
    both = resized(xs[0], dims[0], joined, axes)
    place_in_order(scope, eqn, xs, dims, both, joined, total, axes)
    return [both], [joined], [together]


def place_in_order(
    scope: Scope, eqn: Eqn, xs: Sequence[Var], dims: Sequence[Dim], out: Var, dim: Dim, rows: int, axes: Axes
) -> None:
    """Put the blocks of each device one after the other into its block of `out`, which has so many rows along `dim`."""
    table = PlaceTable((tuple(range(rows)),) * scope.setting.mesh.count(axes))
    whole = (False,) * len(xs)
    scope.add(PLACE, xs, [out], eqn, dims=tuple(dims), whole=whole, out=dim, table=table, fill=0, axes=axes)


def _travel(rounds: Sequence[Sequence[_Run]]) -> int:
    """The maximum number of rows that one device sends."""
    return sum(max(run.hi - run.lo for run in runs) for runs in rounds)


def _parts(scope: Scope, eqn: Eqn, x: Var, dim: Dim, mine: np.ndarray, axes: Axes) -> list[_Part]:
    """A device's own block and the blocks it receives, in the operand's order; or the gathered dim, if less is sent."""
    n = scope.setting.mesh.count(axes)
    length = scope.setting.extents.local(dim, n)
    rounds = _rounds(mine, length, n)
    every = (n - 1) * length  # rows; as many in a single round stay a round, which some devices leave out
    if _travel(rounds) > every or (len(rounds) > 1 and _travel(rounds) == every):
        whole = gathered(scope, eqn, x, dim, axes, Cause(Because.MOST_ROWS, eqn.op.name, (dim.name,)))
        return [_Part(whole, dim, np.zeros(n, np.int64), scope.setting.extents.local(dim, 1))]
    parts = [_Part(x, dim, np.arange(n) * length, length)]
    parts += [_send(scope, eqn, x, dim, runs, length, n, axes) for runs in rounds]
    return sorted(parts, key=lambda part: part.offset)


def _unread(rows: np.ndarray, moves: IndexMap) -> np.ndarray:
    """True for elements that nothing reads."""
    unread = np.zeros(rows.size, bool)
    for first, last in moves.unread:
        unread[first:last] = True
    return unread.reshape(rows.shape) & (rows < 0)


def _silent(parts: Sequence[_Part]) -> np.ndarray:
    """For each device, True for the rows of the buffer that are zero because the device received nothing."""
    owner = np.repeat(np.arange(len(parts)), [part.size for part in parts])
    return np.stack([part.first < 0 for part in parts], 1)[:, owner]


def _in_slices(rows: np.ndarray, unread: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Replace fill entries by rows, so that each device reads one slice and needs no mask.

    An unread entry may have any row, and another one a row of zeros, if the fill is zero. A device that needs a mask
    for other entries keeps its fill entries.
    """
    length = zeros.shape[1]
    shift = shift_of(rows, length, unread)
    others = np.broadcast_to(rows.max(axis=0), rows.shape) if shift is None else shift.rows(rows.shape[1], length)
    usable = (others >= 0) & (unread | np.take_along_axis(zeros, np.maximum(others, 0), 1))
    changed = np.where((rows < 0) & usable, others, rows)
    if shift is None:
        return changed
    masked = ((others >= 0) & (changed < 0)).any(axis=1, keepdims=True)
    return np.where(masked, rows, changed)


def gathered(scope: Scope, eqn: Eqn, x: Var, dim: Dim, axes: Axes, cause: Cause) -> Var:
    """The value with a dim, split over these axes, gathered."""
    whole = Var(x.dims, x.dtype, "", x.sharding.with_split(dim.name, ()))
    scope.add(AllGather(dim.name, axes), [x], [whole], eqn, cause)
    return whole


def resized(x: Var, old: Dim, new: Dim, axes: Axes) -> Var:
    """A variable like x with one dim replaced, and that split over these axes."""
    sharding = x.sharding.with_split(old.name, ()).with_split(new.name, axes)
    return Var(replaced(x.dims, old, new), x.dtype, "", sharding)


def _stored(a: np.ndarray, size: int) -> np.ndarray:
    return np.pad(a, (0, size - len(a)), constant_values=-1)


def _rounds(mine: np.ndarray, length: int, n: int) -> list[list[_Run]]:
    """The runs that devices lack, in rounds; in a round, no device sends or receives twice. Equal sizes share a
    round.
    """
    lacking: list[_Run] = []
    for receiver in range(n):
        rows = mine[receiver][mine[receiver] >= 0]
        for sender in np.unique(rows // length) if length else []:
            if sender != receiver:
                local = rows[rows // length == sender] - sender * length
                lacking.append(_Run(int(sender), receiver, int(local.min()), int(local.max()) + 1))
    rounds: list[list[_Run]] = []
    busy: list[tuple[set[int], set[int]]] = []
    for run in sorted(lacking, key=lambda run: (run.lo - run.hi, run.sender - run.receiver, run.receiver)):
        free = (i for i, (out, into) in enumerate(busy) if run.sender not in out and run.receiver not in into)
        i = next(free, len(rounds))
        if i == len(rounds):
            rounds.append([])
            busy.append((set(), set()))
        rounds[i].append(run)
        busy[i][0].add(run.sender)
        busy[i][1].add(run.receiver)
    return rounds


def _send(scope: Scope, eqn: Eqn, x: Var, dim: Dim, runs: Sequence[_Run], length: int, n: int, axes: Axes) -> _Part:
    """One round: cut out the rows to send, and send them."""
    size = max(run.hi - run.lo for run in runs)
    default = min(min(run.lo for run in runs), length - size)
    starts = [default] * n
    first = np.full(n, -1, np.int64)
    for run in runs:
        starts[run.sender] = min(run.lo, length - size)
        first[run.receiver] = run.sender * length + starts[run.sender]
    rows = scope.fresh_dim(f"{dim.name}__rows", size * n, x.dims)
    pairs = tuple(sorted((run.sender, run.receiver) for run in runs))
    cause = Cause(Because.ROWS, eqn.op.name, (dim.name,), amounts=(size, length))
    came = sent_rows(scope, eqn, x, dim, rows, starts, Exchange(rows.name, axes, pairs), cause)
    return _Part(came, rows, first, size, float(np.mean([run.sender - run.receiver for run in runs])))


def sent_rows(
    scope: Scope, eqn: Eqn, x: Var, dim: Dim, rows: Dim, starts: Sequence[int], exchange: Exchange, cause: Cause
) -> Var:
    """The rows that each device cuts out of its block, from its `starts` on, on the devices to which they are sent."""
    cut, came = (resized(x, dim, rows, exchange.axes) for _ in range(2))
    scope.add(ROWS, [x], [cut], eqn, dim=dim, rows=rows, starts=tuple(starts), axes=exchange.axes)
    scope.add(exchange, [cut], [came], eqn, cause)
    return came
