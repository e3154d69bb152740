"""Inside a trace an operation adds an equation; outside, it runs at once on one device.

`bind` is the only door: every public operation ends in it. A `Tensor` is a named-dim value, concrete (it holds an
array) or traced (it stands for a variable of one trace). A tensor of an enclosing trace that a nested function uses
becomes an input of the nested graph (a capture). A tensor of a finished trace is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import backend
from .dims import Dim, DimsLike, Shape, pick, show, split_items
from .errors import MeshdslError, ShapeError, TraceError, Where, at, caller
from .ir import Eqn, Graph, Op, Type, Var, dce, verify

__all__ = ["Tensor", "Traced", "bind", "bind1", "evaluate", "location", "spec", "tensor", "trace", "tree"]

tree = jax.tree_util  # tensors are leaves; containers are JAX's pytrees


class Tensor:
    """A value with named dims. Make one with `md.tensor`, or receive one inside a traced function.

    `.dims` are the dims in storage order, `.shape` their sizes, `.dtype` a NumPy dtype; `.array` and `.numpy()` give
    the values of a concrete tensor and raise `TraceError` on a traced one.
    """

    __slots__ = ("_array", "_trace", "_var", "dims", "dtype")
    __array_priority__ = 1000
    __array_ufunc__ = None

    if TYPE_CHECKING:  # ops.elementwise supplies the operators; named here so that type checkers know them

        def __add__(self, other: Any) -> Tensor: ...

        def __radd__(self, other: Any) -> Tensor: ...

        def __sub__(self, other: Any) -> Tensor: ...

        def __rsub__(self, other: Any) -> Tensor: ...

        def __mul__(self, other: Any) -> Tensor: ...

        def __rmul__(self, other: Any) -> Tensor: ...

        def __truediv__(self, other: Any) -> Tensor: ...

        def __rtruediv__(self, other: Any) -> Tensor: ...

        def __floordiv__(self, other: Any) -> Tensor: ...

        def __rfloordiv__(self, other: Any) -> Tensor: ...

        def __mod__(self, other: Any) -> Tensor: ...

        def __rmod__(self, other: Any) -> Tensor: ...

        def __pow__(self, other: Any) -> Tensor: ...

        def __rpow__(self, other: Any) -> Tensor: ...

        def __and__(self, other: Any) -> Tensor: ...

        def __rand__(self, other: Any) -> Tensor: ...

        def __or__(self, other: Any) -> Tensor: ...

        def __ror__(self, other: Any) -> Tensor: ...

        def __xor__(self, other: Any) -> Tensor: ...

        def __rxor__(self, other: Any) -> Tensor: ...

        def __lshift__(self, other: Any) -> Tensor: ...

        def __rshift__(self, other: Any) -> Tensor: ...

        def __lt__(self, other: Any) -> Tensor: ...

        def __le__(self, other: Any) -> Tensor: ...

        def __gt__(self, other: Any) -> Tensor: ...

        def __ge__(self, other: Any) -> Tensor: ...

        def __neg__(self) -> Tensor: ...

        def __abs__(self) -> Tensor: ...

        def __invert__(self) -> Tensor: ...

        def __eq__(self, other: Any) -> Tensor: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        def __ne__(self, other: Any) -> Tensor: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, dims: Shape, dtype: Any, *, array: Any = None, var: Any = None, trace: Any = None):
        self.dims = dims
        self.dtype = np.dtype(dtype)
        self._array = array
        self._var = var
        self._trace = trace

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, in storage order."""
        return tuple(d.size for d in self.dims)

    @property
    def type(self) -> Type:
        """Dims and dtype."""
        return Type(self.dims, self.dtype)

    @property
    def array(self) -> Any:
        """The `jax.Array`, without padding. Requires a concrete tensor."""
        stored = self._concrete("its array")
        return stored if tuple(np.shape(stored)) == self.shape else jnp.asarray(self.numpy())

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array, without padding. Requires a concrete tensor, whole in this process."""
        stored = self._concrete("its values")
        if isinstance(stored, jax.Array) and not stored.is_fully_addressable and not stored.is_fully_replicated:
            raise TraceError(
                f"tensor {self.type} lies partly on devices of other processes\n"
                "  read the parts that are here with .addressable_shards of tensor.stored, or return md.replicate(x)"
            )
        return np.asarray(stored)[tuple(slice(0, d.size) for d in self.dims)]

    @property
    def stored(self) -> Any:
        """The array as it is stored: a split dim that does not divide carries padding at its end."""
        return self._concrete("its array")

    def block_until_ready(self) -> Tensor:
        """Wait for the computation; what `jax.block_until_ready` calls."""
        jax.block_until_ready(self._array)
        return self

    def _concrete(self, what: str) -> Any:
        if self._array is None:
            raise at(
                TraceError(
                    f"a traced tensor has no values yet, so {what} cannot be read\n"
                    f"  it is {self.type}, and stands for whatever the compiled program will compute\n"
                    "  return it from the function, or compute with md operations instead of NumPy's"
                ),
                caller(),
            )
        return self._array

    def __bool__(self) -> bool:
        if self._array is None:
            raise at(
                TraceError(
                    "a traced tensor cannot decide a Python if, while, and, or, not or assert\n"
                    f"  it is {self.type}, and its values exist only when the compiled program runs\n"
                    "  use md.where(c, a, b) per element, or md.cond(p, f, g, *xs) for a whole branch"
                ),
                caller(),
            )
        if self.dims:
            raise at(ShapeError(f"the truth of a tensor {self.type} is ambiguous; use md.any or md.all"), caller())
        return bool(self.numpy())

    def item(self) -> Any:
        """The single element of a concrete tensor without dims, as a Python number."""
        if self.dims:
            raise at(ShapeError(f"only a tensor without dims is one number; this is {self.type}"), caller())
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"{self.type} is not an integer")
        return int(self.item())

    def __iter__(self) -> Any:
        raise at(TraceError(f"a tensor {self.type} has named dims; iterate with md.unstack(x, dim)"), caller())

    def __getitem__(self, key: Any) -> Any:
        raise at(
            TraceError(
                f"a tensor {self.type} is indexed by name: md.slice(x, dim, start, size) or md.take(x, i, over)"
            ),
            caller(),
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __repr__(self) -> str:
        if self._array is None:
            return f"traced {self.type}"
        return f"tensor({self.type}, {np.array2string(self.numpy(), threshold=20, precision=4)})"

    __hash__ = object.__hash__

    if TYPE_CHECKING:  # ops.elementwise sets them; the type checker cannot see that

        def __add__(self, other: Any) -> Tensor: ...

        def __neg__(self) -> Tensor: ...

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __add__
        __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __add__
        __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
        __abs__ = __invert__ = __neg__


class Traced:
    """One trace in progress: its inputs, its equations so far, and what it captured from enclosing traces."""

    def __init__(self, parent: Traced | None):
        self.parent = parent
        self.ins: list[Var] = []
        self.eqns: list[Eqn] = []
        self.captures: list[Tensor] = []
        self.captured: dict[Any, Tensor] = {}
        self.mentions: set[str] = set()  # dims of traces inside this one, those that were thrown away included
        self.open = True

    def input(self, kind: Type, name: str = "") -> Tensor:
        var = Var(kind.shape, kind.dtype, name)
        self.ins.append(var)
        return Tensor(kind.shape, kind.dtype, var=var, trace=self)

    def lift(self, x: Tensor) -> Tensor:
        """The tensor as a value of this trace: itself, a constant, or a captured one."""
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
    fuses="view",
)
FULL = Op(
    "full",
    type=lambda *, value, shape, dtype: Type(shape, dtype),
    kernel=lambda c, *, value, shape, dtype: c.xp.full(c.outs[0].sizes, value, dtype),
    flops=lambda *_, **__: 0,
    fuses="map",
)


def _block_of(c: backend.Local, value: np.ndarray) -> Any:
    """This device's block of a constant array; padding repeats nothing and is zero."""
    block = c.outs[0]
    counts = [c.count(axes) for axes in block.axes]
    pads = [(0, size * n - real) for size, n, real in zip(block.sizes, counts, value.shape, strict=True)]
    x = c.xp.asarray(np.pad(value, pads) if any(high for _, high in pads) else value)  # NumPy cannot pad a number
    for i, dim in enumerate(block.shape):
        if block.axes[i]:
            x = c.xp.dynamic_slice(x, c.start(block, dim), block.sizes[i], i)
    return x


