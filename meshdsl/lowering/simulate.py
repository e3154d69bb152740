"""Simulate all devices of a program in NumPy: the oracle for `emit`.

It shares only the kernels with `emit`, evaluated by NumPy; collectives run by their definition on the list of all
devices' blocks. `poison` fills padding with NaN (or a large integer), so that padding that leaks into results shows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (NumPy, and parameters of equations, are only partly typed)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..backend import Local, NumPy
from ..dims import show
from ..errors import InternalError, ShapeError, expect
from ..ir import Cond, Eqn, Graph, Scan, Var, While
from ..layouts.mesh import Mesh
from .permute import coordinates, index_along
from .program import Program

Blocks = list[np.ndarray]  # one per device, row-major over the mesh
Axes = tuple[str, ...]


@cache
def poison(dtype: np.dtype) -> Any:
    """The fill value of padding: NaN, True, or a large integer."""
    if jnp.issubdtype(dtype, np.inexact):
        return np.nan
    return True if dtype == np.dtype(bool) else np.iinfo(dtype).max // 3


def lay_out(program: Program, v: Var, array: np.ndarray) -> Blocks:
    """Every device's block of a global array, with poisoned padding."""
    stored, sizes = _padded(array, program.stored_shape(v)), program.local_shape(v)
    blocks: dict[tuple[int, ...], np.ndarray] = {}
    places = _places(program, v)
    for place in places:
        if place not in blocks:
            blocks[place] = np.array(stored[_part(place, sizes)])
    return shared([blocks[place] for place in places])


