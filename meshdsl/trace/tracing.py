"""Inside a trace, an operation adds an equation; outside, it runs immediately on one device.

Every public operation calls `bind`. A `Tensor` is concrete (it holds an array) or traced (it represents a variable of
one trace). If a nested function uses a tensor of an enclosing trace, the tensor becomes an input of the nested graph
(a capture). Using a tensor of a finished trace is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import MeshdslError, ShapeError, TraceError, Where, at, caller, expect
from ..ir import Eqn, Graph, Op, Type, Var, dce, inferred, verify
from .arguments import array_of
from .eager import run_eagerly
from .literals import CONSTANT, FULL, number
from .tensors import Tensor, TracedTensor

tree = jax.tree_util  # tensors are leaves; containers are JAX's pytrees


def flatten(values: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of a tree; raises `ShapeError` for one that JAX cannot follow."""
    try:
        return tree.tree_flatten(values)
    except (SystemError, RecursionError):
        raise ShapeError("an argument or a result is nested thousands of levels deep\n  pass a flatter tree") from None
    except ValueError as error:
        if "dictionary keys" not in str(error):  # of a user's own container
            raise
        text = "a dict in an argument or a result has keys that cannot be sorted, such as 1 and 'a'\n  use text for all"
        raise ShapeError(text) from None


class OpenTrace:
    """A trace in progress: its inputs, its equations so far, and the tensors it captured from enclosing traces."""

    def __init__(self, parent: OpenTrace | None, closed: bool = False):
        self.parent = parent
        self.closed: bool = closed or (parent is not None and parent.closed)  # its captures have no place to come from
        self.ins: list[Var] = []
        self.eqns: list[Eqn] = []
        self.captures: list[Tensor] = []
        self.captured: dict[Any, Tensor] = {}
        self.mentions: set[str] = set()  # dims of nested traces, including discarded ones
        self.open = True

    def input(self, kind: Type, name: str = "") -> Tensor:
        var = Var(kind.dims, kind.dtype, name)
        self.ins.append(var)
        return TracedTensor(kind.dims, kind.dtype, var=var, trace=self)

    def lift(self, x: Tensor) -> Tensor:
        """The tensor as a value of this trace: itself, a constant or a capture. Raises `TraceError` if it leaked."""
        if x._trace is self:
            return x
        if x._trace is None and (self.closed or not _is_argument(x)):
            return self._constant(x)
        if x._trace is not None and not (x._trace.open and _encloses(x._trace, self)):
            raise TraceError(
                f"a traced tensor leaked out of its trace: {x.type}\n"
                "  it was made inside a function that has returned, and has no value now\n"
                "  return it from that function instead of keeping it in a variable outside"
            )
        if _key(x) not in self.captured:
            self.captures.append(x)
            var = Var(x.dims, x.dtype, x._var.name if x._trace is not None else "")
            self.captured[_key(x)] = TracedTensor(x.dims, x.dtype, var=var, trace=self)
        return self.captured[_key(x)]

    def _constant(self, x: Tensor) -> Tensor:
        stored = x.stored
        if isinstance(stored, Tracer):
            raise TraceError(
                f"a function closes over a tensor that a JAX transformation traces: {x.type}\n"
                "  pass it as an argument of the compiled function"
            )
        if _is_argument(x):
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
            self.captured[id(stored)] = TracedTensor(x.dims, x.dtype, array=stored, var=var, trace=self)
        return TracedTensor(x.dims, x.dtype, var=self.captured[id(stored)]._var, trace=self)


def _is_argument(x: Tensor) -> bool:
    """True if a concrete tensor is no constant: JAX traces it, or it is spread over devices."""
    stored = x.stored
    return isinstance(stored, Tracer) or (isinstance(stored, jax.Array) and len(stored.sharding.device_set) > 1)


def _key(x: Tensor) -> Any:
    """Equal for tensors of one value."""
    return id(x.stored) if x._trace is None else x._var


def _encloses(outer: OpenTrace, inner: OpenTrace | None) -> bool:
    while inner is not None:
        if inner is outer:
            return True
        inner = inner.parent
    return False


class _State(threading.local):
    trace: OpenTrace | None = None
    where: Where | None = None
    backward: bool = False


_state = _State()


