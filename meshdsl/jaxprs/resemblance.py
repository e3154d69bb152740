"""True if a function does the same on a block of one element, where JAX leaves out broadcasts and reshapes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from .dependence import Problem
from .primitives import inner

__all__ = ["resembles"]

_VIEWS = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "copy", "copy_p"}


def resembles(full: ClosedJaxpr, block: ClosedJaxpr) -> Problem | None:
    """Why a jaxpr does something that the other does not; None if its primitives and its constants are all there.

    >>> import jax
    >>> def traced(f, *sizes):
    ...     return [jax.make_jaxpr(f)(jax.ShapeDtypeStruct((n, 4), "float32")) for n in sizes]
    >>> resembles(*traced(lambda x: x + x[:1] * 0, 6, 1))
    >>> resembles(*traced(lambda x: x * 2 if x.shape[0] == 1 else x, 6, 1)).what
    'does something else on a block of one element'
    """
    known = set(_parts(full))
    new = [part for part in _parts(block) if part not in known and part not in _VIEWS]
    return Problem("", "does something else on a block of one element") if new else None


def _parts(jaxpr: ClosedJaxpr) -> Iterator[Any]:
    """The names of all primitives, and the values of all constants, as text."""
    yield from (np.array2string(np.asarray(x), threshold=64) for x in jaxpr.consts)
    for eqn in jaxpr.jaxpr.eqns:
        yield eqn.primitive.name
        yield from (repr(v.val) for v in eqn.invars if isinstance(v, Literal))
        for body, consts in inner(eqn):
            yield from _parts(ClosedJaxpr(body, list(consts)))