def current() -> Traced | None:
    """The innermost trace in progress, if any."""
    return _state.trace


@contextlib.contextmanager
def location(where: Where | None, backward: bool | None = None) -> Iterator[None]:
    """Equations made inside carry this source line instead of the caller's."""
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
    """Add an equation to the current trace, or run the operation at once when there is none.

    Raises `ShapeError` (with the user's line) when the operands do not fit.
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
    if op.control:
        values = op.kernel(lambda graph, xs: evaluate(graph, xs), *ins, **params)
        return tuple(values)
    arrays = [x.array for x in ins]
    results = run_kernel(op, backend.Jax, arrays, [x.dims for x in ins], types, params)
    return tuple(Tensor(t.shape, t.dtype, array=a) for t, a in zip(types, results, strict=True))


def run_kernel(
    op: Op, xp: Any, arrays: Sequence[Any], shapes: Sequence[Shape], types: Sequence[Type], params: Any
) -> list[Any]:
    """The operation on undivided arrays; always a list, in the declared dtypes."""
    local = backend.Local(xp, tuple(map(backend.whole, shapes)), tuple(backend.whole(t.shape) for t in types))
    with np.errstate(all="ignore"):  # NaN, infinities and wrap-around are data here
        results = op.kernel(local, *arrays, **params)
    return list(results) if isinstance(results, tuple | list) else [results]


def evaluate(graph: Graph, ins: Sequence[Tensor]) -> list[Tensor]:
    """Run a graph's equations through `bind` on these inputs: at once, or into the current trace."""
    env: dict[Var, Tensor] = dict(zip(graph.ins, ins, strict=True))
    for eqn in graph.eqns:
        with location(eqn.where, eqn.backward or None):
            env.update(zip(eqn.outs, bind(eqn.op, *(env[v] for v in eqn.ins), **eqn.params), strict=True))
    return [env[v] for v in graph.outs]


