"""A program as one function for `jax.shard_map`; every equation is its kernel, every collective its JAX call.

Nothing is decided here. `check_vma=True` stays on: JAX checks our shardings by a type system of its own.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (NumPy and jax are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..backend import Block, Jax, Local
from ..dims import Shape
from ..ir import Eqn, Op, Var
from ..layouts import Mesh, Sharding
from .casts import varying
from .program import Program

__all__ = ["block", "emit", "partition_spec", "run_equations", "shardings"]

Env = dict[Var, Any]


def partition_spec(shape: Shape, sharding: Sharding) -> PartitionSpec:
    """How JAX writes a split."""
    return PartitionSpec(*(sharding.axes(d) or None for d in shape))


def block(program: Program, v: Var) -> Block:
    """The part of a value that one device stores."""
    return Block(v.shape, program.local_shape(v), tuple(v.sharding.axes(d) for d in v.shape))


def emit(program: Program, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Callable[..., Any]:
    """The program as a function of global arrays, stored sizes, to a list of global arrays."""
    in_specs = tuple(partition_spec(v.shape, v.sharding) for v in program.ins)
    out_specs = [partition_spec(v.shape, v.sharding) for v in program.outs]

    def device(*xs: Any) -> list[Any]:
        return run_equations(program, xs)

    return jax.shard_map(device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def shardings(vars: Sequence[Var], mesh: Any) -> list[NamedSharding]:
    """JAX shardings of a program's inputs or results."""
    return [NamedSharding(mesh, partition_spec(v.shape, v.sharding)) for v in vars]


def run_equations(program: Program, ins: Sequence[Any]) -> list[Any]:
    """The results of a program's equations on arrays: inside `shard_map`, one device's blocks."""
    env: Env = dict(zip(program.ins, ins, strict=True))
    for eqn in program.eqns:
        xs = [env[v] for v in eqn.ins]
        if not isinstance(eqn.op, Op):
            source = eqn.ins[0]
            results: Sequence[Any] = [eqn.op.emit(xs[0], source.shape, source.sharding, program.mesh, *xs[1:])]
        elif eqn.op.name == "scan":
            results = _scan(program, eqn, xs)
        elif eqn.op.name == "while_loop":
            results = _while(eqn, xs)
        elif eqn.op.name == "cond":
            results = _cond(eqn, xs)
        else:
            results = _kernel(program, eqn, xs)
        env.update(zip(eqn.outs, results, strict=True))
    return [env[v] for v in program.outs]


def _kernel(program: Program, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    mesh: Mesh = program.mesh
    ins, outs = (tuple(block(program, v) for v in vs) for vs in (eqn.ins, eqn.outs))
    local = Local(Jax, ins, outs, index=lambda axes: lax.axis_index(axes), count=mesh.count)
    with jax.named_scope(eqn.op.name):
        results = eqn.op.kernel(local, *xs, **eqn.params)
    return list(results) if isinstance(results, tuple | list) else [results]


def _scan(program: Program, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    body: Program = eqn.params["body"]
    held, n, trips = eqn.params["consts"], eqn.params["carries"], eqn.params["trips"]
    # JAX wants the carry to vary over the same axes going in and coming out
    init = [varying(x, v.sharding.varying) for x, v in zip(xs[held : held + n], body.outs[:n], strict=True)]

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> Any:
        outs = run_equations(body, [*xs[:held], *carry, *rows])
        carried = [varying(x, v.sharding.varying) for x, v in zip(outs[:n], body.outs[:n], strict=True)]
        return carried, outs[n:]

    rows = [
        x if x.shape[0] == trips else x[:trips] for x in xs[held + n :]
    ]  # the stacked dim may be stored with padding
    carry, ys = lax.scan(step, init, rows, length=trips, reverse=eqn.params["reverse"])
    pads = [program.local_shape(v)[0] - trips for v in eqn.outs[n:]]
    ys = [jnp.pad(y, [(0, pad)] + [(0, 0)] * (y.ndim - 1)) if pad else y for y, pad in zip(ys, pads, strict=True)]
    return [*carry, *ys]


def _while(eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    test, body, held = eqn.params["test"], eqn.params["body"], eqn.params["consts"]

    def carried(carry: Sequence[Any]) -> list[Any]:
        return [varying(x, v.sharding.varying) for x, v in zip(carry, body.outs, strict=True)]

    return lax.while_loop(
        lambda carry: run_equations(test, [*xs[:held], *carry])[0],
        lambda carry: carried(run_equations(body, [*xs[:held], *carry])),
        carried(xs[held:]),
    )


def _cond(eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    def branch(program: Program) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            outs = run_equations(program, args)
            return [varying(x, v.sharding.varying) for x, v in zip(outs, program.outs, strict=True)]

        return run

    return lax.cond(xs[0], branch(eqn.params["yes"]), branch(eqn.params["no"]), *xs[1:])
