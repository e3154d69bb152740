"""Emit a program as one function for `jax.shard_map`: kernels for operations, JAX calls for collectives.

It decides two things: which dims of local size 1 a large kernel leaves out, and when large stacks of a backward loop
are allocated. `check_vma=True` stays on, so that JAX checks our shardings by its own type system.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (NumPy and jax are only partly typed)

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..backend import Block, Jax, Local, varying
from ..control import BARRIER
from ..control.host import host_values
from ..dims import Dim, Shape
from ..errors import LayoutError, at
from ..ir import Cond, Eqn, Graph, Scan, Var, While, walk
from ..layouts import Mesh, Sharding
from .asynchrony import FENCE, Start, emit_fence
from .program import Program
from .ragged import RaggedAllToAll

__all__ = ["check_platform", "emit", "partition_spec", "run_equations", "shardings"]

Env = dict[Var, Any]

WIDE = 2**22  # elements; a smaller kernel takes about as long with dims of local size 1
LONG = 2048  # elements of a softmax that the TPU compiler computes in the kernel of the product (2,048 yes, 4,096 no)


def partition_spec(shape: Shape, sharding: Sharding) -> PartitionSpec:
    """A sharding as a JAX `PartitionSpec`, without pending axes."""
    return PartitionSpec(*(sharding.axes(d) or None for d in shape))


def emit(program: Program, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Callable[..., Any]:
    """The program as a function of global arrays, in stored sizes, that returns a list of global arrays."""
    in_specs = tuple(partition_spec(v.dims, v.sharding) for v in program.ins)
    out_specs = [partition_spec(v.dims, v.sharding) for v in program.outs]

    def device(*xs: Any) -> list[Any]:
        return run_equations(program, xs)

    mapped = jax.shard_map(device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    @functools.wraps(device)
    def call(*xs: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # not the one that the caller set
            return mapped(*xs)

    return call


def shardings(vars: Sequence[Var], mesh: Any) -> list[NamedSharding]:
    """JAX shardings of a program's inputs or results."""
    return [NamedSharding(mesh, partition_spec(v.dims, v.sharding)) for v in vars]


