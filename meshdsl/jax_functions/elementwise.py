"""A static check that a JAX function is elementwise, from how each primitive acts on the axes of its operands.

A function of arrays of one shape is elementwise if each element of its result depends only on the elements at the same
index, for every shape. Only such a function gives the same result on a device's block as on the full array.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import Jaxpr

from ..backend.jaxprs import CALLS, inner, opened
from .table import TABLE, Shape, equation
from .walk import Problem, line_of

_LOOPS = {"scan", "while", "cond"}


def has_own_gradient(jaxpr: Any) -> bool:
    """True if a gradient may have been written by hand; those of JAX treat places as their function does."""
    text = str(jaxpr)
    return "custom_vjp_call" in text or "custom_jvp_call" in text


def mixing(f: Callable[..., Any], names: Sequence[str], dtypes: Sequence[np.dtype]) -> Problem | None:
    """The reason why a function of arrays with these axes, one per dtype, is not elementwise; None if it is.

    >>> import jax.numpy as jnp
    >>> mixing(jnp.tanh, ["batch", "io"], ["float32"])
    >>> mixing(lambda x: x / x.size, ["batch", "io"], ["float32"]).what
    'reads the shape of its argument'

    The function is traced once on arrays with symbolic sizes. So the answer holds for every shape, and the check finds
    sizes that are used as values. An axis with an integer size was created by the function itself (the terms of a
    series, the choices of `jnp.select`); the function may do anything along it.
    """
    first = _mixing(f, len(names), dtypes)
    return first and first._replace(what=re.sub(r"axis(\d+)", lambda m: names[int(m[1])], first.what))


def _mixing(f: Callable[..., Any], rank: int, dtypes: Sequence[np.dtype]) -> Problem | None:
    sizes = export.symbolic_shape(", ".join(f"axis{i}" for i in range(rank)))
    try:
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(sizes, dtype) for dtype in dtypes))
    except Exception as error:  # from JAX or from the function, which cannot handle symbolic sizes
        text = str(error).strip().partition("\n")[0].rstrip(".")
        return Problem("", f"depends on the shape of its argument ({text[:160]})")
    mixings = sorted(_mixed(closed.jaxpr, None), key=lambda m: m.primitive in ("dim_as_value", "iota"))
    results = [tuple(v.aval.shape) for v in closed.jaxpr.outvars]
    if not mixings and results != [tuple(sizes)]:
        return Problem("", f"returns {', '.join(map(_show, results))} for an argument of {_show(tuple(sizes))}")
    return mixings[0] if mixings else None  # for x[::-1], report the gather, not the size or the iota it needs


def _mixed(jaxpr: Jaxpr, called_at: Any) -> Iterator[Problem]:
    """Yield the equations whose result elements depend on elements at other indices."""
    for eqn in jaxpr.eqns:
        at = called_at or eqn  # inner jaxprs may be cached from an earlier caller
        name, bodies = eqn.primitive.name, inner(eqn)
        counted = not _symbolic((eqn.params.get("length", 0),))  # False for a loop over an argument's axis
        if bodies and counted and not eqn.effects and name in CALLS | _LOOPS:
            for body in bodies:
                yield from _mixed(opened(body)[0], at)
        elif name == "dim_as_value":
            yield Problem(name, "reads the shape of its argument", line_of(at))
        elif bodies or eqn.effects or not _keeps_places(eqn):
            yield Problem(name, f"computes {name} of {_shapes(eqn.invars)} to {_shapes(eqn.outvars)}", line_of(at))


def _keeps_places(eqn: Any) -> bool:
    """True if an equation does not mix elements along the axes of the function's arguments."""
    name, e = eqn.primitive.name, equation(eqn)
    new = [{i for i, n in enumerate(shape) if _symbolic((n,))} for shape in e.outs]
    if name == "iota":
        return e.params["dimension"] not in new[0]
    if name == "optimization_barrier" or not any(map(_symbolic, (*e.ins, *e.outs))):
        return True
    if name not in TABLE:
        return False
    passed = [
        (target, n)
        for s, axes in zip(e.ins, TABLE[name](e), strict=True)
        for n, target in zip(s, axes, strict=True)
        if _symbolic((n,))
    ]
    kept = all(isinstance(target, int) and shape[target] == n for shape in e.outs for target, n in passed)
    distinct = all(len({str(shape[i]) for i in axes}) == len(axes) for shape, axes in zip(e.outs, new, strict=True))
    made = {target for target, _ in passed}
    return kept and distinct and (name == "broadcast_in_dim" or all(axes == made for axes in new))


def _symbolic(sizes: Shape) -> bool:
    return any(not isinstance(n, int) for n in sizes)


def _shapes(atoms: Sequence[Any]) -> str:
    arrays = [_show(v.aval.shape) for v in atoms if v.aval.shape]
    return ", ".join(arrays) or ("a number" if len(atoms) == 1 else "numbers")


def _show(sizes: Shape) -> str:
    return f"[{', '.join(map(str, sizes))}]"
