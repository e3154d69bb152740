"""Distributions whose algorithm rejects draws or loops: every device draws all numbers and keeps those of its block.

The numbers are those of `jax.random` under every layout. The parameters are gathered; gradients for them are those
that JAX has for the draws (of gamma, beta, Dirichlet and Student's t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ...backend import Local
from ...dims import Dim, DimLike, DimsLike, Shape, find, pick, size_of
from ...ir import Labels, Op, Type, named
from ...trace import Tensor, as_tensor, bind1
from ..dtypes import as_dtype, cast, kind
from ..reductions import broadcast, spread
from ..reshape import transpose
from .keys import as_key, check_key, dtype_of_kind


def _draw_type(key: Type, *parameters: Type, f: Any, shape: Shape, dtype: np.dtype) -> Type:
    check_key(key, key.dims[:-1])
    return Type(shape, dtype)


def _draw_kernel(c: Local, *ins: Any, f: Callable[..., Any], shape: Shape, dtype: np.dtype) -> Any:
    cut = (x[tuple(slice(d.size) for d in block.dims)] for x, block in zip(ins, c.ins, strict=True))
    x, out = c.xp.elementwise(f, *cut), c.outs[0]
    for k, (dim, axes) in enumerate(zip(out.dims, out.axes, strict=True)):
        more = out.sizes[k] * c.count(axes) - dim.size
        x = c.xp.pad(x, [(0, more if i == k else 0) for i in range(x.ndim)]) if more else x
        x = c.xp.dynamic_slice(x, c.start(out, dim), out.sizes[k], k) if axes else x
    return x


def _draw_vjp(
    ct: Tensor, key: Tensor, *parameters: Tensor, f: Callable[..., Any], **_: Any
) -> tuple[Tensor | None, ...]:
    def slope(i: int) -> Callable[..., Any]:
        def pulled(key: Any, *xs: Any) -> Any:
            return jax.vjp(lambda *p: f(key, *p), *xs[:-1])[1](xs[-1])[i]

        pulled.__name__ = f"d_{f.__name__}_{i}"
        return pulled

    if kind(ct.dtype) != "f":
        return (None, *(None for _ in parameters))
    slopes = (
        bind1(DRAW, key, *parameters, ct, f=slope(i), shape=x.dims, dtype=x.dtype) for i, x in enumerate(parameters)
    )
    return (None, *slopes)


def _draw_vmap(*ins: Tensor, new: Dim, f: Callable[..., Any], shape: Shape, dtype: np.dtype) -> Tensor:
    mapped = jax.vmap(f)
    mapped.__name__ = f.__name__
    return bind1(DRAW, *spread(ins, new), f=mapped, shape=(new, *shape), dtype=dtype)


DRAW = Op(
    "draw",
    type=_draw_type,
    kernel=_draw_kernel,
    vjp=_draw_vjp,
    vmap=_draw_vmap,
    rule=lambda *ins, shape, **_: Labels(tuple(named(x.dims, [d.name for d in x.dims]) for x in ins), (named(shape),)),
    flops=lambda ins, outs, *, shape, **_: 200.0 * size_of(shape),
)


@lru_cache(maxsize=1024)
def _sampler(name: str, sizes: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
    def draw(key: Any, *parameters: Any) -> Any:
        return getattr(jax.random, name)(jax.random.wrap_key_data(key), *parameters, shape=sizes, dtype=dtype)

    draw.__name__ = name
    return draw


def _drawn(
    name: str, key: Any, parameters: Sequence[Any], dims: DimsLike | None, dtype: Any, last: DimLike | None = None
) -> Tensor:
    """Draw with parameters that are repeated along the dims of the result, of which jax.random adds the `last`."""
    floats = dtype_of_kind(name, dtype, "f", "floats") if name != "poisson" else np.dtype(np.float32)
    xs = [cast(as_tensor(x), floats) for x in parameters]
    own = tuple(dict.fromkeys(d for x in xs for d in x.dims))
    category = () if last is None else (find(last, own),)
    shape = tuple(d for d in own if d not in category) if dims is None else pick(dims, own, new=True)
    whole = (*shape, *category)
    xs = [transpose(broadcast(x, whole), whole) for x in xs]
    f = _sampler(name, tuple(d.size for d in shape), as_dtype(dtype))
    key = as_key(key)
    check_key(key.type, ())
    return bind1(DRAW, key, *xs, f=f, shape=whole, dtype=as_dtype(dtype))


def gamma(key: Tensor | jax.Array, a: Any, dims: DimsLike | None = None, dtype: Any = "float32") -> Tensor:
    """Draw from the gamma distribution with shape parameter `a`, a number or a tensor; over `dims` (default: a's).

    >>> import meshdsl as md
    >>> md.random.gamma(md.random.key(7), 2.0, "a:2")
    tensor(float32[a=2], [2.0724 0.8637])

    The gradient for a is that of `jax.random.gamma`. Every device draws all numbers and keeps its own.
    """
    return _drawn("gamma", key, [a], dims, dtype)


def beta(key: Tensor | jax.Array, a: Any, b: Any, dims: DimsLike | None = None, dtype: Any = "float32") -> Tensor:
    """Draw from the beta distribution with parameters `a` and `b`, numbers or tensors.

    >>> import meshdsl as md
    >>> md.random.beta(md.random.key(7), 2.0, 3.0, "a:2")
    tensor(float32[a=2], [0.3982 0.3441])
    """
    return _drawn("beta", key, [a, b], dims, dtype)


def dirichlet(
    key: Tensor | jax.Array, alpha: Tensor, over: DimLike, dims: DimsLike | None = None, dtype: Any = "float32"
) -> Tensor:
    """Draw from the Dirichlet distribution with concentrations `alpha`: numbers that add up to 1 along `over`.

    >>> import meshdsl as md
    >>> p = md.random.dirichlet(md.random.key(7), md.ones("kind:3"), "kind", "a:2")
    >>> p.dims, md.sum(p, "kind").numpy().round(4)
    ((a=2, kind=3), array([1., 1.], dtype=float32))
    """
    return _drawn("dirichlet", key, [alpha], dims, dtype, over)


def t(key: Tensor | jax.Array, df: Any, dims: DimsLike | None = None, dtype: Any = "float32") -> Tensor:
    """Draw from Student's t distribution with `df` degrees of freedom, a number or a tensor.

    >>> import meshdsl as md
    >>> md.random.t(md.random.key(7), 5.0, "a:2").dims
    (a=2,)
    """
    return _drawn("t", key, [df], dims, dtype)


def poisson(key: Tensor | jax.Array, rate: Any, dims: DimsLike | None = None, dtype: Any = "int32") -> Tensor:
    """Draw from the Poisson distribution with this rate, a number or a tensor.

    >>> import meshdsl as md
    >>> md.random.poisson(md.random.key(7), 3.0, "a:4")
    tensor(int32[a=4], [4 1 1 3])
    """
    dtype_of_kind("poisson", dtype, "i", "integers")
    return _drawn("poisson", key, [rate], dims, dtype)
