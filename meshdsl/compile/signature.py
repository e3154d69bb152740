"""One signature of a compiled function: its trace, its stages, and the arguments of a call."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..backend.typed import is_typed
from ..dims import Dims
from ..errors import LayoutError, MeshdslError, ShapeError, TraceError, caller
from ..ir import Graph, Type, Var, walk
from ..layouts import Layout, Mesh
from ..lowering import Program
from ..lowering.emit import emit, shardings
from ..targets import Target, target_named, target_of
from ..targets.kernel_choice import with_kernels
from ..trace import Tensor, check_dtypes, spec_of, trace, tree
from ..trace.platform import TracedFor, tracing_for
from .pipeline import Options, PassState, Stage, begin, run

_NOTHING = object()  # differs from every sharding, and from None
_dims, _dtype = attrgetter("dims"), attrgetter("dtype")


class Traced:
    """The trace of one signature of a function; all meshes and layouts share it."""

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Any,
        types: Sequence[Type],
        paths: Sequence[str],
        platform: str | None,
    ):
        self.structure = structure
        self.target = TracedFor(platform)

        def flat(*xs: Tensor) -> Any:
            return function(*tree.tree_unflatten(structure, xs))

        try:
            with tracing_for(self.target):
                traced, captures, self.result = trace(flat, types, paths, closed=True)
        except MeshdslError:
            raise
        except Exception as error:  # an error of the function itself, for example a KeyError: add the argument types
            error.add_note(
                "meshdsl traced it with " + ", ".join(f"{p}: {t}" for p, t in zip(paths, types, strict=True))
            )
            raise
        if captures:
            raise TraceError("md.compile cannot be used inside a trace; call the function itself there")
        self.begun = begin(traced)


class Stages:
    """The stages of one signature of a compiled function, each computed when first requested."""

    def __init__(self, traced: Traced, mesh: Mesh, layout: Layout, donate: Sequence[int], options: Options):
        self.traced, self.mesh, self.layout, self.donate, self.options = traced, mesh, layout, donate, options
        self.structure = traced.structure
        self.begun = traced.begun
        self.platform = traced.target.platform
        self.result = traced.result
        self.accepted: list[Any] = [_NOTHING] * len(self.graph.ins)  # the last accepted sharding of each input
        self.in_dims, self.in_dtypes = [v.dims for v in self.graph.ins], [v.dtype for v in self.graph.ins]
        self.out_dims, self.out_dtypes = [Dims(v.dims) for v in self.graph.outs], [v.dtype for v in self.graph.outs]

    def without_donation(self) -> Stages:
        """The stages of the same signature whose executable overwrites no argument."""
        return Stages(self.traced, self.mesh, self.layout, (), self.options)

    @cached_property
    def pipeline_result(self) -> tuple[PassState, tuple[Stage, ...]]:
        """The state after the pipeline, and the stage of every pass."""
        indices = tree.tree_unflatten(self.result, range(len(self.graph.outs)))
        paths = [_path(path) for path, _ in tree.tree_flatten_with_path(indices)[0]]
        options = dataclasses.replace(self.options, donated=self.donated, platform=self.platform or "")
        return run(self.begun, self.mesh, self.layout, paths, options)

    @property
    def state(self) -> PassState:
        return self.pipeline_result[0]

    @property
    def graph(self) -> Graph:
        """The graph before any layout."""
        return self.begun[-1].graph

    @property
    def has_program(self) -> bool:
        """True if the program was built already."""
        return "pipeline_result" in vars(self)

    @property
    def program(self) -> Program:
        program = self.state.program
        assert program is not None
        return program

    @cached_property
    def bound(self) -> jax.sharding.Mesh:
        """The mesh, bound to this machine's devices; raises `LayoutError` if it has too few."""
        return self.program.mesh.bind()

    @cached_property
    def shardings(self) -> list[NamedSharding]:
        return shardings(self.program.ins, self.bound)

    def emitted(self, mesh: Any, target: Target) -> Callable[..., Any]:
        """The program as a function of arrays, as the target that runs it needs it."""
        return emit(with_kernels(self.program, target), mesh, target.emission)

    @cached_property
    def executable(self) -> Any:
        return self.jit(self.bound, self.shardings, target_of(self.bound.devices.flat))

    @cached_property
    def donated(self) -> tuple[int, ...]:
        """The numbers of the program's inputs whose memory its results may reuse."""
        counts = [child.num_leaves for child in self.structure.children()]
        starts = np.cumsum([0, *counts])
        return tuple(i for n in self.donate for i in range(starts[n], starts[n + 1]))

    def typed(self, vars: Sequence[Var]) -> list[NamedSharding]:
        """The shardings of inputs or results for the caller: over the caller's mesh, if it has Explicit axes.

        They are over the program's mesh, whose axes are Auto, where a dim does not divide or is sharded over a part of
        an axis: the type of an array cannot say either.
        """
        mesh, refined, own = self.mesh.typed(), self.state.refined, shardings(vars, self.bound)
        for i, v in enumerate(vars):
            axes = [refined.coarse_axes(v.sharding.axes(d)) for d in v.dims]
            divides = self.program.stored_shape(v) == tuple(d.size for d in v.dims)
            if mesh is not None and divides and None not in axes:
                own[i] = NamedSharding(mesh, PartitionSpec(*(a or None for a in axes)))
        return own

    @cached_property
    def results(self) -> list[NamedSharding]:
        """The shardings of results, as `typed` gives them."""
        return self.typed(self.program.outs)

    def jit(self, mesh: Any, ins: Sequence[Any], target: Target) -> Any:
        on_devices = isinstance(mesh, jax.sharding.Mesh)
        outs = self.results if on_devices else shardings(self.program.outs, mesh)
        function = self.emitted(mesh, target)
        return jax.jit(function, in_shardings=tuple(ins), out_shardings=outs, donate_argnums=self.reused)

    @cached_property
    def reused(self) -> tuple[int, ...]:
        """The donated inputs with a result of their stored shape and dtype, which JAX requires; warns of the others."""
        stored = self.program.stored_shape
        left = collections.Counter((stored(v), v.dtype) for v in self.program.outs)
        reused: list[int] = []
        for i in self.donated:
            v = self.program.ins[i]
            if left[stored(v), v.dtype]:
                left[stored(v), v.dtype] -= 1
                reused.append(i)
        if names := [self.program.ins[i].name for i in self.donated if i not in reused]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            message = (
                f"donated, and no result is left with the shape and dtype of {', '.join(names[:5])}{more}: nothing can "
                "reuse the memory, and it is not overwritten"
            )
            where = caller()
            warnings.warn_explicit(message, UserWarning, where.file, where.line)
        return tuple(reused)

    def lower(self) -> Any:
        try:
            mesh: Any = self.bound
            target = None
        except LayoutError:
            mesh = self.program.mesh.abstract()
            target = target_named(jax.default_backend())
        ins = shardings(self.program.ins, mesh)
        shapes = [
            jax.ShapeDtypeStruct(self.program.stored_shape(v), v.dtype, sharding=sharding)
            for v, sharding in zip(self.program.ins, ins, strict=True)
        ]
        if target is None:
            return self.executable.trace(*shapes).lower()  # a call then finds what JAX traced and lowered here
        return self.jit(mesh, ins, target).trace(*shapes).lower(lowering_platforms=(target.name,))

    def accepts(self, structure: Any, leaves: Sequence[Any]) -> bool:
        """True if these arguments are concrete tensors of this signature; checked on every call but the first."""
        if structure != self.structure or not {Tensor}.issuperset(map(type, leaves)):
            return False
        return list(map(_dims, leaves)) == self.in_dims and list(map(_dtype, leaves)) == self.in_dtypes

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """The stored sizes of every input."""
        return [self.program.stored_shape(v) for v in self.program.ins]

    def arrays(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments in the shardings that the program takes."""
        given: list[Any] = [x._array if type(x) is Tensor else None for x in leaves]
        owns = [getattr(x, "sharding", None) for x in given]  # `isinstance(x, jax.Array)` takes as long as all the rest
        accepted = self.accepted
        if owns == accepted and [x.shape for x in given] == self.sizes and True not in [x.is_deleted() for x in given]:
            return given  # in most calls, the arguments are results of the last one
        return [self.array(i, *each) for i, each in enumerate(zip(leaves, given, owns, strict=True))]

    def array(self, i: int, x: Any, stored: Any, own: Any) -> jax.Array:
        """One argument in the sharding that the program takes. `own` is its own sharding, None if it has none."""
        sizes, sharding, accepted = self.sizes[i], self.shardings[i], self.accepted
        if own is not None and stored.is_deleted():
            raise self.deleted(i)
        known = own is accepted[i]
        fits = own is not None and stored.shape == sizes and (known or own.is_equivalent_to(sharding, len(sizes)))
        if not fits:
            return self.place(x, self.program.ins[i], sharding)
        array = stored if known else self.over_own_axes(i, stored)
        if array is stored:
            accepted[i] = own
        return array

    def over_own_axes(self, i: int, array: jax.Array) -> jax.Array:
        """An argument in an equivalent sharding, not over Explicit axes that the program lacks, where JAX raises.

        It is copied if the call overwrites it, because an array of the caller has the same memory.
        """
        mesh = getattr(array.sharding, "mesh", self.bound)
        if mesh.axis_names == self.bound.axis_names or not is_typed(array):
            return array
        return jax.device_put(array, self.shardings[i], may_alias=i not in self.donated)

    @cached_property
    def dtypes(self) -> list[np.dtype]:
        """The dtypes of arguments and results, each once."""
        return list(dict.fromkeys(v.dtype for v in (*self.program.ins, *self.program.outs)))

    def execute(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run on arrays in the program's shardings; raises `ShapeError` if a donated one is also another argument."""
        if self.donated and len(set(map(id, arrays))) < len(arrays):
            first: dict[int, int] = {}
            for i, array in enumerate(arrays):
                other = first.setdefault(id(array), i)
                if other != i and not {i, other}.isdisjoint(self.donated):
                    raise self.aliased(other, i)
        check_dtypes(self.dtypes)
        try:
            return self.executable(*arrays)
        except FloatingPointError as error:  # of the options jax_debug_nans and jax_debug_infs
            values = [v for eqn, _ in walk(self.program) for v in (*eqn.ins, *eqn.outs)]
            padded = dict.fromkeys(repr(d) for v in values for d in v.dims if self.program.is_padded(v, d))
            if padded:
                error.add_note(
                    f"meshdsl stores {', '.join(padded)} with padding; operations compute with it, nothing reads "
                    "it, so the NaN may be there alone\n"
                    "  choose a layout whose axes divide these sizes, or look for NaN in results: md.any(md.isnan(x))"
                )
            raise

    def aliased(self, one: int, other: int) -> ShapeError:
        """The error for two arguments that are one array, of which the call overwrites at least one."""
        named = [self.program.ins[i].name for i in (one, other)]
        which = "both are" if {one, other} <= set(self.donated) else f"{named[one not in self.donated]} is"
        return ShapeError(
            f"arguments {named[0]} and {named[1]} are the same array, and {which} donated: the call overwrites it\n"
            "  pass a copy as one of them, copy.deepcopy(x), or leave the argument out of donate="
        )

    def deleted(self, i: int) -> ShapeError:
        """The error for an argument that was donated to an earlier call."""
        return ShapeError(
            f"argument {self.program.ins[i].name} was donated to an earlier call, which has overwritten its memory\n"
            "  use the result that replaced it, or leave the argument out of donate="
        )

    def place(self, x: Any, v: Var, sharding: NamedSharding) -> jax.Array:
        """Reshard an argument to the sharding that the program takes, through the host."""
        sizes = self.program.stored_shape(v)
        if isinstance(x, Type):
            raise ShapeError(
                f"argument {v.name} is the spec {x}, and a call needs values\n"
                "  pass a md.tensor; .graph, .program and .lower take specs"
            )
        if isinstance(x, Tensor):
            stored = x.stored
            if isinstance(stored, jax.Array) and not (stored.is_fully_addressable or stored.is_fully_replicated):
                return _reshard_across_processes(stored, [d.size for d in x.dims], sizes, sharding)
            values = x.numpy()
        else:
            values = np.asarray(x, v.dtype)
        pads = [(0, size - real) for size, real in zip(sizes, values.shape, strict=True)]
        values = np.pad(values, pads) if any(high for _, high in pads) else values
        with jax.transfer_guard("allow"):  # the call asks for the transfer, so it is no accident
            return jax.make_array_from_callback(sizes, sharding, lambda index: values[index])


def _reshard_across_processes(
    stored: jax.Array, real: Sequence[int], sizes: Sequence[int], sharding: NamedSharding
) -> jax.Array:
    """Reshard and pad an array that spans several processes. No host stores all of it."""
    pads = [(0, size - n) for size, n in zip(sizes, real, strict=True)]

    def fit(a: jax.Array) -> jax.Array:
        return jax.numpy.pad(a[tuple(slice(n) for n in real)], pads)

    return jax.jit(fit, out_shardings=sharding)(stored)


def check_count(function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        takes = ", ".join(signature.parameters)
        raise ShapeError(f"{name} takes ({takes}), and the call has {len(args)} of them: {error}") from None


def spec_of_argument(leaf: Any, path: str) -> Type:
    if isinstance(leaf, Tensor) and leaf._trace is not None:
        raise TraceError(
            f"a compiled function was called inside a trace: argument {path} is a traced {leaf.type}\n"
            "  call the function itself there, and compile the outermost one"
        )
    try:
        return spec_of(leaf)
    except ShapeError as error:
        raise ShapeError(f"argument {path}: {error.args[0]}") from None


def _path(path: Any) -> str:
    return tree.keystr(path, simple=True, separator="/")


def argument_paths(function: Callable[..., Any], paths: Sequence[Any]) -> list[str]:
    """The path of each leaf of the arguments: the parameter's name, then the keys; for example `params/mlp/w1`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    spread = next((f"{p.name}_" for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    found: list[str] = []
    for first, *rest in paths:
        head = named[first.idx] if first.idx < len(named) else f"{spread}{first.idx - len(named)}"
        found.append("/".join([head, *([_path(rest)] if rest else [])]))
    return found