def run_equations(
    program: Graph, ins: Sequence[Any], kernels: Mapping[Var, Callable[[Any], Any]] | None = None
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
            results = [kernels[eqn.outs[0]](*xs)] if eqn.outs[0] in kernels else _results(program, eqn, xs)
            env.update(zip(eqn.outs, results, strict=True))
    return [env[v] for v in program.outs]


def _results(program: Program, eqn: Eqn, xs: list[Any]) -> Sequence[Any]:
    if eqn.collective is not None:
        source = eqn.ins[0]
        return [eqn.collective.emit(xs[0], source.dims, source.sharding, program.mesh, *xs[1:])]
    match eqn.control:
        case Scan() as loop:
            return _scan(program, eqn, loop, xs)
        case While() as loop:
            return _while(loop, xs)
        case Cond() as branch:
            return _cond(branch, xs)
        case _ if eqn.op is FENCE:
            return emit_fence(eqn, xs, program.mesh)
        case _:
            return _kernel(program, eqn, xs)


def _kernel(program: Program, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    mesh: Mesh = program.mesh
    ins, outs = (tuple(map(program.block, vs)) for vs in (eqn.ins, eqn.outs))
    left_out = _left_out(eqn, (*ins, *outs))
    if left_out:
        ins, outs = (tuple(_without(one, left_out) for one in blocks) for blocks in (ins, outs))
        xs = [Jax.reshape(x, one.sizes) for x, one in zip(xs, ins, strict=True)]
    local = Local(Jax, ins, outs, index=lambda axes: lax.axis_index(axes), count=mesh.count)
    with jax.named_scope(eqn.op.name):
        results = eqn.operation.kernel(local, *xs, **eqn.params)
    results = list(results) if isinstance(results, tuple | list) else [results]
    if not left_out:
        return results
    return [Jax.reshape(y, program.local_shape(v)) for y, v in zip(results, eqn.outs, strict=True)]


def _left_out(eqn: Eqn, blocks: Sequence[Block]) -> Set[Dim]:
    """The dims of local size 1 that a kernel need not see. TPU compilers fuse a large softmax only without them.

    Gradients of weights, and other products without a dim that both operands and the result have, are in no softmax.
    Of a longer softmax than `LONG` that it recognises, the compiler stores the exponentials (see `targets/scores.py`).
    """
    if not eqn.operation.by_name or max(math.prod(one.sizes) for one in blocks) < WIDE:
        return frozenset()
    if eqn.operation.product and not frozenset.intersection(*(frozenset(one.dims) for one in blocks)):
        return frozenset()
    sizes = {(dim, n) for one in blocks for dim, n in zip(one.dims, one.sizes, strict=True)}
    if max((n for _, n in sizes), default=1) > LONG:
        return frozenset()
    return {dim for dim, n in sizes if n == 1} - {dim for dim, n in sizes if n != 1} - {*eqn.params.get("over", ())}


def _without(of: Block, dims: Set[Dim]) -> Block:
    """The block without these dims."""
    kept = [i for i, dim in enumerate(of.dims) if dim not in dims]
    return Block(tuple(of.dims[i] for i in kept), tuple(of.sizes[i] for i in kept), tuple(of.axes[i] for i in kept))


def _scan(program: Program, eqn: Eqn, loop: Scan, xs: Sequence[Any]) -> list[Any]:
    """`lax.scan` with its stacks as carries: JAX starts stacks as zeros, which TPUs write before a reverse loop."""
    consts, first, inputs = loop.inputs(xs)
    carries, row_vars = loop.results(loop.body.outs)
    stacks = dict(enumerate(loop.results(eqn.outs)[1]))
    trips, on_host = loop.trips, host_values(loop.body)
    # JAX has no arrays without values in the host's memory, and no writes into a stack without rows
    own = {i: v for i, v in stacks.items() if trips and row_vars[i] not in on_host}
    computed = {v for eqn in loop.body.eqns for v in eqn.outs}
    barriers = {
        eqn.outs[0]: row_vars.index(eqn.ins[0])
        for eqn in loop.body.eqns
        if eqn.op is BARRIER and eqn.ins[0] in computed.intersection(row_vars[i] for i in own)
    }

    def step(state: tuple[Any, Sequence[Any], Mapping[int, Any]], rows: Sequence[Any]) -> Any:
        at, carry, filled = state
        filled = dict(filled)

        def write(i: int, row: Any) -> None:
            row = varying(row, stacks[i].sharding.varying)
            filled[i] = lax.dynamic_update_index_in_dim(filled[i], row, at, 0, allow_negative_indices=False)

        def write_and_read(i: int, row: Any) -> Any:
            """The row as it is stored. Behind a barrier, its index is unknown, so compilers read and do not compute."""
            write(i, row)
            index = lax.optimization_barrier(at)
            return lax.dynamic_index_in_dim(filled[i], index, 0, keepdims=False, allow_negative_indices=False)

        kernels = {v: functools.partial(write_and_read, i) for v, i in barriers.items()}
        carry, ys = loop.results(run_equations(loop.body, [*consts, *carry, *rows], kernels))
        for i in own:
            if i not in barriers.values():
                write(i, ys[i])
        others = {i: y for i, y in enumerate(ys) if i not in own}
        return (at + (-1 if loop.reverse else 1), _varying(carry, carries), filled), others

    # the stacked dim may be stored with padding
    rows = [x if x.shape[0] == trips else x[:trips] for x in inputs]
    unwritten = _unwritten(program, own, trips, first if eqn.backward else ())
    state = jnp.int32(trips - 1 if loop.reverse else 0), _varying(first, carries), unwritten
    (_, carry, filled), others = lax.scan(step, state, rows, length=trips, reverse=loop.reverse)
    return [*carry, *(_padded(program, v, (filled | others)[i]) for i, v in stacks.items())]


def _unwritten(program: Program, stacks: Mapping[int, Var], trips: int, after: Sequence[Any]) -> Mapping[int, Any]:
    """One device's blocks of stacks of `trips` rows before they are written: on TPUs and GPUs, memory as it is.

    They are zero in a program without mesh axes, which may be GSPMD's: that cannot split memory without values.

    The TPU compiler would allocate large ones before the arrays `after` are computed. There they come from a
    conditional on these arrays, whose branches are the same.
    """
    create = lax.empty if program.mesh.axes else jnp.zeros
    shapes = {i: (trips, *program.local_shape(v)[1:]) for i, v in stacks.items()}

    def allocate() -> dict[int, Any]:
        return {i: varying(create(shapes[i], v.dtype), v.sharding.varying) for i, v in stacks.items()}

    elements = [lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()) for x in after if x.size]
    if not elements or not program.mesh.axes or max(map(math.prod, shapes.values()), default=0) < WIDE:
        return allocate()

    def allocate_after(*elements: Any) -> dict[int, Any]:
        return lax.cond(functools.reduce(operator.and_, [x == x for x in elements]), allocate, allocate)

    return lax.platform_dependent(*elements, tpu=allocate_after, default=lambda *_: allocate())


def _padded(program: Program, v: Var, stack: Any) -> Any:
    """The stack with the padding with which its first dim is stored."""
    pad = program.local_shape(v)[0] - len(stack)
    return jnp.pad(stack, [(0, pad)] + [(0, 0)] * (stack.ndim - 1)) if pad else stack


def _while(loop: While, xs: Sequence[Any]) -> list[Any]:
    consts, first = loop.inputs(xs)
    return lax.while_loop(
        lambda carry: run_equations(loop.test, [*consts, *carry])[0],
        lambda carry: _varying(run_equations(loop.body, [*consts, *carry]), loop.body.outs),
        _varying(first, loop.body.outs),
    )


def _cond(branch: Cond, xs: Sequence[Any]) -> list[Any]:
    def arm(graph: Graph) -> Callable[..., list[Any]]:
        return lambda *args: _varying(run_equations(graph, args), graph.outs)

    return lax.cond(xs[0], arm(branch.yes), arm(branch.no), *xs[1:])


def _varying(xs: Sequence[Any], vars: Sequence[Var]) -> list[Any]:
    """Cast to varying over the axes of these values: JAX needs one type for a carry, and for both branches."""
    return [varying(x, v.sharding.varying) for x, v in zip(xs, vars, strict=True)]


def check_platform(program: Program, platforms: Iterable[str]) -> None:
    """Raise `LayoutError` if the program has a ragged exchange and the devices are CPUs."""
    if "cpu" not in platforms:
        return
    for eqn, _ in walk(program):
        if isinstance(eqn.op, RaggedAllToAll):
            raise at(
                LayoutError(
                    f"a program with a ragged exchange cannot run on CPU devices: '{eqn.op}'\n"
                    "  only the filled slots are sent, by jax.lax.ragged_all_to_all, which no compiler for CPU knows\n"
                    "  take exchange='padded', or a layout that exchanges nothing; md.simulate, .cost and the TPU's "
                    "compiler (md.compile_for) take this one"
                ),
                eqn.where,
            )
