"""The check of a whole function: its jaxpr at the full sizes beside its jaxpr at the sizes of a block.

A device runs a function on its block of every operand. The result is its block of the whole result if both jaxprs have
the same equations, and no equation combines elements at different places of a split dim. It is a partial sum over a
contracted dim if that dim is only summed, and the sum is used linearly. Both are read from the equations.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..errors import Where, users_line
from ..primitives import CALLS, inner
from .control import CONTROL
from .factors import Axis, Factor, Mixes, Value, dims_of, join, plain, sizes, uniform
from .rules import FIRST, JOINT, PRODUCTS, RULES, Equation

__all__ = ["Problem", "check", "flops"]


class Problem(NamedTuple):
    """Why a function may not run on blocks: the primitive ("" if none), part of a sentence, and the line."""

    primitive: str
    what: str
    where: Where | None = None


class _Refused(Exception):
    def __init__(self, problem: Problem):
        self.problem = problem


# Parameters that follow the sizes, which the rules compare, or that do not change a result.
_FREE = {
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
    """Why a function traced at two sizes may not run on blocks; None if it may.

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
    except _Refused as refused:
        return refused.problem
    except Mixes as mixes:
        return Problem("", str(mixes))
    for number, (names, value) in enumerate(zip(outs, results, strict=True)):
        problem = _wrong_result(names, value, block.out_avals[number].shape, cut, set(contract))
        if problem:
            return Problem("", f"returns {problem}" if len(results) == 1 else f"returns result {number}, {problem}")
    return None


def _operand(name: str, full: int, block: int, cut: Collection[str]) -> Axis:
    return (Factor(name, full, block),) if name in cut and full != block else plain(full, block)


def _wrong_result(
    names: Sequence[str], value: Value, shape: Sequence[int], cut: Collection[str], contract: Collection[str]
) -> str:
    for name, axis in zip(names, value.axes, strict=True):
        kinds = dims_of([axis])
        if kinds and (kinds != [name] or len(axis) != 1):
            return f"{' '.join(kinds)} where out= has {name}"
        if not kinds and name in cut and sizes(axis)[0] != sizes(axis)[1] and any(f.kind == "" for f in axis):
            return f"{name} in other places"
    missing = contract - value.partial
    if missing and not value.zero:
        return f"a value that is no sum over {' '.join(sorted(missing))}"
    return ""


def run(full: Any, block: Any, ins: Sequence[Value], sums: frozenset[str]) -> list[Value]:
    """The axes of a jaxpr's results, for these of its inputs; raises an error for the first equation that mixes."""
    inside = _open(full), _open(block)
    (jaxpr, consts), (other, others) = inside
    env: dict[Any, Value] = {}
    if len(consts) != len(others):
        raise Mixes("has other constants on a block")
    for v, a, b in zip(jaxpr.constvars, consts, others, strict=True):
        env[v] = _constant(a, b)
    env.update(zip(jaxpr.invars, ins, strict=True))
    if len(jaxpr.eqns) != len(other.eqns):
        raise Mixes("does something else on a block: its equations depend on the size")
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
    except (Mixes, ValueError) as error:
        what = str(error) if isinstance(error, Mixes) else "does something else on a block"
        raise _Refused(Problem(a.primitive.name, what, _line(a))) from None
    except _Refused as refused:
        # the line of the outermost call: an inner jaxpr may be cached from an earlier caller
        raise _Refused(refused.problem._replace(where=_line(a) or refused.problem.where)) from None


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _read(env: dict[Any, Value], same: dict[Any, Any], x: Any, y: Any) -> Value:
    if isinstance(x, Literal) and isinstance(y, Literal):
        return _constant(x.val, y.val)
    if isinstance(x, Literal) or isinstance(y, Literal) or same[y] is not x:
        raise Mixes("does something else on a block")
    return env[x]


def _constant(a: Any, b: Any) -> Value:
    """A constant of the function; raises `Mixes` if it depends on the size of a block."""
    shapes = np.shape(a), np.shape(b)
    if not hasattr(a, "shape") or np.ndim(a) == 0 or getattr(a, "dtype", None) is None or a.dtype.kind not in "biufc":
        if not _equal(a, b):
            raise Mixes("reads the size of a block")
        return Value(tuple(plain(*s) for s in zip(*shapes, strict=True)), zero=_is_zero(a))
    a, b = np.asarray(a), np.asarray(b)
    if a.size and b.size and a.ndim == b.ndim and (a == a.flat[0]).all() and (b == a.flat[0]).all():
        return Value(tuple(uniform(*s) for s in zip(*shapes, strict=True)), zero=_is_zero(a.flat[0]))
    if shapes[0] != shapes[1] or not np.array_equal(a, b):
        raise Mixes("reads an array that depends on the size of a block")
    return Value(tuple(plain(*s) for s in zip(*shapes, strict=True)))


