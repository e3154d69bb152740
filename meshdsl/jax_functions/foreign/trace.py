"""Trace a function that contains `jax.shard_map`: as it is, and on other meshes, without changing it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's primitives are only partly typed)

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ... import jax_functions
from .collectives import split_over


@dataclass(frozen=True)
class TracedStep:
    """A function as a jaxpr, with its array arguments in order and the path of each argument and result."""

    jaxpr: Any
    arguments: tuple[Any, ...]
    labels: tuple[str, ...]
    results: tuple[str, ...]

    def shard_maps(self) -> Iterator[Any]:
        """Every equation of `jax.shard_map`, those inside others too."""
        return _shard_maps(jax_functions.opened(self.jaxpr)[0])

    def sizes(self) -> dict[str, int]:
        """The axes of all its meshes."""
        return {a: n for eqn in self.shard_maps() for a, n in dict(eqn.params["mesh"].shape).items()}


def trace(
    f: Callable[..., Any], args: Sequence[Any], sizes: Mapping[str, int] | None = None, check_vma: bool | None = None
) -> TracedStep:
    """The function of these arguments, arrays or shapes; other leaves stay what they are.

    `sizes`: sizes of mesh axes in place of those of the program's meshes; then their devices are not used.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    places = [i for i, (_, x) in enumerate(paths) if hasattr(x, "shape") and hasattr(x, "dtype")]
    given = [paths[i][1] for i in places]
    shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=_sharding(x, sizes)) for x in given]

    def flat(*arrays: Any) -> Any:
        leaves = [x for _, x in paths]
        for i, x in zip(places, arrays, strict=True):
            leaves[i] = x
        return f(*jax.tree_util.tree_unflatten(tree, leaves))

    traceable = jax.make_jaxpr(flat, return_shape=True)
    own = jax.sharding.get_abstract_mesh()
    # other sizes do not fit the mesh that the caller set; a shard_map that is given none needs one
    contexts = [own] if sizes is None or own.empty else [_NONE, _resized(own, sizes)]
    try:
        jaxpr, out = _traced(traceable, shapes, contexts[0], sizes, check_vma)
    except (TypeError, ValueError):
        if len(contexts) == 1:
            raise
        jaxpr, out = _traced(traceable, shapes, contexts[1], sizes, check_vma)
    results = [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
    labels = _labels(f, [_path(paths[i][0]) for i in places])
    return TracedStep(jaxpr, tuple(given), labels, tuple(results))


def _traced(
    traceable: Any, shapes: Any, context: Any, sizes: Mapping[str, int] | None, check_vma: bool | None
) -> tuple[Any, Any]:
    with _meshes(sizes, check_vma), jax.sharding.use_abstract_mesh(context):
        return traceable(*shapes)


@contextlib.contextmanager
def _meshes(sizes: Mapping[str, int] | None, check_vma: bool | None) -> Iterator[None]:
    """Inside, `jax.shard_map` traces its function for axes of these sizes, however and whenever it was called.

    JAX keeps what it traced, apart for each context; metadata of no meaning makes a context in which it traces again.
    """
    if sizes is None and check_vma is None:
        yield
        return
    primitive, made = _primitive(), _primitive().bind

    def bind(*args: Any, **params: Any) -> Any:
        mesh = params["mesh"]
        if sizes is not None:
            params["mesh"] = _resized(mesh, sizes)
            for x, spec in zip(args, params["in_specs"], strict=True):
                parts = [math.prod(sizes.get(a, 1) for a in over) for over in split_over(spec, len(np.shape(x)))]
                if any(n % k for n, k in zip(np.shape(x), parts, strict=True)):
                    raise ValueError(f"{np.shape(x)} cannot be divided by {spec} on axes of these sizes")
        if check_vma is not None:
            params["check_vma"] = check_vma
        return made(*args, **params)

    primitive.bind = bind
    try:
        with set_xla_metadata(meshdsl_trace=str(next(_number))):
            yield
    finally:
        del primitive.bind


_number = itertools.count()
_NONE = AbstractMesh((), ())


@functools.cache
def _primitive() -> Any:
    one, whole = AbstractMesh((1,), ("x",)), PartitionSpec()
    mapped = jax.shard_map(lambda x: x, mesh=one, in_specs=whole, out_specs=whole)
    with jax.sharding.use_abstract_mesh(_NONE):
        return jax.make_jaxpr(mapped)(np.float32(0)).jaxpr.eqns[0].primitive


def _shard_maps(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        for body in jax_functions.inner(eqn):
            yield from _shard_maps(jax_functions.opened(body)[0])


def _sharding(x: Any, sizes: Mapping[str, int] | None) -> Any:
    """The sharding of an argument, which belongs to its type where the axes of its mesh are explicit."""
    own = getattr(x, "sharding", None)
    if not isinstance(own, NamedSharding) or sizes is None:
        return own if isinstance(own, NamedSharding) else None
    return NamedSharding(_resized(own.mesh, sizes), own.spec)


def _resized(mesh: Any, sizes: Mapping[str, int]) -> AbstractMesh:
    own = tuple(sizes.get(a, n) for a, n in dict(mesh.shape).items())
    return AbstractMesh(own, mesh.axis_names, axis_types=mesh.axis_types)


def _labels(f: Callable[..., Any], paths: Sequence[str]) -> tuple[str, ...]:
    """The paths of arguments, which begin with the names of the parameters, if `f` says them."""
    try:
        names = dict(enumerate(inspect.signature(f).parameters))
    except (TypeError, ValueError):
        names = {}
    parts = [path.partition("/") for path in paths]
    return tuple(names.get(int(first), first) + slash + rest for first, slash, rest in parts)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the result"
