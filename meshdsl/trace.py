"""Tracing. Inside a trace an operation adds an equation; outside, it runs immediately on one device.

Every public operation calls `bind`. A `Tensor` is concrete (it holds an array) or traced (it represents a variable of
one trace). If a nested function uses a tensor of an enclosing trace, the tensor becomes an input of the nested graph
(a capture). Using a tensor of a finished trace is an error.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import backend
from .dims import Shape
from .errors import MeshdslError, ShapeError, TraceError, Where, at, caller
from .ir import Eqn, Fuses, Graph, Op, Type, Var, dce, verify
from .values import Tensor, array_of

__all__ = [
    "CONSTANT", "FULL", "Traced", "as_tensor", "bind", "bind1", "current", "evaluate", "location", "run_kernel",
    "trace", "tree",
]  # fmt: skip

tree = jax.tree_util  # tensors are leaves; containers are JAX's pytrees


class Traced:
    """A trace in progress: its inputs, its equations so far, and the tensors it captured from enclosing traces."""

    def __init__(self, parent: Traced | None):
        self.parent = parent
        self.ins: list[Var] = []
        self.eqns: list[Eqn] = []
        self.captures: list[Tensor] = []
        self.captured: dict[Any, Tensor] = {}
        self.mentions: set[str] = set()  # dims of nested traces, including discarded ones
        self.open = True

    def input(self, kind: Type, name: str = "") -> Tensor:
        var = Var(kind.shape, kind.dtype, name)
        self.ins.append(var)
        return Tensor(kind.shape, kind.dtype, var=var, trace=self)

    def lift(self, x: Tensor) -> Tensor:
        """The tensor as a value of this trace: itself, a constant or a capture. Raises `TraceError` if it leaked."""
        if x._trace is self:
            return x
        if x._trace is None:
            return self._constant(x)
        if not x._trace.open or not _encloses(x._trace, self):
            raise TraceError(
                f"a traced tensor leaked out of its trace: {x.type}\n"
                "  it was made inside a function that has returned, and stands for nothing now\n"
                "  return it from that function instead of keeping it in a variable outside"
            )
        if x._var not in self.captured:
            self.captures.append(x)
            var = Var(x.dims, x.dtype, x._var.name)
            self.captured[x._var] = Tensor(x.dims, x.dtype, var=var, trace=self)
        return self.captured[x._var]

    def _constant(self, x: Tensor) -> Tensor:
        stored = x.stored
        if isinstance(stored, Tracer):
            raise TraceError(
                f"a function closes over a tensor that a JAX transformation traces: {x.type}\n"
                "  pass it as an argument of the compiled function"
            )
        if isinstance(stored, jax.Array) and len(stored.sharding.device_set) > 1:
            raise TraceError(
                f"a function closes over a concrete tensor that is spread over {len(stored.sharding.device_set)} "
                f"devices: {x.type}\n"
                "  a constant would be gathered to every device\n"
                "  pass it as an argument of the compiled function"
            )
        if id(stored) not in self.captured:
            values = x.numpy()
            var = Var(x.dims, x.dtype)
            self.eqns.append(Eqn(CONSTANT, (), (var,), {"value": values, "shape": x.dims}, _where()))
            self.captured[id(stored)] = Tensor(x.dims, x.dtype, array=stored, var=var, trace=self)
        return Tensor(x.dims, x.dtype, var=self.captured[id(stored)]._var, trace=self)


def _encloses(outer: Traced, inner: Traced | None) -> bool:
    while inner is not None:
        if inner is outer:
            return True
        inner = inner.parent
    return False


class _State(threading.local):
    trace: Traced | None = None
    where: Where | None = None
    backward: bool = False


_state = _State()

CONSTANT = Op(
    "constant",
    type=lambda *, value, shape: Type(shape, value.dtype),
    kernel=lambda c, *, value, shape: _block_of(c, value),
    flops=lambda *_, **__: 0,
    fuses=Fuses.VIEW,
)
FULL = Op(
    "full",
    type=lambda *, value, shape, dtype: Type(shape, dtype),
    kernel=lambda c, *, value, shape, dtype: c.xp.full(c.outs[0].sizes, value, dtype),
    flops=lambda *_, **__: 0,
    fuses=Fuses.MAP,
    literal=True,
)


def _block_of(c: backend.Local, value: np.ndarray) -> Any:
    """This device's block of a constant array; padding is zero."""
    block = c.outs[0]
    counts = [c.count(axes) for axes in block.axes]
    pads = [(0, size * n - real) for size, n, real in zip(block.sizes, counts, value.shape, strict=True)]
    x = c.xp.asarray(np.pad(value, pads) if any(high for _, high in pads) else value)  # np.pad fails on a 0-d array
    for i, dim in enumerate(block.shape):
        if block.axes[i]:
            x = c.xp.dynamic_slice(x, c.start(block, dim), block.sizes[i], i)
    return x


