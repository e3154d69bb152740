"""What the table cannot prove is tried: a function on whole arrays beside the same function on blocks, on random data.

A trial is a test and no proof, so programs say of such a function that it is "tested, not proven".
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from ..backend.jaxprs import inner, opened

Arrays = list[np.ndarray[Any, Any]]


def outline(jaxpr: Any) -> list[Any]:
    """The primitives of a jaxpr, in order, with those inside them."""
    return [(eqn.primitive.name, [outline(body) for body in inner(eqn)]) for eqn in opened(jaxpr)[0].eqns]


def differs(
    full: ClosedJaxpr,
    block: ClosedJaxpr,
    ins: Sequence[int | None],
    outs: Sequence[int | None],
    count: int,
    contract: bool,
) -> str:
    """How a function on `count` blocks differs from itself on the whole; "" if it does not, on all random data.

    `ins` and `outs` are the axes along which operands and results are split. With `contract`, the results of the blocks
    are added. Otherwise an element of a result may not depend on operands at other places.

    >>> import jax.numpy as jnp
    >>> def tried(f):
    ...     full, block = (jax.make_jaxpr(f)(jax.ShapeDtypeStruct((n, 3), "float32")) for n in (4, 2))
    ...     return differs(full, block, [0], [0], 2, False)
    >>> tried(lambda x: jnp.cumsum(x, 1)), tried(lambda x: x.reshape(-1, 2, 3)[:, ::-1].reshape(x.shape))
    ('', 'a result depends on other places')
    """
    trial = _Trial(_run(full), _run(block), ins, outs, count, contract, _rounding(full) ** (2 / 3))
    told = False
    for draw in _DRAWS:
        rng = np.random.default_rng(0)
        xs, others = ([draw(rng, aval) for aval in full.in_avals] for _ in range(2))
        ys = trial.whole(xs)
        told = told or any(np.isfinite(y.astype(complex)).mean() > 0.5 for y in ys if y.size)
        if not trial.blocks_give(xs, ys):
            return "the results differ"
        if not contract and any(trial.reads_elsewhere(xs, ys, others, k) for k in (0, 1)):
            return "a result depends on other places"
    return "" if told else "no result is finite, so nothing is tested"


@dataclass(frozen=True)
class _Trial:
    """A function of whole arrays and of blocks, for arguments of `differs`."""

    whole: Callable[[Arrays], Arrays]
    part: Callable[[Arrays], Arrays]
    ins: Sequence[int | None]
    outs: Sequence[int | None]
    count: int
    contract: bool
    tolerance: float

    def blocks_give(self, xs: Arrays, ys: Arrays) -> bool:
        """True if the function on blocks of `xs` has the results `ys`."""
        split = zip(xs, self.ins, strict=True)
        pieces = [[x] * self.count if axis is None else np.split(x, self.count, axis) for x, axis in split]
        parts = [self.part(list(own)) for own in zip(*pieces, strict=True)]
        for y, axis, *own in zip(ys, self.outs, *parts, strict=True):
            joined = [sum(own[1:], own[0])] if self.contract else own if axis is None else [np.concatenate(own, axis)]
            if any(not _close(z, y, self.tolerance) for z in joined):
                return False
        return True

    def reads_elsewhere(self, xs: Arrays, ys: Arrays, others: Arrays, k: int) -> bool:
        """True if results at every second place, from `k`, change when operands change at the places between them."""
        changed = [x.copy() for x in xs]
        for x, other, axis in zip(changed, others, self.ins, strict=True):
            if axis is not None:
                x[_every_second(axis, 1 - k)] = other[_every_second(axis, 1 - k)]
        return not all(
            _close(y[_every_second(axis, k)], z[_every_second(axis, k)], self.tolerance)
            for y, z, axis in zip(ys, self.whole(changed), self.outs, strict=True)
        )


def _every_second(axis: int | None, first: int) -> tuple[slice, ...]:
    return () if axis is None else (slice(None),) * axis + (slice(first, None, 2),)


def _run(jaxpr: ClosedJaxpr) -> Callable[[Arrays], Arrays]:
    """The jaxpr compiled for a CPU; its arguments are arrays, also where the caller is traced."""
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was started without CPUs
        device = None
    with jax.default_device(device):
        # narrow floats round where the function says so, and not only where XLA would
        options: dict[str, bool | str] = {"xla_allow_excess_precision": False}
        run = jax.jit(jaxpr_as_fun(_interpreted(jaxpr))).lower(*structs).compile(options)
    return lambda xs: list(map(np.asarray, run(*xs)))


def _interpreted(jaxpr: Any) -> Any:
    """The jaxpr with Pallas kernels that run on any device."""
    own, consts = opened(jaxpr)
    if own is not jaxpr:
        return ClosedJaxpr(_interpreted(own), consts)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        params = {key: _inside(value) for key, value in eqn.params.items()}
        if eqn.primitive.name == "pallas_call":
            params = {**eqn.params, "interpret": True}
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _inside(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return _interpreted(value)
    return tuple(map(_inside, value)) if type(value) is tuple else value


def _integers(low: int, high: int) -> Callable[[Any, Any], Any]:
    """Small integers, with ties and zeros."""

    def draw(rng: Any, aval: Any) -> Any:
        floor = 0 if aval.dtype.kind in "ub" else low
        return rng.integers(floor, 2 if aval.dtype.kind == "b" else high, aval.shape).astype(aval.dtype)

    return draw


def _floats(rng: Any, aval: Any) -> Any:
    if aval.dtype.kind in "iub":
        return _integers(-99, 100)(rng, aval)
    x = rng.normal(size=aval.shape)
    return (x + 1j * rng.normal(size=aval.shape) if aval.dtype.kind == "c" else x).astype(aval.dtype)


def _positive(rng: Any, aval: Any) -> Any:
    return (
        _integers(0, 3)(rng, aval) if aval.dtype.kind in "iub" else rng.uniform(0.5, 1.5, aval.shape).astype(aval.dtype)
    )


_DRAWS = (_floats, _integers(-3, 4), _positive)


def _close(x: Any, y: Any, tolerance: float) -> bool:
    """True for equal integers, and for floats that differ by at most `tolerance` of themselves or of the largest."""
    if x.shape != y.shape or x.dtype.kind in "iub":
        return np.array_equal(x, y)
    x, y = x.astype(complex), y.astype(complex)
    largest = np.abs(y[np.isfinite(y)]).max(initial=0)
    return bool(np.allclose(x, y, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def _rounding(jaxpr: Any) -> float:
    """The largest machine epsilon of the float dtypes in a jaxpr."""
    eqns = opened(jaxpr)[0].eqns
    dtypes: set[Any] = {getattr(v.aval, "dtype", None) for eqn in eqns for v in (*eqn.invars, *eqn.outvars)}
    own = [float(jax.numpy.finfo(d).eps) for d in dtypes if jax.numpy.issubdtype(d, jax.numpy.inexact)]
    return max([*own, *(_rounding(body) for eqn in eqns for body in inner(eqn))], default=0.0)
