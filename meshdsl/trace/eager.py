"""Operations outside a trace: the kernel runs at once, on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..backend import Jax, Local, NumPy, whole
from ..backend.typed import untyped
from ..dims import Shape
from ..errors import ShapeError
from ..ir import Op, Params, Type, exact
from .arguments import check_dtypes, on_device
from .tensors import Tensor

SMALL = 1024  # elements


def run_eagerly(op: Op, ins: Sequence[Tensor], types: Sequence[Type], params: Any) -> tuple[Tensor, ...]:
    """The results of an operation on concrete tensors; raises `ShapeError` if they are on different devices."""
    arrays = [untyped(x.array) for x in ins]
    if len(ins) > 1 and _on_other_devices([x.stored for x in ins]):
        raise ShapeError(
            f"{op.name} of tensors on different devices: results of functions compiled for different meshes\n"
            "  compile one function that computes both, or copy one of them: md.tensor(x.numpy(), x.dims)"
        )
    check_dtypes([x.dtype for x in (*ins, *types)])
    results = _computed(op, arrays, tuple(x.dims for x in ins), tuple(types), params)
    return tuple(Tensor(t.dims, t.dtype, array=a) for t, a in zip(types, results, strict=True))


def _computed(op: Op, arrays: Sequence[Any], shapes: tuple[Shape, ...], types: tuple[Type, ...], params: Any) -> Any:
    if not arrays and all(math.prod(d.size for d in t.dims) <= SMALL for t in types):
        # NumPy computes what has no operands: a compilation for each number in a user's code costs more
        return [on_device(x) for x in run_kernel(op, NumPy, (), (), types, params)]
    if all(isinstance(value, Hashable) and not callable(value) for value in params.values()):
        key = tuple((name, exact(value)) for name, value in params.items())
        return _compiled_kernel(op, shapes, types, _Params(key, params))(*arrays)
    # a constant's array has no hash, and a function is a new one in every call
    return run_kernel(op, Jax, arrays, shapes, types, params)


def _on_other_devices(arrays: Sequence[Any]) -> bool:
    """True if the arrays are on different sets of devices; inside a JAX transformation they are on none."""
    placed = [a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer)]
    return len({frozenset(a.devices()) for a in placed if a.committed}) > 1


@dataclass(frozen=True)
class _Params:
    key: Hashable
    params: Params = field(compare=False)


@functools.lru_cache(maxsize=4096)
def _compiled_kernel(
    op: Op, shapes: tuple[Shape, ...], types: tuple[Type, ...], params: _Params
) -> Callable[..., list[Any]]:
    """The kernel of an operation on unsharded arrays, compiled whole and not one primitive at a time."""
    return jax.jit(lambda *arrays: run_kernel(op, Jax, arrays, shapes, types, params.params))


def run_kernel(
    op: Op, xp: Any, arrays: Sequence[Any], shapes: Sequence[Shape], types: Sequence[Type], params: Any
) -> list[Any]:
    """Run an operation's kernel on unsharded arrays; returns a list of results."""
    local = Local(xp, tuple(map(whole, shapes)), tuple(whole(t.dims) for t in types))
    with np.errstate(all="ignore"):  # NaN, infinities and integer overflow are valid results
        results = op.kernel(local, *arrays, **params)
    return list(results) if isinstance(results, tuple | list) else [results]