def current() -> Traced | None:
    """The innermost trace in progress, or None."""
    return _state.trace


@contextlib.contextmanager
def location(where: Where | None, backward: bool | None = None) -> Iterator[None]:
    """Give equations created in this context the source line `where` instead of the caller's."""
    before = _state.where, _state.backward
    _state.where = where or before[0]
    _state.backward = before[1] if backward is None else backward
    try:
        yield
    finally:
        _state.where, _state.backward = before


def _where() -> Where:
    return _state.where or caller()


def bind(op: Op, *ins: Tensor, **params: Any) -> tuple[Tensor, ...]:
    """Add an equation to the current trace, or run the operation immediately if no trace is active.

    Returns the results as tensors. Raises `ShapeError`, with the user's line, if the operands do not fit.
    """
    try:
        types = op.infer([x.type for x in ins], params)
        trace = _state.trace
        if trace is None:
            for x in ins:
                if x._trace is not None:
                    Traced(None).lift(x)
            return _eager(op, ins, types, params)
        ins = tuple(trace.lift(x) for x in ins)
    except MeshdslError as error:
        raise at(error, _where()) from None
    outs = tuple(Var(t.shape, t.dtype) for t in types)
    trace.eqns.append(Eqn(op, tuple(x._var for x in ins), outs, params, _where(), _state.backward))
    return tuple(Tensor(v.shape, v.dtype, var=v, trace=trace) for v in outs)


def bind1(op: Op, *ins: Tensor, **params: Any) -> Tensor:
    """`bind` for an operation with one result."""
    return bind(op, *ins, **params)[0]


def _eager(op: Op, ins: Sequence[Tensor], types: Sequence[Type], params: Any) -> tuple[Tensor, ...]:
    if "control" in params:
        values = op.kernel(lambda graph, xs: evaluate(graph, xs), *ins, **params)
        return tuple(values)
    arrays = [x.array for x in ins]
    if len(ins) > 1 and _on_other_devices([x.stored for x in ins]):
        raise at(
            ShapeError(
                f"{op.name} of tensors on different devices: results of functions compiled for "
                "different meshes\n"
                "  compile one function that computes both, or copy one of them: md.tensor(x.numpy(), x.dims)"
            ),
            _where(),
        )
    shapes, types = tuple(x.dims for x in ins), tuple(types)
    if all(isinstance(value, Hashable) and not callable(value) for value in params.values()):
        results = _compiled_kernel(op, shapes, types, tuple(params.items()))(*arrays)
    else:  # a constant's array has no hash, and a function is a new one in every call
        results = run_kernel(op, backend.Jax, arrays, shapes, types, params)
    return tuple(Tensor(t.shape, t.dtype, array=a) for t, a in zip(types, results, strict=True))


def _on_other_devices(arrays: Sequence[Any]) -> bool:
    """True if the arrays are on different sets of devices; inside a JAX transformation they are on none."""
    placed = [a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer)]
    return len({frozenset(a.devices()) for a in placed if a.committed}) > 1


@functools.lru_cache(maxsize=4096)
def _compiled_kernel(
    op: Op, shapes: tuple[Shape, ...], types: tuple[Type, ...], params: tuple[tuple[str, Any], ...]
) -> Callable[..., list[Any]]:
    """The kernel of an operation on unsharded arrays, compiled whole and not one primitive at a time."""
    return jax.jit(lambda *arrays: run_kernel(op, backend.Jax, arrays, shapes, types, dict(params)))


