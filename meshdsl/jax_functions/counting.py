"""The floating-point operations of a jaxpr, for the cost model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..backend.jaxprs import CALLS, inner, opened


def flops(jaxpr: Any) -> float:
    """Floating-point operations of a jaxpr: products exactly, other equations one per element of their results.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((8, 8))))
    1088.0
    """
    return sum(map(_of_equation, opened(jaxpr)[0].eqns), 0.0)


def _of_equation(eqn: Any) -> float:
    name, bodies = eqn.primitive.name, inner(eqn)
    if name in _COUNTED:
        return _COUNTED[name](eqn)
    if name in _BODIES:
        return _BODIES[name](eqn) * sum(map(flops, bodies))
    if name == "cond":
        return max(map(flops, bodies), default=0)
    return 0 if name in _FREE_OF_COST else sum(_elements(v) for v in eqn.outvars)


def _elements(v: Any) -> int:
    return math.prod(v.aval.shape)


def _dot(eqn: Any) -> float:
    (over, _), _ = eqn.params["dimension_numbers"]
    return 2 * _elements(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[int(i)] for i in over)


def _conv(eqn: Any) -> float:
    kernel = eqn.invars[1].aval.shape
    out = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _elements(eqn.outvars[0]) * math.prod(kernel) / max(out, 1)


def _fft(eqn: Any) -> float:
    return 5 * _elements(eqn.invars[0]) * max(math.log2(math.prod(eqn.params["fft_lengths"])), 1)


_COUNTED: dict[str, Callable[[Any], float]] = {"dot_general": _dot, "conv_general_dilated": _conv, "fft": _fft}
_BODIES: dict[str, Callable[[Any], float]] = {  # how often the bodies run
    **dict.fromkeys((*CALLS, "while"), lambda eqn: 1),
    "scan": lambda eqn: eqn.params["length"],
    "pallas_call": lambda eqn: math.prod(int(n) for n in eqn.params["grid_mapping"].grid),
}
_FREE_OF_COST = {
    "broadcast_in_dim", "copy", "copy_p", "get", "reshape", "slice", "squeeze", "stop_gradient", "swap", "transpose",
}  # fmt: skip
