"""`Tensor`: a value with named dims, concrete (it holds an array) or traced (it is a variable of a trace)."""

from __future__ import annotations

import collections
import itertools
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..dims import DimLike, Dims, DimsLike, Shape, find, size_of
from ..errors import ShapeError, TraceError
from ..errors.detours import INSTEAD
from ..ir import Type


def is_public(name: str) -> bool:
    """True if `md.<name>` exists: errors point to no other names."""
    return name in sys.modules[__name__.partition(".")[0]].__all__


class _Size(int):
    """A number of elements that, called with a dim, returns that dim's size."""

    dims: Shape

    def __call__(self, dim: DimLike) -> int:
        return find(dim, self.dims).size


class Tensor:
    """A value with named dims. Create one with `md.tensor`; a traced function receives traced ones.

    >>> import meshdsl as md
    >>> x = md.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "batch io")
    >>> x.dims, x.shape, x.dtype
    ((batch=2, io=3), (2, 3), dtype('float32'))
    >>> (2 * x - md.mean(x, "io")).numpy()[0]
    array([0., 2., 4.], dtype=float32)

    `.dims` are the dims in storage order, `.shape` their sizes, `.ndim` and `.size` the numbers of dims and elements,
    `.dtype` a NumPy dtype. `.array` and `.numpy()` return the values of a concrete tensor and raise `TraceError` for a
    traced one; so do `.item()` and `f"{loss:.3f}"`, for a tensor without dims. Operators broadcast by name.
    Reductions are methods too: `x.mean("batch")` is `md.mean(x, "batch")`, `x.astype("bfloat16")` is `md.cast`.

    Dims and indices are chosen by name: `x.dims["io"]` is a dim and `x.size("io")` its size. `x["io", 1]` drops the
    dim, `x["io", 1:]` keeps a part of it, and `x["batch", i, "io", j]` reads the elements that the integer tensors i
    and j name; `x.at["io", 1].set(0)` is x with these elements replaced (also `add`, `mul`, `max` and `min`).

    >>> x["batch", -1, "io", ::2], x.at["io", 1].add(10).numpy()[0]
    (tensor(float32[io=2], [4. 6.]), array([ 1., 12.,  3.], dtype=float32))
    """

    __slots__ = ("_array", "dims", "dtype")
    dims: Dims
    dtype: np.dtype
    _array: Any
    _trace: Any = None  # those of a `TracedTensor`
    _var: Any = None
    __array_priority__ = 1000

    if TYPE_CHECKING:  # ops.operators defines the operators; these stubs are for type checkers

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

        def __getitem__(self, key: Any) -> Tensor: ...

        @property
        def at(self) -> Any: ...

        def __eq__(self, other: Any) -> Tensor: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        def __ne__(self, other: Any) -> Tensor: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        def all(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def any(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def astype(self, dtype: Any) -> Tensor: ...

        def max(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def mean(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def min(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def prod(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def std(self, over: DimsLike | None = None, where: Any = None, ddof: int = 0) -> Tensor: ...

        def sum(self, over: DimsLike | None = None, where: Any = None) -> Tensor: ...

        def var(self, over: DimsLike | None = None, where: Any = None, ddof: int = 0) -> Tensor: ...

    def __init__(self, dims: Shape, dtype: Any, *, array: Any):
        put, dtype = object.__setattr__, np.dtype(dtype)
        if dtype.kind in "OSUMm":
            raise ShapeError(f"a tensor has numbers or booleans, not elements of dtype {dtype}")
        put(self, "dims", dims if type(dims) is Dims else Dims(dims))
        put(self, "dtype", dtype)
        put(self, "_array", array)

    def __setattr__(self, name: str, value: Any) -> None:
        way_out = {"dims": "md.rename or md.reshape", "dtype": "md.cast"}.get(
            name, "a function that returns a new tensor"
        )
        raise ShapeError(f"a tensor does not change: its {name} cannot be set\n  use {way_out}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, in storage order."""
        return tuple(d.size for d in self.dims)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> _Size:
        """The number of elements; `x.size("batch")` is the size of a dim."""
        size = _Size(size_of(self.dims))
        size.dims = self.dims
        return size

    @property
    def type(self) -> Type:
        """Dims and dtype."""
        return Type(self.dims, self.dtype)

    @property
    def array(self) -> Any:
        """The `jax.Array`, without padding. Raises `TraceError` for a traced tensor."""
        stored = self._readable("its array")
        if isinstance(stored, Tracer):
            return stored[tuple(slice(0, d.size) for d in self.dims)] if stored.shape != self.shape else stored
        return stored if tuple(np.shape(stored)) == self.shape else jnp.asarray(self.numpy())

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array, without padding.

        Raises `TraceError` for a traced tensor, and for one that this process stores only in part.
        """
        stored = self._readable("its values")
        if isinstance(stored, jax.Array) and not stored.is_fully_addressable and not stored.is_fully_replicated:
            raise TraceError(
                f"tensor {self.type} is stored partly on devices of other processes\n"
                "  read the parts that are here with .addressable_shards of tensor.stored, or return md.replicate(x)"
            )
        if not self.size:  # JAX cannot read an empty array in several blocks
            return np.zeros(self.shape, stored.dtype)
        return np.asarray(stored)[tuple(slice(0, d.size) for d in self.dims)]

    @property
    def stored(self) -> Any:
        """The array as stored: a sharded dim that does not divide evenly is padded at its end."""
        return self._concrete("its array")

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A tensor with memory of its own, sharded alike; a traced tensor itself, because it has none."""
        if self._array is None or isinstance(self._array, Tracer):
            return self
        return Tensor(self.dims, self.dtype, array=jnp.copy(self._readable("its values")))

    def __reduce__(self) -> Any:
        """For `pickle`: the values without sharding; a tensor on the default device is made of them."""
        return _unpickled, (self.numpy(), self.dims)

    if not TYPE_CHECKING:  # for type checkers, there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            way_out = f"write md.{name}(x)" if is_public(name) else INSTEAD.get(name, "")
            raise AttributeError(f"a tensor has no method or field {name!r}{way_out and f'; {way_out}'}")

    def block_until_ready(self) -> Tensor:
        """Wait until the value is computed and return the tensor; `jax.block_until_ready` calls this method."""
        jax.block_until_ready(self._array)
        return self

    def _readable(self, what: str) -> Any:
        """The stored array; raises `ShapeError` if a call that it was donated to has overwritten it."""
        stored = self._concrete(what)
        if isinstance(stored, jax.Array) and not isinstance(stored, Tracer) and stored.is_deleted():
            raise ShapeError(
                f"tensor {self.type} was donated to an earlier call, which has overwritten its memory\n"
                "  use the result that replaced it, or leave the argument out of donate="
            )
        return stored

    def _concrete(self, what: str) -> Any:
        if self._array is None:
            raise TraceError(
                f"a traced tensor has no values yet, so {what} cannot be read\n"
                f"  its type is {self.type}; the compiled program computes its values\n"
                "  return it from the function, or compute with md operations instead of NumPy's"
            )
        return self._array

    def __bool__(self) -> bool:
        if self._array is None or isinstance(self._array, Tracer):
            raise TraceError(
                "a traced tensor cannot decide a Python if, while, and, or, not or assert\n"
                f"  it is {self.type}, and its values exist only when the compiled program runs\n"
                "  use md.where(c, a, b) per element, or md.cond(p, f, g, *xs) for a whole branch"
            )
        if self.dims:
            raise ShapeError(f"the truth of a tensor {self.type} is ambiguous; use md.any or md.all")
        return bool(self.numpy())

    def item(self) -> Any:
        """The value of a concrete tensor without dims, as a Python number; raises `ShapeError` if it has dims."""
        if self.dims:
            raise ShapeError(f"only a tensor without dims is one number; this is {self.type}")
        return self.numpy().item()

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else str(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self._array is None:
            raise _NoIndexError(
                f"a traced tensor has no values yet, so it is no size, index or number of trips: {self.type}\n"
                "  use a number of Python's, a dim's size, or md.while_loop"
            )
        if self.dtype.kind not in "iu":
            raise TypeError(f"{self.type} is not an integer")
        return int(self.item())

    def __iter__(self) -> Any:
        raise TraceError(f"a tensor {self.type} has named dims; iterate with md.unstack(x, dim)")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    @property
    def __jax_array__(self) -> Any:  # functions of JAX look it up before anything else
        if not _in_jax(sys._getframe(2)):
            raise AttributeError  # an operator of an array then leaves the operation to the tensor
        raise TraceError(
            f"a function of JAX takes arrays, and this is {self.type}, whose dims have names\n"
            "  instead of jax.numpy: md's own function, md.map(jnp.sin, x) for an elementwise one, "
            "md.local(f, x, out=, split=) for any other\n"
            "  jax.jit, jax.grad and the like: pass and return x.array, and name its dims inside, "
            "md.tensor(array, x.dims); or md.jaxify"
        )

    def __repr__(self) -> str:
        if self._array is None or isinstance(self._array, Tracer):
            return f"traced {self.type}"
        return f"tensor({self.type}, {np.array2string(self.numpy(), threshold=20, precision=4)})"

    __hash__ = object.__hash__


class TracedTensor(Tensor):
    """A variable of a trace; `_array` is the value of a constant that the trace captured, else None."""

    __slots__ = ("_trace", "_var")

    def __init__(self, dims: Shape, dtype: Any, *, var: Any, trace: Any, array: Any = None):
        super().__init__(dims, dtype, array=array)
        object.__setattr__(self, "_var", var)
        object.__setattr__(self, "_trace", trace)

    @property
    def type(self) -> Type:
        return self._var.type


_new = object.__new__
_set_dims, _set_dtype, _set_array = (vars(Tensor)[name].__set__ for name in ("dims", "dtype", "_array"))


def concrete(dims: Sequence[Shape], dtypes: Sequence[np.dtype], arrays: Sequence[Any]) -> list[Tensor]:
    """The tensors of arrays, in a quarter of the time of `Tensor(...)`: each call of a compiled function makes its
    results, so every slot is set for all of them by a loop in C."""
    tensors = list(map(_new, itertools.repeat(Tensor, len(arrays))))
    for set_slot, values in ((_set_dims, dims), (_set_dtype, dtypes), (_set_array, arrays)):
        collections.deque(map(set_slot, tensors, values), maxlen=0)
    return tensors


def known_values(x: Tensor) -> np.ndarray | None:
    """The values of a concrete tensor; None for a traced one, and for one that this process stores only in part."""
    stored = x._array
    if stored is None or isinstance(stored, Tracer):
        return None
    partly = isinstance(stored, jax.Array) and not stored.is_fully_addressable and not stored.is_fully_replicated
    return None if partly else x.numpy()


def _unpickled(values: np.ndarray, dims: Shape) -> Tensor:
    array = jax.device_put(values)
    return Tensor(dims, array.dtype, array=array)


class _NoIndexError(TraceError, TypeError):
    """A traced tensor is no integer: Python and NumPy ask for a `TypeError`."""


def _in_jax(frame: FrameType | None) -> bool:
    return frame is not None and f"{os.sep}jax{os.sep}" in frame.f_code.co_filename
