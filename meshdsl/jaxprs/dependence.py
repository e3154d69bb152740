"""The check of a whole function: its jaxpr at the full sizes beside its jaxpr at the sizes of a block.

A device runs a function on its block of every operand. The result is its block of the whole result if both jaxprs have
the same equations, and no equation combines elements at different places of a split dim. It is a partial sum over a
contracted dim if that dim is only summed, and the sum is used linearly. Both are read from the equations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..errors import Where, users_line
from .control import CONTROL
from .factors import Axis, Factor, MixesError, Value, dims_of, plain, sizes, uniform
from .primitives import CALLS, inner
from .rules import RULES, Equation
from .sums import sums_of

__all__ = ["FREE", "Problem", "check", "same_values", "simple"]


class Problem(NamedTuple):
    """The reason why a function may not run on blocks: the primitive ("" if none), part of a sentence, and the line."""

    primitive: str
    what: str
    where: Where | None = None


class _RefusedError(Exception):
    def __init__(self, problem: Problem):
        self.problem = problem


# Parameters that follow the sizes, which the rules compare, or that do not change a result.
FREE = {
    "shape", "new_sizes", "sizes", "limit_indices", "slice_sizes", "fft_lengths", "name", "sharding", "out_sharding",
    "debug_info", "out_avals", "policy",
}  # fmt: skip


def check(
    full: ClosedJaxpr,
    block: ClosedJaxpr,
    ins: Sequence[Sequence[str]],
    outs: Sequence[Sequence[str]],
    split: Collection[str],
    contract: Collection[str],
) -> Problem | None:
    """The reason why a function traced at two sizes may not run on blocks; None if it may.

    `ins` and `outs` name the axes of operands and results. Blocks are split along the dims in `split`, which results
    keep, and along those in `contract`, over which results are partial sums.

    >>> import jax, jax.numpy as jnp
    >>> def traced(f, *sizes):
    ...     return [jax.make_jaxpr(f)(jax.ShapeDtypeStruct((n, 4), "float32")) for n in sizes]
    >>> check(*traced(jax.nn.softmax, 6, 2), ["ab"], ["ab"], "a", "")
    >>> check(*traced(jnp.sort, 6, 2), ["ba"], ["ba"], "b", "")
    >>> check(*traced(lambda x: jnp.sort(x, 0), 6, 2), ["ba"], ["ba"], "b", "")
    Problem(primitive='sort', what='mixes places along b', where=None)
    """
    cut = {*split, *contract}
    pairs = zip(ins, full.in_avals, block.in_avals, strict=True)
    try:
        values = [
            Value(tuple(_operand(d, a, b, cut) for d, a, b in zip(names, x.shape, y.shape, strict=True)))
            for names, x, y in pairs
        ]
        results = run(full, block, values, frozenset(contract))
    except _RefusedError as refused:
        return refused.problem
    except MixesError as mixes:
        return Problem("", str(mixes))
    for number, (names, value) in enumerate(zip(outs, results, strict=True)):
        problem = _wrong_result(names, value, block.out_avals[number].shape, cut, set(contract))
        if problem:
            return Problem("", f"returns {problem}" if len(results) == 1 else f"returns result {number}, {problem}")
    return None


def _operand(name: str, full: int, block: int, cut: Collection[str]) -> Axis:
    return (Factor(name, full, block),) if name in cut else plain(full, block)


def _wrong_result(
    names: Sequence[str], value: Value, shape: Sequence[int], cut: Collection[str], contract: Collection[str]
) -> str:
    for name, axis in zip(names, value.axes, strict=True):
        kinds = dims_of([axis])
        if kinds and (kinds != [name] or len(axis) != 1):
            return f"{' '.join(kinds)} where out= has {name}"
        if not kinds and name in cut and sizes(axis)[0] != sizes(axis)[1] and any(f.kind == "" for f in axis):
            return f"{name} in other places"
    missing = set(contract) - value.partial
    if missing and not value.zero:
        return f"a value that is no sum over {' '.join(sorted(missing))}"
    return ""


def run(full: Any, block: Any, ins: Sequence[Value], sums: frozenset[str]) -> list[Value]:
    """The axes of a jaxpr's results, for these of its inputs; raises an error for the first equation that mixes."""
    inside = _open(full), _open(block)
    (jaxpr, consts), (other, others) = inside
    env: dict[Any, Value] = {}
    if len(consts) != len(others):
        raise MixesError("has other constants on a block")
    for v, a, b in zip(jaxpr.constvars, consts, others, strict=True):
        env[v] = _constant(a, b)
    env.update(zip(jaxpr.invars, ins, strict=True))
    if len(jaxpr.eqns) != len(other.eqns):
        raise MixesError("does something else on a block: its equations depend on the size")
    same = dict(zip([*other.constvars, *other.invars], [*jaxpr.constvars, *jaxpr.invars], strict=True))
    live = _live(jaxpr)
    for a, b in zip(jaxpr.eqns, other.eqns, strict=True):
        same.update(zip(b.outvars, a.outvars, strict=True))
        if a.outvars and not a.effects and live.isdisjoint(a.outvars):
            continue
        env.update(zip(a.outvars, _equation(env, same, a, b, sums), strict=True))
    return [_read(env, same, x, y) for x, y in zip(jaxpr.outvars, other.outvars, strict=True)]


