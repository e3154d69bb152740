"""Emit a program as one function for `jax.shard_map`: kernels for operations, JAX calls for collectives.

`check_vma=True` stays on, so that JAX checks our shardings by its own type system. `Emission` has what depends on the
compiler.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (NumPy and jax are only partly typed)

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..backend import Block, Jax, Local, varying
from ..control import BARRIER
from ..control.host import host_values
from ..dims import Dim, Shape
from ..ir import Cond, Eqn, Graph, Scan, Var, While
from ..layouts import Mesh, Sharding
from .asynchrony import FENCE, Start, emit_fence
from .program import Program
from .ragged import RaggedAllToAll

Env = dict[Var, Any]


def _none(eqn: Eqn, blocks: Sequence[Block]) -> Set[Dim]:
    return frozenset()


@dataclass(frozen=True)
class Emission:
    """What a compiler needs in the functions that it gets. The defaults are for one without known needs."""

    xp: Any = Jax  # the functions of kernels
    left_out: Callable[[Eqn, Sequence[Block]], Set[Dim]] = _none  # dims of local size 1 that a kernel does not see
    late_stacks: float = math.inf  # elements from which on stacks of a backward loop are allocated when it starts
    ragged: bool = True  # JAX has a ragged all_to_all for it; else every slot is sent


PLAIN = Emission()


def partition_spec(shape: Shape, sharding: Sharding) -> PartitionSpec:
    """A sharding as a JAX `PartitionSpec`, without pending axes."""
    return PartitionSpec(*(sharding.axes(d) or None for d in shape))


def emit(
    program: Program, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, emission: Emission = PLAIN
) -> Callable[..., Any]:
    """The program as a function of global arrays, in stored sizes, that returns a list of global arrays."""
    filled = [0 not in program.local_shape(v) for v in program.ins]
    in_specs = tuple(partition_spec(v.dims, v.sharding) for v in compress(program.ins, filled))
    out_specs = [partition_spec(v.dims, v.sharding) for v in program.outs]

    def device(*xs: Any) -> list[Any]:
        arrays = iter(xs)
        ins = [next(arrays) if k else _empty(program, v) for k, v in zip(filled, program.ins, strict=True)]
        return run_equations(program, ins, emission)

    mapped = jax.shard_map(device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    @functools.wraps(device)
    def call(*xs: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # not the one that the caller set
            return mapped(*compress(xs, filled))

    return call


def _empty(program: Program, v: Var) -> Any:
    """An input without elements, which each device makes: XLA may fail to compile a `shard_map` of none but these."""
    return varying(jnp.zeros(program.local_shape(v), v.dtype), v.sharding.varying)


def shardings(vars: Sequence[Var], mesh: Any) -> list[NamedSharding]:
    """JAX shardings of a program's inputs or results."""
    return [NamedSharding(mesh, partition_spec(v.dims, v.sharding)) for v in vars]


def run_equations(
    program: Graph,
    ins: Sequence[Any],
    emission: Emission = PLAIN,
    kernels: Mapping[Var, Callable[[Any], Any]] | None = None,
) -> list[Any]:
    """Run a program's equations on arrays (inside `shard_map`, one device's blocks) and return its results.

    `kernels` replaces the kernels of equations with one operand and these results.
    """
    kernels = kernels or {}
    assert isinstance(program, Program)
    env: Env = dict(zip(program.ins, ins, strict=True))
    planned = any(isinstance(eqn.op, Start) for eqn in program.eqns)
    for number, eqn in enumerate(program.eqns):
        xs = [env[v] for v in eqn.ins]
        # the number identifies an equation of a plan in a compiler's text
        with jax.named_scope(f"eqn{number}") if planned else nullcontext():
            results = [kernels[eqn.outs[0]](*xs)] if eqn.outs[0] in kernels else _results(program, eqn, xs, emission)
            env.update(zip(eqn.outs, results, strict=True))
    return [env[v] for v in program.outs]


