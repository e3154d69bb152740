"""The floating-point operations of a jaxpr, for the cost model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from typing import Any

from ..backend.jaxprs import CALLS, inner, opened

__all__ = ["flops"]


def flops(jaxpr: Any) -> float:
    """Floating-point operations of a jaxpr: products exactly, other equations one per element of their results.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((8, 8))))
    1088.0
    """
    total = 0.0
    for eqn in opened(jaxpr)[0].eqns:
        bodies = inner(eqn)
        name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
        elements = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
        if name == "dot_general":
            (over, _), _ = eqn.params["dimension_numbers"]
            total += 2 * elements * math.prod(eqn.invars[0].aval.shape[int(i)] for i in over)
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            out = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * elements * math.prod(kernel) / max(out, 1)
        elif name == "fft":
            n = math.prod(eqn.params["fft_lengths"])
            total += 5 * math.prod(eqn.invars[0].aval.shape) * max(math.log2(n), 1)
        elif name == "scan":
            total += eqn.params["length"] * sum(map(flops, bodies))
        elif name == "cond":
            total += max(map(flops, bodies), default=0)
        elif name == "pallas_call":
            total += math.prod(int(n) for n in eqn.params["grid_mapping"].grid) * sum(map(flops, bodies))
        elif name in CALLS or name == "while":
            total += sum(map(flops, bodies))
        elif name not in _FREE_OF_COST:
            total += sum(math.prod(shape) for shape in shapes)
    return total


_FREE_OF_COST = {
    "broadcast_in_dim", "copy", "copy_p", "get", "reshape", "slice", "squeeze", "stop_gradient", "swap", "transpose",
}  # fmt: skip