def _live(jaxpr: Any) -> set[Any]:
    """The variables on which results or effects depend."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live


def _equation(env: dict[Any, Value], same: dict[Any, Any], a: Any, b: Any, sums: frozenset[str]) -> list[Value]:
    """The results of one equation; raises an error with its line if it mixes places."""
    try:
        values = [_read(env, same, x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        return _results(Equation(a, b, sums), values, sums)
    except (MixesError, ValueError) as error:
        what = str(error) if isinstance(error, MixesError) else "does something else on a block"
        raise _RefusedError(Problem(a.primitive.name, what, _line(a))) from None
    except _RefusedError as refused:
        # the line of the outermost call: an inner jaxpr may be cached from an earlier caller
        raise _RefusedError(refused.problem._replace(where=_line(a) or refused.problem.where)) from None


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _read(env: dict[Any, Value], same: dict[Any, Any], x: Any, y: Any) -> Value:
    if isinstance(x, Literal) and isinstance(y, Literal):
        return _constant(x.val, y.val)
    if isinstance(x, Literal) or isinstance(y, Literal) or same[y] is not x:
        raise MixesError("does something else on a block")
    return env[x]


def _constant(a: Any, b: Any) -> Value:
    """A constant of the function; raises `MixesError` if it depends on the size of a block."""
    shapes = np.shape(a), np.shape(b)
    if not hasattr(a, "shape") or np.ndim(a) == 0 or getattr(a, "dtype", None) is None or a.dtype.kind not in "biufcV":
        if not same_values(a, b):
            raise MixesError("reads the size of a block")
        return Value(tuple(plain(*s) for s in zip(*shapes, strict=True)), zero=_is_zero(a))
    a, b = np.asarray(a), np.asarray(b)
    if a.size and b.size and a.ndim == b.ndim and (a == a.flat[0]).all() and (b == a.flat[0]).all():
        return Value(tuple(uniform(*s) for s in zip(*shapes, strict=True)), zero=_is_zero(a.flat[0]))
    if shapes[0] != shapes[1] or not np.array_equal(a, b):
        raise MixesError("reads an array that depends on the size of a block")
    return Value(tuple(plain(*s) for s in zip(*shapes, strict=True)))


def _is_zero(x: Any) -> bool:
    try:
        return bool(np.ndim(x) == 0 and x == 0)
    except TypeError:
        return False


def same_values(a: Any, b: Any) -> bool:
    """True if two parameters or constants are equal; NaN equals NaN."""
    if a is b:
        return True
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError):
        return False


def _results(e: Equation, ins: Sequence[Value], sums: frozenset[str]) -> list[Value]:
    name = e.full.primitive.name
    if name != e.block.primitive.name:
        raise MixesError(f"is {e.block.primitive.name} on a block")
    if name in CONTROL:
        return CONTROL[name](e, ins, sums, _WALK)
    bodies, others = inner(e.full), inner(e.block)
    if name in CALLS and bodies:
        return run(_closed(bodies[0]), _closed(others[0]), ins, sums)
    if e.full.effects or (bodies and name not in RULES):
        RULES[""](e, [x.axes for x in ins])
        if e.full.effects:
            raise MixesError("has side effects, once for every block")
    axes = RULES.get(name, RULES[""])(e, [x.axes for x in ins])
    _compare(e)
    sums_of_results = sums_of(e, name, ins)
    return [_checked(e, k, Value(a, *sums_of_results(k))) for k, a in enumerate(axes)]


def _closed(part: tuple[Any, Sequence[Any]]) -> ClosedJaxpr:
    return ClosedJaxpr(part[0], list(part[1]))


def _compare(e: Equation) -> None:
    """Raise `MixesError` if a parameter depends on the size of a block."""
    for key, value in e.full.params.items():
        if key not in FREE and simple(value) and not same_values(value, e.block.params.get(key)):
            raise MixesError(f"reads the size of a block: its {key} is {value}, and {e.block.params.get(key)} there,")


def simple(value: Any) -> bool:
    """True for a parameter that is compared: numbers, text, dtypes, and what they are listed in."""
    if isinstance(value, tuple | list):
        return all(map(simple, value))
    return value is None or isinstance(value, bool | int | float | complex | str | np.generic | np.dtype | Enum)


def _checked(e: Equation, k: int, value: Value) -> Value:
    """The value of result k; raises `MixesError` if its sizes contradict its axes, or a dim has two axes or a sum."""
    if [sizes(axis) for axis in value.axes] != e.outs(k):
        raise MixesError("gives another shape on a block")
    kinds = dims_of(value.axes)
    twice = [kind for kind in kinds if kinds.count(kind) > 1]
    if twice:
        raise MixesError(f"combines different places along {twice[0]}")
    if value.partial & set(kinds):
        raise MixesError(f"uses the sum over {' '.join(value.partial & set(kinds))} at its own places")
    return value


def _line(eqn: Any) -> Where | None:
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return users_line((frame.file_name, frame.line_num) for frame in frames)


class _Walk:
    """The walk over a jaxpr, for primitives with bodies: whole, by equation, and by operand."""

    __call__ = staticmethod(run)
    equation = staticmethod(_equation)
    read = staticmethod(_read)


_WALK = _Walk()
