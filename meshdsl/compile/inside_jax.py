"""A compiled function inside JAX: one equation, with rules for `jax.jit`, `grad`, `jvp`, `linearize` and `vmap`.

Each rule takes another program of the same traced function, for the same mesh and layout: that of its derivative in a
direction, of its pullback, or of all places of one more dim. JAX's rules apply to these programs again, so derivatives
have any order, and no collective needs a rule of JAX.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's signatures are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..backend.typed import is_typed
from ..trace import Tensor
from .array_function import ArrayFunction
from .signature import Stages


def traced_by_jax(leaves: Sequence[Any]) -> bool:
    """True if an argument is an array, or a tensor of one, that a transformation of JAX traces."""
    kinds = {type(x._array) if type(x) is Tensor else type(x) for x in leaves}  # one or two for hundreds of leaves
    return any(issubclass(each, Tracer) for each in kinds)


def array_function(stages: Stages) -> Callable[..., list[Any]]:
    """The program of one signature as a function of arrays, one for each leaf; it returns a list of arrays."""
    function = ArrayFunction.of(stages)

    def call(*arrays: Any) -> list[Any]:
        return _bind(function, [jnp.asarray(x, t.dtype) for x, t in zip(arrays, function.ins, strict=True)])

    return call


def run(stages: Stages, arrays: Sequence[Any]) -> list[Any]:
    """Run the program on arrays without padding; returns arrays without padding.

    Raises `ShapeError` for an array that was donated to an earlier call.
    """
    results = stages.execute([_stored(stages, i, x) for i, x in enumerate(arrays)])
    return [
        y if y.shape == tuple(d.size for d in v.dims) else y[tuple(slice(d.size) for d in v.dims)]
        for v, y in zip(stages.graph.outs, results, strict=True)
    ]


def _stored(stages: Stages, i: int, x: Any) -> Any:
    """An argument in the dtype, with the padding and in the sharding that the program takes."""
    sizes, sharding, v = stages.sizes[i], stages.shardings[i], stages.graph.ins[i]
    concrete = not isinstance(x, Tracer)
    if concrete and isinstance(x, jax.Array):
        if x.is_deleted():
            raise stages.deleted(i)
        same_type = x.shape == sizes and x.dtype == v.dtype and not x.weak_type
        if same_type and x.sharding.is_equivalent_to(sharding, len(sizes)):
            return stages.over_own_axes(i, x)
    x = jnp.asarray(x, v.dtype)
    if is_typed(x):
        x = jax.device_put(x, _unpadded(sharding, sizes, x.shape))
    pads = [(0, size - n) for size, n in zip(sizes, x.shape, strict=True)]
    x = jnp.pad(x, pads) if any(high for _, high in pads) else x
    if not concrete:
        return x
    return jax.device_put(jnp.copy(x) if stages.donated else x, sharding)  # else it may share memory with x


def _unpadded(sharding: NamedSharding, stored: Sequence[int], sizes: Sequence[int]) -> NamedSharding:
    """The sharding, without dims that are stored with padding."""
    entries = [*sharding.spec, *(None for _ in sizes)]
    kept = [entry if a == b else None for entry, a, b in zip(entries, stored, sizes, strict=False)]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


_program = Primitive("meshdsl_program")
_program.multiple_results = True


def _bind(function: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
    return _program.bind(*arrays, function=function, devices=function.devices)


@_program.def_impl
def _run(*arrays: Any, function: ArrayFunction, devices: Any) -> list[Any]:
    return run(function.stages, arrays)


@_program.def_abstract_eval
def _types(*_: Any, function: ArrayFunction, devices: Any) -> list[ShapedArray]:
    types = [ShapedArray(tuple(d.size for d in t.dims), t.dtype) for t in function.outs]
    if function.like.mesh.axis_types is None:
        return types
    over = [NamedSharding(one.mesh.abstract_mesh, one.spec) for one in function.stages.results]
    explicit = [AxisType.Explicit in one.mesh.axis_types for one in over]
    return [t.update(sharding=one) if e else t for t, one, e in zip(types, over, explicit, strict=True)]


mlir.register_lowering(_program, mlir.lower_fun(_run, multiple_results=True))


def _like(x: Any, aval: Any, function: ArrayFunction) -> Any:
    """A derivative in the sharding of the type that JAX expects."""
    if jax.typeof(x).sharding == aval.sharding:
        return x
    if AxisType.Explicit in aval.sharding.mesh.axis_types:
        return jax.sharding.reshard(x, aval.sharding)
    return jax.device_put(x, NamedSharding(function.like.bound, x.aval.sharding.spec)) if is_typed(x) else x


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: ArrayFunction, devices: Any) -> Any:
    outs = _bind(function, primals)
    moving = [i for i in function.floating_ins if type(tangents[i]) is not ad.Zero]
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outs]
    if not moving:
        return outs, zeros
    if function.linear.issuperset(moving):
        ins = [
            ad.instantiate_zeros(t) if i in function.linear else x
            for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        ]
        return outs, _bind(function, ins)
    moved = iter(_bind(function.jvp(tuple(moving)), [*primals, *(tangents[i] for i in moving)]))
    floating = function.floating_outs
    return outs, [_like(next(moved), zero.aval, function) if i in floating else zero for i, zero in enumerate(zeros)]


def _transpose(cts: Sequence[Any], *args: Any, function: ArrayFunction, devices: Any) -> list[Any]:
    """The cotangents of the arguments without a value, in which the function is linear."""
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(args)]
    full = [ad.instantiate_zeros(cts[i]) for i in function.floating_outs]
    if function.transposed is not None and function.linear.issuperset(linear):
        residuals = [x for i, x in enumerate(args) if i not in function.linear]
        results = dict(zip(sorted(function.linear), _bind(function.transposed(), [*residuals, *full]), strict=True))
    else:  # the pullback of a linear function is the same at every point, so also at zero
        ins = [jnp.zeros(x.aval.shape, x.aval.dtype) if i in linear else x for i, x in enumerate(args)]
        results = dict(zip(linear, _bind(function.vjp(tuple(linear)), [*ins, *full]), strict=True))
    return [_like(results[i], x.aval, function) if i in linear else None for i, x in enumerate(args)]


def _batch(axis: Any, arrays: Sequence[Any], axes: Sequence[Any], *, function: ArrayFunction, devices: Any) -> Any:
    """All places of an axis at once: the program over one more dim, which is not sharded."""
    mapped = tuple(at is not None for at in axes)
    if not any(mapped):
        return _bind(function, arrays), [None] * len(function.outs)
    batched, new = function.batched(mapped, axis.size)
    ins = [x if at is None else jnp.moveaxis(x, at, 0) for x, at in zip(arrays, axes, strict=True)]
    return _bind(batched, ins), [0 if new in t.dims else None for t in batched.outs]


ad.primitive_jvps[_program] = _jvp
ad.primitive_transposes[_program] = _transpose
batching.fancy_primitive_batchers[_program] = _batch