def _is_zero(x: Any) -> bool:
    try:
        return bool(np.ndim(x) == 0 and x == 0)
    except TypeError:
        return False


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError):
        return False


def _results(e: Equation, ins: Sequence[Value], sums: frozenset[str]) -> list[Value]:
    name = e.full.primitive.name
    if name != e.block.primitive.name:
        raise Mixes(f"is {e.block.primitive.name} on a block")
    if name in CONTROL:
        return CONTROL[name](e, ins, sums, _WALK)
    bodies, others = inner(e.full), inner(e.block)
    if name in CALLS and bodies:
        return run(_closed(bodies[0]), _closed(others[0]), ins, sums)
    if e.full.effects or (bodies and name not in RULES):
        RULES[""](e, [x.axes for x in ins])
        if e.full.effects:
            raise Mixes("has side effects, once for every block")
    axes = RULES.get(name, RULES[""])(e, [x.axes for x in ins])
    _compare(e)
    partial, zero = _sums(e, name, ins)
    return [_checked(e, k, Value(a, partial, zero)) for k, a in enumerate(axes)]


def _closed(part: tuple[Any, Sequence[Any]]) -> ClosedJaxpr:
    return ClosedJaxpr(part[0], list(part[1]))


def _compare(e: Equation) -> None:
    """Raise `Mixes` if a parameter depends on the size of a block."""
    for key, value in e.full.params.items():
        if key not in _FREE and _simple(value) and not _equal(value, e.block.params.get(key)):
            raise Mixes(f"reads the size of a block: its {key} is {value}, and {e.block.params.get(key)} there,")


def _simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_simple, value))
    return value is None or isinstance(value, bool | int | float | complex | str | np.generic)


def _checked(e: Equation, k: int, value: Value) -> Value:
    """The value of result k; raises `Mixes` if its sizes contradict its axes, or a dim is on two axes or summed."""
    if [sizes(axis) for axis in value.axes] != e.outs(k):
        raise Mixes("gives another shape on a block")
    kinds = dims_of(value.axes)
    twice = [kind for kind in kinds if kinds.count(kind) > 1]
    if twice:
        raise Mixes(f"combines different places along {twice[0]}")
    if value.partial & set(kinds):
        raise Mixes(f"uses the sum over {' '.join(value.partial & set(kinds))} at its own places")
    return value


def _sums(e: Equation, name: str, ins: Sequence[Value]) -> tuple[frozenset[str], bool]:
    """The dims over which the results are partial sums, and whether they are zero."""
    before = [x.partial for x in ins]
    zero = _zero(name, ins)
    used = frozenset().union(*before) if before else frozenset()
    if used:
        dims = " ".join(sorted(used))
        linear = [x for x in ins if not x.zero]
        if name in JOINT:
            linear = linear[1:] if name == "select_n" else linear
            if any(x.partial != used for x in linear) or (name == "select_n" and ins[0].partial):
                raise Mixes(f"adds to a sum over {dims} that is not complete")
        elif name in PRODUCTS:
            if sum(bool(p) for p in before) > 1:
                raise Mixes(f"multiplies two sums over {dims} that are not complete")
        elif name not in FIRST or any(before[1:]) or not _keeps_sums(e, name):
            raise Mixes(f"reads a sum over {dims} that is not complete")
    return used | frozenset(_summed(name, e, ins)), zero


def _keeps_sums(e: Equation, name: str) -> bool:
    """Whether a conversion keeps sums: an integer would be rounded before the sum is complete."""
    return name != "convert_element_type" or np.dtype(e.params["new_dtype"]).kind in "fcV"


def _zero(name: str, ins: Sequence[Value]) -> bool:
    if name in PRODUCTS:
        return any(x.zero for x in ins)
    return name in JOINT | FIRST and bool(ins) and all(x.zero for x in ins)


def _summed(name: str, e: Equation, ins: Sequence[Value]) -> set[str]:
    """The contracted dims that an equation sums over."""
    if name not in ("reduce_sum", "dot_general", "conv_general_dilated") or not e.sums:
        return set()
    before = {kind for x in ins for kind in dims_of(x.axes)}
    after = set(dims_of(axis for axes in RULES[name](e, [x.axes for x in ins]) for axis in axes))
    return (before - after) & e.sums


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


def flops(jaxpr: Any) -> float:
    """Floating-point operations of a jaxpr: products exactly, other equations one per element of their results.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((8, 8))))
    1088.0
    """
    total = 0.0
    for eqn in _open(jaxpr)[0].eqns:
        bodies = [_closed(body) for body in inner(eqn)]
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
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "transpose",
    "slice",
    "copy",
    "copy_p",
    "stop_gradient",
    "get",
    "swap",
}