def current() -> OpenTrace | None:
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
                    OpenTrace(None).lift(x)
            if "control" in params:  # the graphs inside run equation by equation
                return tuple(op.kernel(evaluate, *ins, **params))
            return run_eagerly(op, ins, types, params)
        ins = tuple(trace.lift(x) for x in ins)
    except MeshdslError as error:
        raise at(error, _where()) from None
    outs = tuple(Var(t.dims, t.dtype) for t in types)
    eqn = Eqn(op, tuple(x._var for x in ins), outs, params, _where(), _state.backward)
    trace.eqns.append(inferred(eqn))
    return tuple(TracedTensor(v.dims, v.dtype, var=v, trace=trace) for v in outs)


def bind1(op: Op, *ins: Tensor, **params: Any) -> Tensor:
    """`bind` for an operation with one result."""
    return bind(op, *ins, **params)[0]


def evaluate(graph: Graph, ins: Sequence[Tensor]) -> list[Tensor]:
    """Apply a graph to tensors: run it immediately, or add its equations to the current trace."""
    env: dict[Var, Tensor] = dict(zip(graph.ins, ins, strict=True))
    for eqn in graph.eqns:
        with location(eqn.where, eqn.backward or None):
            env.update(zip(eqn.outs, bind(eqn.operation, *(env[v] for v in eqn.ins), **eqn.params), strict=True))
    return [env[v] for v in graph.outs]


def trace(
    function: Callable[..., Any], specs: Sequence[Type], labels: Sequence[str] = (), closed: bool = False
) -> tuple[Graph, list[Tensor], Any]:
    """Trace a function of tensors.

    Returns the graph, the captured outer tensors, and the structure of the result. The graph's inputs are the
    captures followed by the arguments. `closed`: the graph is run later, so that a tensor of outside is a constant or
    an error.
    """
    expect("a function", function, Callable)
    traced = OpenTrace(_state.trace, closed)
    labels = labels or ("",) * len(specs)
    args = [traced.input(kind, label) for kind, label in zip(specs, labels, strict=True)]
    before, _state.trace = _state.trace, traced
    try:
        result = function(*args)
        leaves, structure = flatten(result)
        outs = [_result(traced, leaf) for leaf in leaves]
    finally:
        _state.trace = before
        traced.open = False
    captured = tuple(traced.captured[_key(x)]._var for x in traced.captures)
    values = (*traced.ins, *(v for eqn in traced.eqns for v in eqn.outs))
    traced.mentions.update(d.name for v in values for d in v.dims)
    if before is not None:
        before.mentions.update(traced.mentions)
    graph = dce(Graph((*captured, *traced.ins), tuple(traced.eqns), tuple(outs), mentions=frozenset(traced.mentions)))
    traced.eqns.clear()  # tensors have their trace, and equations have tensors: all are freed when the graph is
    traced.captured.clear()
    return verify(graph, "trace"), traced.captures, structure


def eval_shape(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The types of f's results, without computing anything.

    >>> import meshdsl as md
    >>> md.eval_shape(lambda x: md.sum(x, "batch"), md.spec("batch:8 io:4"))
    float32[io=4]

    Arguments may be tensors or specs; other leaves are passed unchanged.
    """
    leaves, structure = flatten((args, kwargs))
    abstract = [isinstance(x, Tensor | Type) for x in leaves]

    def flat(*xs: Tensor) -> Any:
        tensors = iter(xs)
        full = [next(tensors) if on else x for x, on in zip(leaves, abstract, strict=True)]
        args, kwargs = tree.tree_unflatten(structure, full)
        return f(*args, **kwargs)

    specs = [x.type if isinstance(x, Tensor) else x for x, on in zip(leaves, abstract, strict=True) if on]
    graph, _, out = trace(flat, specs)
    return tree.tree_unflatten(out, [v.type for v in graph.outs])


def _result(traced: OpenTrace, leaf: Any) -> Var:
    if not isinstance(leaf, Tensor):
        leaf = as_tensor(leaf)
    try:
        return traced.lift(leaf)._var
    except MeshdslError as error:
        raise at(error, _where()) from None


def as_tensor(x: Any, dtype: Any = None) -> Tensor:
    """Convert a number or 0-d array to a tensor without dims; return a tensor unchanged, a metric's value for a metric.

    Raises `ShapeError` for an array with axes, and for an integer that does not fit into `dtype`.
    """
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "__md_tensor__"):  # as NumPy asks for `__array__`: `md.train.Metric`, which is built on all of this
        return x.__md_tensor__()
    return bind1(FULL, value=checked_number(x, dtype), shape=())


def checked_number(x: Any, dtype: Any = None) -> Any:
    """A number or 0-d array as the NumPy scalar of a dtype, by default JAX's for it; raises as `as_tensor` does."""
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
    return number(array, kind)