def _results(program: Program, eqn: Eqn, xs: list[Any], emission: Emission) -> Sequence[Any]:
    if eqn.collective is not None:
        source, op = eqn.ins[0], eqn.collective
        send = op.emit_padded if isinstance(op, RaggedAllToAll) and not emission.ragged else op.emit
        x = _resized(xs[0], program.sent_shape(eqn))
        y = send(x, source.dims, source.sharding, program.mesh, *xs[1:])
        return [_resized(y, program.local_shape(eqn.outs[0]))]
    match eqn.control:
        case Scan() as loop:
            return _scan(program, eqn, loop, xs, emission)
        case While() as loop:
            return _while(loop, xs, emission)
        case Cond() as branch:
            return _cond(branch, xs, emission)
        case _ if eqn.op is FENCE:
            return emit_fence(eqn, xs, program.mesh)
        case _:
            return _kernel(program, eqn, xs, emission)


def _resized(x: Any, sizes: Sequence[int]) -> Any:
    """A block with other sizes: padded at the end of a dim that a collective cuts, trimmed along one that it joins."""
    if x.shape == tuple(sizes):
        return x
    x = x[tuple(slice(n) for n in sizes)]
    return Jax.pad(x, [(0, n - size) for n, size in zip(sizes, x.shape, strict=True)])


def _kernel(program: Program, eqn: Eqn, xs: Sequence[Any], emission: Emission) -> list[Any]:
    mesh: Mesh = program.mesh
    ins, outs = (tuple(map(program.block, vs)) for vs in (eqn.ins, eqn.outs))
    left_out = emission.left_out(eqn, (*ins, *outs))
    if left_out:
        ins, outs = (tuple(_without(one, left_out) for one in blocks) for blocks in (ins, outs))
        xs = [Jax.reshape(x, one.sizes) for x, one in zip(xs, ins, strict=True)]
    local = Local(emission.xp, ins, outs, index=lambda axes: lax.axis_index(axes), count=mesh.count)
    with jax.named_scope(eqn.op.name):
        results = eqn.operation.kernel(local, *xs, **eqn.params)
    results = list(results) if isinstance(results, tuple | list) else [results]
    if not left_out:
        return results
    return [Jax.reshape(y, program.local_shape(v)) for y, v in zip(results, eqn.outs, strict=True)]


def _without(of: Block, dims: Set[Dim]) -> Block:
    """The block without these dims."""
    kept = [i for i, dim in enumerate(of.dims) if dim not in dims]
    return Block(tuple(of.dims[i] for i in kept), tuple(of.sizes[i] for i in kept), tuple(of.axes[i] for i in kept))


@dataclass
class _Stacks:
    """The stacks that a loop fills, as one trip sees them: the row to write, and the arrays that hold the rows."""

    vars: Mapping[int, Var]
    at: Any
    filled: dict[int, Any]

    def write(self, i: int, row: Any) -> None:
        row = varying(Jax.reshape(row, _long(row.shape)), self.vars[i].sharding.varying)
        self.filled[i] = lax.dynamic_update_index_in_dim(self.filled[i], row, self.at, 0, allow_negative_indices=False)

    def write_and_read(self, i: int, row: Any) -> Any:
        """The row as it is stored. Behind a barrier, its index is unknown, so compilers read and do not compute."""
        self.write(i, row)
        index = lax.optimization_barrier(self.at)
        stored = lax.dynamic_index_in_dim(self.filled[i], index, 0, keepdims=False, allow_negative_indices=False)
        return Jax.reshape(stored, row.shape)


def _barriers(body: Graph, rows: Sequence[Var]) -> dict[Var, int]:
    """The barriers of a body on these of its results, each with the number of the row that it writes and reads back."""
    computed = {v for eqn in body.eqns for v in eqn.outs}.intersection(rows)
    found = (eqn for eqn in body.eqns if eqn.op is BARRIER and eqn.ins[0] in computed)
    return {eqn.outs[0]: rows.index(eqn.ins[0]) for eqn in found}


def _rows(x: Any, trips: int) -> Any:
    """An operand of `lax.scan`."""
    return Jax.reshape(x, (trips, *_long(x.shape[1:])))


