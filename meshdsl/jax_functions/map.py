"""`md.map`: elementwise functions of JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ..backend import Local
from ..dims import Shape, names, show
from ..errors import MeshdslError, ShapeError, raised
from ..ir import Fuses, Op, Type
from ..ops.dtypes import kind
from ..ops.elementwise import broadcast_shape
from ..trace import Tensor, as_tensor, bind1
from .trial import outline
from .walk import Problem, check


def _map_type(*types: Type, f: Callable[..., Any]) -> Type:
    shape = broadcast_shape(*types)
    return Type(shape, _result(f, types, shape).dtype)


def _result(f: Callable[..., Any], types: Sequence[Type], shape: Shape) -> Any:
    """The shapes and dtypes that f returns for whole arrays."""
    sizes = tuple(d.size for d in shape)
    return jax.eval_shape(f, *(jax.ShapeDtypeStruct(sizes, t.dtype) for t in types))


def _map_kernel(c: Local, *xs: Any, f: Callable[..., Any]) -> Any:
    sizes, whole, dtypes = c.outs[0].sizes, tuple(d.size for d in c.outs[0].dims), tuple(x.dtype for x in xs)
    if mixing(f, names(c.outs[0].dims), dtypes, whole, sizes):
        raise ShapeError(
            f"md.map: {getattr(f, '__name__', f)} reads the shape of its arguments: it is another function on a block "
            f"of {sizes} than on {show(c.outs[0].dims)}\n  pass sizes as numbers, x.dims[0].size"
        )
    xs = tuple(c.align(x, block, c.outs[0]) for x, block in zip(xs, c.ins, strict=True))
    return c.xp.elementwise(f, *(c.xp.broadcast_to(x, c.outs[0].sizes) for x in xs))


def _map_vjp(ct: Tensor, *xs: Tensor, f: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    def slope(i: int) -> Callable[..., Any]:
        def derivative(ct: Any, *xs: Any) -> Any:
            return jax.vjp(f, *xs)[1](ct)[i]

        derivative.__name__ = f"d_{getattr(f, '__name__', 'f')}_{i}"
        return derivative

    numbers = [i for i, x in enumerate(xs) if kind(x.dtype) in "fc"]
    structs = [jax.ShapeDtypeStruct(tuple(d.size for d in ct.dims), x.dtype) for x in xs]
    if has_own_gradient(jax.make_jaxpr(f)(*structs)):  # the derivative of another elementwise function is elementwise
        for i in numbers:
            _check_elementwise(slope(i), [ct.type, *(x.type for x in xs)])
    return tuple(bind1(_MAP, ct, *xs, f=slope(i)) if i in numbers else None for i in range(len(xs)))


_MAP = Op("map", type=_map_type, kernel=_map_kernel, vjp=_map_vjp, fuses=Fuses.MAP)


# The operation to use outside md.map instead of a primitive inside it.
_INSTEAD_OF = {
    "argmax": "md.argmax", "argmin": "md.argmin", "concatenate": "md.concat", "conv_general_dilated": "md.conv",
    "cumsum": "md.cumsum", "dot_general": "md.einsum", "dynamic_slice": "md.dynamic_slice", "gather": "md.take",
    "iota": "md.iota", "random_bits": "md.random", "reduce_and": "md.all", "reduce_max": "md.max",
    "reduce_min": "md.min", "reduce_or": "md.any", "reduce_prod": "md.prod", "reduce_sum": "md.sum",
    "reshape": "md.reshape", "rev": "md.reverse", "slice": "md.slice", "sort": "md.sort", "top_k": "md.top_k",
    "transpose": "md.transpose",
}  # fmt: skip


def _check_elementwise(f: Callable[..., Any], types: Sequence[Type]) -> None:
    """Raise `ShapeError` if f is not elementwise: on a part of an array it must return that part of its result."""
    shape = broadcast_shape(*types)
    sizes = tuple(d.size for d in shape)
    called = getattr(f, "__name__", str(f))
    try:
        result = _result(f, types, shape)
    except Exception as error:
        if isinstance(error, MeshdslError) or raised(error) is not None:  # the user's own function failed
            raise
        raise ShapeError(
            f"md.map: {called} does not take {', '.join(str(t) for t in types)}\n  {_first_line(error)}"
        ) from None
    if not hasattr(result, "shape"):
        raise ShapeError(
            f"md.map needs an elementwise function with one result; {called} returns {type(result).__name__}\n"
            "  map each result by a function of its own, or take them all with md.local"
        )
    whole, block = (tuple(k * n for n in sizes) for k in (4, 2))  # in a block of one element, all places are equal
    mixed = mixing(f, names(shape), tuple(t.dtype for t in types), whole, block)
    if mixed is None and result.shape != sizes:  # where no dim can be cut
        mixed = Problem("", f"returns an array of shape {result.shape}")
    if mixed is None:
        return
    line = f" ({mixed.where})" if mixed.where else ""
    problem = f"in {called}, {mixed.primitive} {mixed.what}" if mixed.primitive else f"{called} {mixed.what}"
    raise ShapeError(
        f"md.map needs an elementwise function; {problem.rstrip(',')}{line}\n"
        f"  x is {show(shape)}, and a device would compute it from its own block alone\n"
        f"  {_way_out(mixed)}"
    )


def _way_out(mixed: Problem) -> str:
    """The line of an error that says how to avoid an operation that mixes elements."""
    if mixed.primitive in _INSTEAD_OF:
        return f"use {_INSTEAD_OF[mixed.primitive]} outside the function"
    if not mixed.primitive or "size" in mixed.what:
        return "pass arrays as tensors, md.map(f, x, md.tensor(array, dims)), and sizes as numbers, x.dims[0].size"
    return "write it with md operations"


@lru_cache(maxsize=1024)
def mixing(
    f: Callable[..., Any],
    names: tuple[str, ...],
    dtypes: tuple[Any, ...],
    whole: tuple[int, ...],
    block: tuple[int, ...],
) -> Problem | None:
    """The reason why a function is not elementwise on blocks of arrays of these dims and dtypes; None if it is.

    As for `md.local`, it is traced with each dim at both sizes, and the equations of both traces are compared.
    """
    for i, (name, n) in enumerate(zip(names, block, strict=True)):
        if n == whole[i]:
            continue
        part = (*whole[:i], n, *whole[i + 1 :])
        try:
            before, after = (
                jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(sizes, dtype) for dtype in dtypes)) for sizes in (whole, part)
            )
        except Exception as error:  # from JAX or from the function, which cannot handle these sizes
            return Problem("", f"fails for other sizes of {name} ({_first_line(error)[:160].rstrip('.')})")
        problem = check(before, after, [i] * len(dtypes), [i], name, (whole[i], n))
        if problem and not (n == 1 and outline(before) == outline(after)):
            return problem
        whole = part
    return None


def has_own_gradient(jaxpr: Any) -> bool:
    """True if a gradient may have been written by hand; those of JAX treat places as their function does."""
    text = str(jaxpr)
    return "custom_vjp_call" in text or "custom_jvp_call" in text


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def map(f: Callable[..., Any], *xs: Any) -> Tensor:
    """Apply any elementwise `jnp` function to one or more tensors. JAX differentiates it.

    >>> import meshdsl as md
    >>> md.map(lambda x: x * x, md.tensor([-1.0, 2.0], "a"))
    tensor(float32[a=2], [1. 4.])

    The function is checked: it is traced at two sizes, and every primitive in it must be elementwise. So is a gradient
    of its own (`jax.custom_vjp`, `jax.custom_jvp`), when it is used. A program compares it on blocks again.

    Raises `ShapeError` if the function is not elementwise, reads the shape of its arguments or combines them with an
    array, and if no operand has all dims of the others.
    """
    if not xs:
        raise ShapeError("md.map needs at least one tensor")
    tensors = [as_tensor(x) for x in xs]
    if isinstance(f, np.ufunc):
        raise ShapeError(f"md.map takes functions of jax.numpy: jnp.{f.__name__}, not np.{f.__name__}")
    _check_elementwise(f, [x.type for x in tensors])
    return bind1(_MAP, *tensors, f=f)