def _padded(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """An array with poison at its end, up to these sizes; the array itself if it has them."""
    if x.shape == tuple(sizes):
        return x
    longer = np.full(sizes, poison(x.dtype), x.dtype)
    longer[tuple(map(slice, x.shape))] = x
    return longer


def _places(program: Program, v: Var) -> list[tuple[int, ...]]:
    """For every device, the index of its block among those of the value, along each dim."""
    axes = program.block(v).axes
    return [tuple([index_along(program.mesh, at, along) for along in axes]) for at in coordinates(program.mesh)]


def _part(place: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The part of a value, with its padding, that is the block at this index."""
    return tuple([slice(i * n, i * n + n) for i, n in zip(place, sizes, strict=True)])


def shared(blocks: Blocks) -> Blocks:
    """The blocks, where devices with equal bits have the same array, so that `_kernel` computes with it only once."""
    first: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
    same = {id(x): first.setdefault((x.shape, x.tobytes()), x) for x in {id(x): x for x in blocks}.values()}
    return [same[id(x)] for x in blocks]


def read_back(program: Program, v: Var, blocks: Blocks) -> np.ndarray:
    """The global array without padding; raises `InternalError` if replicas of a block differ between devices."""
    stored = np.zeros(program.stored_shape(v), v.dtype)
    written = np.zeros(stored.shape, bool)
    unpadded = tuple(slice(0, d.size) for d in v.dims)
    inside = np.zeros(stored.shape, bool)
    inside[unpadded] = True
    sizes, seen = program.local_shape(v), set[tuple[tuple[int, ...], int]]()
    for coords, place, x in zip(coordinates(program.mesh), _places(program, v), blocks, strict=True):
        if (place, id(x)) in seen:
            continue
        seen.add((place, id(x)))
        part = _part(place, sizes)
        overlap = written[part] & inside[part]
        if not _same(stored[part][overlap], x[overlap]):
            raise InternalError(f"devices disagree on {v} at {coords}")
        stored[part] = x
        written[part] = True
    return stored[unpadded]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes() or bool(np.all((a == b) | ((a != a) & (b != b))))


def simulate(program: Program, *arrays: Any) -> list[np.ndarray]:
    """Run the program on tensors or arrays (undivided, in the order of its inputs); returns its results in order.

    Raises `ShapeError` if the number or the shapes of inputs do not fit, `InternalError` if devices that must store the
    same values store different ones.

    >>> import meshdsl as md
    >>> program = md.compile(lambda x: md.sum(x), "rows:4", "n:rows").program(md.spec("n:6"))
    >>> float(md.simulate(program, md.iota("n:6", "float32"))[0])
    15.0
    """
    expect("program", program, Program)
    values = [x.numpy() if hasattr(x, "numpy") else np.asarray(x) for x in arrays]
    expected = [tuple(d.size for d in v.dims) for v in program.ins]
    if [x.shape for x in values] != expected:
        inputs = ", ".join(f"{v.name} {show(v.dims)}" for v in program.ins)
        raise ShapeError(
            f"the program takes inputs of shapes {expected}, got {[x.shape for x in values]}\n"
            f"  give one undivided array for each input, in order: {inputs}"
        )
    with np.errstate(all="ignore"):
        ins = [lay_out(program, v, x.astype(v.dtype)) for v, x in zip(program.ins, values, strict=True)]
        outs = _run(program, ins)
    return [read_back(program, v, x) for v, x in zip(program.outs, outs, strict=True)]


def _run(program: Graph, ins: Sequence[Blocks]) -> list[Blocks]:
    assert isinstance(program, Program)
    env: dict[Var, Blocks] = dict(zip(program.ins, ins, strict=True))
    for eqn in program.eqns:
        xs = [env[v] for v in eqn.ins]
        results = _results(program, eqn, xs)
        for v, blocks in zip(eqn.outs, results, strict=True):
            shapes, stored = {x.shape for x in blocks}, program.local_shape(v)
            if shapes != {stored}:
                raise InternalError(f"{eqn.op} at {eqn.where} made blocks {shapes}, stored as {stored}")
        env.update(zip(eqn.outs, results, strict=True))
    return [env[v] for v in program.outs]


def _results(program: Program, eqn: Eqn, xs: Sequence[Blocks]) -> Sequence[Blocks]:
    if eqn.collective is not None:
        source = eqn.ins[0]
        blocks = [_resized(x, program.sent_shape(eqn)) for x in xs[0]]
        blocks = eqn.collective.simulate(blocks, source.dims, source.sharding, program.mesh, *xs[1:])
        return [shared([_resized(x, program.local_shape(eqn.outs[0])) for x in blocks])]
    match eqn.control:
        case Scan() as loop:
            return _scan(program, eqn, loop, xs)
        case While() as loop:
            return _while(eqn, loop, xs)
        case Cond() as branch:
            return _run(branch.yes if _agreed(xs[0], eqn) else branch.no, xs[1:])
        case _:
            return _kernel(program, eqn, xs)


def _resized(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """A block with other sizes, with poisoned padding."""
    return x if x.shape == tuple(sizes) else _padded(x[tuple(map(slice, sizes))], sizes)


def _agreed(blocks: Blocks, eqn: Eqn) -> bool:
    """A predicate's value; raises `InternalError` if devices disagree."""
    values = {bool(x) for x in blocks}
    if len(values) != 1:
        raise InternalError(f"devices disagree on the predicate of {eqn.op} at {eqn.where}")
    return values.pop()


def _while(eqn: Eqn, loop: While, xs: Sequence[Blocks]) -> Sequence[Blocks]:
    consts, carry = loop.inputs(xs)
    while _agreed(_run(loop.test, [*consts, *carry])[0], eqn):
        carry = _run(loop.body, [*consts, *carry])
    return carry


def _kernel(program: Program, eqn: Eqn, xs: Sequence[Blocks]) -> list[Blocks]:
    """Run the kernel once for all devices with the same blocks and the same index along the axes that it asks about."""
    ins, outs = tuple(map(program.block, eqn.ins)), tuple(map(program.block, eqn.outs))
    mesh, devices = program.mesh, coordinates(program.mesh)
    runs: dict[tuple[int, ...], list[_Run]] = {}  # by the identity of the operands
    each: list[_Run] = []  # the run that gives a device its results
    for i, coords in enumerate(devices):
        operands = [blocks[i] for blocks in xs]
        same_blocks = runs.setdefault(tuple(map(id, operands)), [])
        run = _run_for(mesh, coords, same_blocks)
        if run is None:
            asked: dict[Axes, int] = {}
            local = Local(NumPy, ins, outs, partial(_recorded, mesh, coords, asked), mesh.count)
            ys = eqn.operation.kernel(local, *operands, **eqn.params)
            ys = ys if isinstance(ys, tuple | list) else (ys,)
            run = _Run(asked, [np.asarray(y, v.dtype) for y, v in zip(ys, eqn.outs, strict=True)])
            same_blocks.append(run)
        each.append(run)
    return [[run.results[k] for run in each] for k in range(len(outs))]


class _Run(NamedTuple):
    asked: Mapping[Axes, int]  # the device's index along the axes that the kernel asked about
    results: list[np.ndarray]


def _run_for(mesh: Mesh, coords: dict[str, int], runs: Sequence[_Run]) -> _Run | None:
    """The run on a device with the same index along every axis that was asked about."""
    for run in runs:
        if not run.asked or all(index_along(mesh, coords, axes) == n for axes, n in run.asked.items()):
            return run
    return None


def _recorded(mesh: Mesh, coords: dict[str, int], asked: dict[Axes, int], axes: Axes) -> int:
    asked[axes] = index_along(mesh, coords, axes)
    return asked[axes]


def _scan(program: Program, eqn: Eqn, loop: Scan, xs: Sequence[Blocks]) -> list[Blocks]:
    consts, carry, stacks = loop.inputs(xs)
    ys_by_trip: dict[int, Sequence[Blocks]] = {}
    for t in reversed(range(loop.trips)) if loop.reverse else range(loop.trips):
        rows = [shared([x[t] for x in blocks]) for blocks in stacks]
        carry, ys_by_trip[t] = loop.results(_run(loop.body, [*consts, *carry, *rows]))
    ys = []
    for k, v in enumerate(loop.results(eqn.outs)[1]):
        filled = [np.full(program.local_shape(v), poison(v.dtype), v.dtype) for _ in range(program.mesh.size)]
        for t, outs in ys_by_trip.items():
            for stack, row in zip(filled, outs[k], strict=True):
                stack[t] = row
        ys.append(shared(filled))
    return [*carry, *ys]