def _scan(program: Program, eqn: Eqn, loop: Scan, xs: Sequence[Any], emission: Emission) -> list[Any]:
    """`lax.scan` with its stacks as carries: JAX starts stacks as zeros, which TPUs write before a reverse loop."""
    consts, first, inputs = loop.inputs(xs)
    carries, row_vars = loop.results(loop.body.outs)
    stacks = dict(enumerate(loop.results(eqn.outs)[1]))
    trips, on_host = loop.trips, host_values(loop.body)
    start, by = (trips - 1, -1) if loop.reverse else (0, 1)
    # JAX has no arrays without values in the host's memory, and no writes into a stack without rows
    own = {i: v for i, v in stacks.items() if trips and row_vars[i] not in on_host}
    barriers = {v: i for v, i in _barriers(loop.body, row_vars).items() if i in own}

    def step(state: tuple[Any, Sequence[Any], Mapping[int, Any]], rows: Sequence[Any]) -> Any:
        at, carry, filled = state
        written = _Stacks(own, at, dict(filled))
        kernels = {v: functools.partial(written.write_and_read, i) for v, i in barriers.items()}
        rows = [Jax.reshape(row, x.shape[1:]) for row, x in zip(rows, inputs, strict=True)]
        carry, ys = loop.results(run_equations(loop.body, [*consts, *carry, *rows], emission, kernels))
        for i in sorted(own.keys() - barriers.values()):
            written.write(i, ys[i])
        others = {i: y for i, y in enumerate(ys) if i not in own}
        return (at + by, _varying(carry, carries), written.filled), others

    rows = [_rows(x, trips) for x in inputs]
    late = first if eqn.backward and _largest(program, own, trips) >= emission.late_stacks else ()
    unwritten = _unwritten(program, own, trips, late)
    state = jnp.int32(start), _varying(first, carries), unwritten
    (_, carry, filled), others = lax.scan(step, state, rows, length=trips, reverse=loop.reverse)
    filled = {i: Jax.reshape(x, (trips, *program.local_shape(stacks[i])[1:])) for i, x in filled.items()}
    return [*carry, *(({**filled, **others})[i] for i in stacks)]


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a row without ones: compilers copy rows with dims of size 1 into another device layout."""
    return tuple(n for n in shape if n != 1)


def _largest(program: Program, stacks: Mapping[int, Var], trips: int) -> int:
    """The elements of the largest of these stacks on one device."""
    return max((trips * math.prod(program.local_shape(v)[1:]) for v in stacks.values()), default=0)


def _unwritten(program: Program, stacks: Mapping[int, Var], trips: int, after: Sequence[Any]) -> Mapping[int, Any]:
    """One device's blocks of stacks of `trips` rows before they are written: on TPUs and GPUs, memory as it is.

    They are zero in a program without mesh axes, which may be GSPMD's: that cannot split memory without values. With
    arrays `after`, the stacks are allocated when these are computed: they come from a conditional on the arrays, whose
    branches are the same.
    """
    create = lax.empty if program.mesh.axes else jnp.zeros

    def allocate() -> dict[int, Any]:
        shapes = {i: (trips, *_long(program.local_shape(v)[1:])) for i, v in stacks.items()}
        return {i: varying(create(shapes[i], v.dtype), v.sharding.varying) for i, v in stacks.items()}

    elements = [lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()) for x in after if x.size]
    if not elements or not program.mesh.axes:
        return allocate()
    return lax.cond(functools.reduce(operator.and_, [x == x for x in elements]), allocate, allocate)


def _while(loop: While, xs: Sequence[Any], emission: Emission) -> list[Any]:
    consts, first = loop.inputs(xs)
    return lax.while_loop(
        lambda carry: run_equations(loop.test, [*consts, *carry], emission)[0],
        lambda carry: _varying(run_equations(loop.body, [*consts, *carry], emission), loop.body.outs),
        _varying(first, loop.body.outs),
    )


def _cond(branch: Cond, xs: Sequence[Any], emission: Emission) -> list[Any]:
    def arm(graph: Graph) -> Callable[..., list[Any]]:
        return lambda *args: _varying(run_equations(graph, args, emission), graph.outs)

    return lax.cond(xs[0], arm(branch.yes), arm(branch.no), *xs[1:])


def _varying(xs: Sequence[Any], vars: Sequence[Var]) -> list[Any]:
    """Cast to varying over the axes of these values: JAX needs one type for a carry, and for both branches."""
    return [varying(x, v.sharding.varying) for x, v in zip(xs, vars, strict=True)]
