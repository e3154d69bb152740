"""A static check that a JAX function is elementwise, from how each primitive acts on the axes of its operands.

A function of arrays of one shape is elementwise if each element of its result depends only on the elements at the same
index, for every shape. Only such a function gives the same result on a device's block as on the full array.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr

from ..errors import Where, users_line

__all__ = ["CALLS", "ELEMENTWISE", "Mixing", "elementwise", "has_own_gradient", "inner", "mixing"]

# Primitives that only call a function; the check reads the function instead.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "remat2", "checkpoint",
}  # fmt: skip
LOOPS = {"scan", "while", "cond"}
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter",
    "not", "or", "polygamma", "population_count", "pow", "random_gamma_grad", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    "zeta",
}  # fmt: skip
# Primitives that act only along the axes in this parameter.
_ALONG = {
    **dict.fromkeys(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
                     "reduce_sum", "reduce_xor"), "axes"),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split", "stack", "unstack"), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
    **dict.fromkeys(("rev", "squeeze"), "dimensions"),
}  # fmt: skip

Sizes = tuple[Any, ...]  # sizes of axes: integers, and symbols for the arguments' axes


class Mixing(NamedTuple):
    """The reason why a function is not elementwise: the primitive ("" if none), part of a sentence, and the line."""

    primitive: str
    what: str
    where: Where | None = None


def elementwise(name: str, ins: Sequence[Sizes], out: Sizes) -> bool:
    """True if a primitive is elementwise on operands of these sizes; scalar operands are allowed.

    >>> elementwise("add", [(3,), ()], (3,)), elementwise("cumsum", [(3,)], (3,)), elementwise("reduce_sum", [(3,)], ())
    (True, False, False)
    """
    return name in ELEMENTWISE and all(sizes in ((), out) for sizes in ins)


def inner(eqn: Any) -> list[tuple[Jaxpr, Sequence[Any]]]:
    """The inner jaxprs of an equation of a jaxpr, each with its constants."""
    parts = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [
        (part.jaxpr, part.consts) if isinstance(part, ClosedJaxpr) else (part, ())
        for part in parts
        if isinstance(part, ClosedJaxpr | Jaxpr)
    ]


def has_own_gradient(jaxpr: Any) -> bool:
    """True if a gradient may have been written by hand; those of JAX treat places as their function does."""
    text = str(jaxpr)
    return "custom_vjp_call" in text or "custom_jvp_call" in text


def mixing(f: Callable[..., Any], names: Sequence[str], dtypes: Sequence[np.dtype]) -> Mixing | None:
    """The reason why a function of arrays with these axes, one per dtype, is not elementwise; None if it is.

    >>> import jax.numpy as jnp
    >>> mixing(jnp.tanh, ["batch", "io"], ["float32"])
    >>> mixing(lambda x: x / x.size, ["batch", "io"], ["float32"])
    Mixing(primitive='dim_as_value', what='reads the shape of its argument', where=None)

    The function is traced once on arrays with symbolic sizes. So the answer holds for every shape, and the check finds
    sizes that are used as values. An axis with an integer size was created by the function itself (the terms of a
    series, the choices of `jnp.select`); the function may do anything along it.
    """
    first = _mixing(f, len(names), dtypes)
    return first and first._replace(what=re.sub(r"axis(\d+)", lambda m: names[int(m[1])], first.what))


def _mixing(f: Callable[..., Any], rank: int, dtypes: Sequence[np.dtype]) -> Mixing | None:
    sizes = export.symbolic_shape(", ".join(f"axis{i}" for i in range(rank)))
    try:
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(sizes, dtype) for dtype in dtypes))
    except Exception as error:  # from JAX or from the function, which cannot handle symbolic sizes
        text = str(error).strip().partition("\n")[0].rstrip(".")
        return Mixing("", f"depends on the shape of its argument ({text[:160]})")
    mixings = sorted(_mixed(closed.jaxpr, None), key=lambda m: m.primitive in ("dim_as_value", "iota"))
    results = [tuple(v.aval.shape) for v in closed.jaxpr.outvars]
    if not mixings and results != [tuple(sizes)]:
        return Mixing("", f"returns {', '.join(map(_show, results))} for an argument of {_show(tuple(sizes))}")
    return mixings[0] if mixings else None  # for x[::-1], report the gather, not the size or the iota it needs


def _mixed(jaxpr: Jaxpr, called_at: Any) -> Iterator[Mixing]:
    """Yield the equations whose result elements depend on elements at other indices."""
    for eqn in jaxpr.eqns:
        traceback = called_at or eqn.source_info.traceback  # inner jaxprs may be cached from an earlier caller
        name, bodies = eqn.primitive.name, inner(eqn)
        counted = not _symbolic((eqn.params.get("length", 0),))  # False for a loop over an argument's axis
        if bodies and counted and not eqn.effects and name in CALLS | LOOPS:
            for body, _ in bodies:
                yield from _mixed(body, traceback)
        elif name == "dim_as_value":
            yield Mixing(name, "reads the shape of its argument", _line(traceback))
        elif bodies or eqn.effects or not _keeps_places(eqn):
            yield Mixing(name, f"computes {name} of {_shapes(eqn.invars)} to {_shapes(eqn.outvars)}", _line(traceback))


def _keeps_places(eqn: Any) -> bool:
    """True if an equation does not mix elements along the axes of the function's arguments."""
    name, params = eqn.primitive.name, eqn.params
    ins, outs = ([tuple(v.aval.shape) for v in vs] for vs in (eqn.invars, eqn.outvars))
    if not any(map(_symbolic, (*ins, *outs))):
        return True
    if name in ELEMENTWISE:
        return all(sizes == () or _stretches(sizes, outs[0]) for sizes in ins)
    if name == "transpose":
        return True  # each symbol occurs once, so the result's shape shows the permutation
    if name == "broadcast_in_dim":
        return _stretches(ins[0], tuple(outs[0][i] for i in params["broadcast_dimensions"]))
    if name == "slice":
        return all(n == size or not _symbolic((n,)) for n, size in zip(ins[0], outs[0], strict=True))
    if name not in _ALONG:
        return False
    axes = params[_ALONG[name]]
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    longer = ins[0] if name != "stack" else outs[0]
    return not _symbolic(tuple(longer[axis] for axis in axes))


def _stretches(sizes: Sizes, out: Sizes) -> bool:
    return len(sizes) == len(out) and all(n in (1, size) for n, size in zip(sizes, out, strict=True))


def _symbolic(sizes: Sizes) -> bool:
    return any(not isinstance(n, int) for n in sizes)


def _shapes(atoms: Sequence[Any]) -> str:
    arrays = [_show(v.aval.shape) for v in atoms if v.aval.shape]
    return ", ".join(arrays) or ("a number" if len(atoms) == 1 else "numbers")


def _show(sizes: Sizes) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _line(traceback: Any) -> Where | None:
    frames = traceback.frames if traceback is not None else ()
    return users_line((frame.file_name, frame.line_num) for frame in frames)