def trace(
    function: Callable[..., Any], specs: Sequence[Type], labels: Sequence[str] = ()
) -> tuple[Graph, list[Tensor], Any]:
    """Trace a function of tensors.

    Returns the graph, whose inputs are the captures followed by the arguments, the captured outer tensors, and
    the structure of the result.
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
    """A number or 0-d array as a tensor without dims; a tensor as it is."""
    if isinstance(x, Tensor):
        return x
    array = np.asarray(x)
    if array.ndim or array.dtype.kind not in "biufcV":
        raise at(
            ShapeError(
                f"expected a tensor or a number, got {_what(x, array)}\n"
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


def _what(x: Any, array: np.ndarray) -> str:
    return f"an array of shape {array.shape}" if array.ndim else repr(x)


def tensor(array: Any, dims: DimsLike = ()) -> Tensor:
    """A concrete named tensor.

    >>> import meshdsl as md
    >>> md.tensor([[1.0, 2.0]], "batch:1 io:2").dims
    (batch=1, io=2)

    Dims may be names alone: sizes come from the array. Raises `ShapeError` when they do not fit its shape.
    """
    values = array if isinstance(array, jax.Array) else np.asarray(array)
    try:
        shape = _dims_for(dims, values.shape)
    except MeshdslError as error:
        raise at(error, caller()) from None
    values = jnp.asarray(values)
    return Tensor(shape, values.dtype, array=values)


def _dims_for(dims: DimsLike, sizes: tuple[int, ...]) -> Shape:
    items = split_items(dims)
    if len(items) != len(sizes):
        raise ShapeError(f"{len(items)} dims given ({items}) for an array of shape {sizes}; name every axis once")
    sized = [
        Dim(item, size) if isinstance(item, str) and ":" not in item else item
        for item, size in zip(items, sizes, strict=True)
    ]
    shape = pick(sized, (), new=True)
    if tuple(d.size for d in shape) != sizes:
        raise ShapeError(f"dims {show(shape)} do not fit an array of shape {sizes}; the order is the storage order")
    return shape


def spec(dims: DimsLike = (), dtype: Any = "float32") -> Type:
    """The abstract form of a tensor, accepted wherever example arguments are.

    >>> spec("batch:8 io:4", "int32")
    int32[batch=8 io=4]
    """
    try:
        return Type(pick(dims, (), new=True), np.dtype(jnp.dtype(dtype)))
    except MeshdslError as error:
        raise at(error, caller()) from None


def spec_of(x: Any) -> Type:
    """The type of an argument: a tensor, a spec, or a number."""
    if isinstance(x, Type):
        return x
    if isinstance(x, Tensor):
        return x.type
    if isinstance(x, bool | int | float | complex | np.generic) or (hasattr(x, "shape") and x.shape == ()):
        return Type((), np.dtype(jnp.result_type(x)))
    raise ShapeError(
        f"an argument is a tensor, md.spec or number, got {type(x).__name__}; name its dims with md.tensor(array, dims)"
    )


__all__ += ["CONSTANT", "FULL", "as_tensor", "current", "run_kernel", "spec_of"]