def run_kernel(
    op: Op, xp: Any, arrays: Sequence[Any], shapes: Sequence[Shape], types: Sequence[Type], params: Any
) -> list[Any]:
    """Run an operation's kernel on unsharded arrays; returns a list of results."""
    local = backend.Local(xp, tuple(map(backend.whole, shapes)), tuple(backend.whole(t.shape) for t in types))
    with np.errstate(all="ignore"):  # NaN, infinities and integer overflow are valid results
        results = op.kernel(local, *arrays, **params)
    return list(results) if isinstance(results, tuple | list) else [results]


def evaluate(graph: Graph, ins: Sequence[Tensor]) -> list[Tensor]:
    """Apply a graph to tensors: run it immediately, or add its equations to the current trace."""
    env: dict[Var, Tensor] = dict(zip(graph.ins, ins, strict=True))
    for eqn in graph.eqns:
        with location(eqn.where, eqn.backward or None):
            env.update(zip(eqn.outs, bind(eqn.operation, *(env[v] for v in eqn.ins), **eqn.params), strict=True))
    return [env[v] for v in graph.outs]


def trace(
    function: Callable[..., Any], specs: Sequence[Type], labels: Sequence[str] = ()
) -> tuple[Graph, list[Tensor], Any]:
    """Trace a function of tensors.

    Returns the graph, the captured outer tensors, and the structure of the result. The graph's inputs are the
    captures followed by the arguments.
    """
    traced = Traced(_state.trace)
    labels = labels or ("",) * len(specs)
    args = [traced.input(kind, label) for kind, label in zip(specs, labels, strict=True)]
    before, _state.trace = _state.trace, traced
    try:
        result = function(*args)
        leaves, structure = tree.tree_flatten(result)
        outs = [_result(traced, leaf) for leaf in leaves]
    finally:
        _state.trace = before
        traced.open = False
    captured = tuple(traced.captured[x._var]._var for x in traced.captures)
    values = (*traced.ins, *(v for eqn in traced.eqns for v in eqn.outs))
    traced.mentions.update(d.name for v in values for d in v.shape)
    if before is not None:
        before.mentions.update(traced.mentions)
    graph = dce(Graph((*captured, *traced.ins), tuple(traced.eqns), tuple(outs), mentions=frozenset(traced.mentions)))
    return verify(graph, "trace"), traced.captures, structure


def _result(traced: Traced, leaf: Any) -> Var:
    if not isinstance(leaf, Tensor):
        leaf = as_tensor(leaf)
    try:
        return traced.lift(leaf)._var
    except MeshdslError as error:
        raise at(error, _where()) from None


def as_tensor(x: Any, dtype: Any = None) -> Tensor:
    """Convert a number or 0-d array to a tensor without dims; return a tensor unchanged.

    Raises `ShapeError` for an array with axes, and for an integer that does not fit into `dtype`.
    """
    if isinstance(x, Tensor):
        return x
    try:
        array = np.asarray(array_of(x))
    except MeshdslError as error:
        raise at(error, _where()) from None
    if array.ndim:
        raise at(
            ShapeError(
                f"expected a tensor or a number, got an array of shape {array.shape}\n"
                "  give an array's dims names with md.tensor(array, dims)"
            ),
            _where(),
        )
    kind = (
        np.dtype(jnp.result_type(x if isinstance(x, bool | int | float | complex) else array))
        if dtype is None
        else dtype
    )
    kind = np.dtype(kind)
    limits = jnp.iinfo(kind) if kind.kind in "iu" and array.dtype.kind in "iu" else None
    if limits is not None and not limits.min <= array.item() <= limits.max:
        raise at(
            ShapeError(
                f"{array.item()} does not fit into {kind.name}, which holds {limits.min} to {limits.max}\n"
                "  cast the tensor beside it to a wider integer first, for example md.cast(x, 'int32')"
            ),
            _where(),
        )
    return bind1(FULL, value=array.item(), shape=(), dtype=kind)
