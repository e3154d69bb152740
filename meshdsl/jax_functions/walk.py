"""The static check of a function: its jaxpr at the full size of one dim beside its jaxpr at the size of a block.

The check follows the axis that has the places of the dim. On a block, the result is the block of the whole result if
both jaxprs have the same equations, and each passes that axis (`table`). It is a partial sum over a contracted dim if
the dim is only summed, and the sum is used linearly. Dims are checked one after the other, so that a size tells which
axis follows: only one dim has another size on the block.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JAX's jaxprs are only partly typed)

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from ..backend.jaxprs import CALLS, inner, opened
from ..errors import TraceError, Where, users_line
from .table import FIRST, JOINT, PRODUCTS, SUM, TABLE, Equation, equation


class Problem(NamedTuple):
    """The reason why a function may not run on blocks: the primitive ("" if none), part of a sentence, and the line.

    `unknown`: the table does not have the primitive, so the function must be tried.
    """

    primitive: str
    what: str
    where: Where | None = None
    unknown: bool = False


class _RefusedError(Exception):
    def __init__(self, problem: Problem):
        self.problem = problem


def _refuse(what: str, unknown: bool = False) -> _RefusedError:
    return _RefusedError(Problem("", what, unknown=unknown))


class _Value(NamedTuple):
    """What is known of a value. `axis` has the dim's places (None: no axis), each `outer` times, one after the other.

    `whole`: complete on each block; `partial`: to be summed over the blocks; `zero`: both, because it is 0.
    """

    axis: int | None = None
    outer: int = 1
    sum: str = "whole"


# Parameters that follow the sizes, which the walk compares, or that do not change a result.
_FREE = {
    "shape", "new_sizes", "sizes", "limit_indices", "slice_sizes", "fft_lengths", "name", "sharding", "out_sharding",
    "debug_info", "out_avals", "policy",
}  # fmt: skip


def check(
    full: ClosedJaxpr,
    block: ClosedJaxpr,
    ins: Sequence[int | None],
    outs: Sequence[int | None],
    dim: str,
    sizes: tuple[int, int],
    contract: bool = False,
) -> Problem | None:
    """The reason why a function traced at two sizes of a dim may not run on blocks of it; None if it may.

    `ins` and `outs` are the axes that have the dim. With `contract`, results are partial sums over the dim.

    >>> import jax, jax.numpy as jnp
    >>> def traced(f, *sizes):
    ...     return [jax.make_jaxpr(f)(jax.ShapeDtypeStruct((n, 4), "float32")) for n in sizes]
    >>> check(*traced(jax.nn.softmax, 6, 2), [0], [0], "a", (6, 2))
    >>> check(*traced(jnp.sort, 6, 2), [0], [0], "b", (6, 2))
    >>> check(*traced(lambda x: jnp.sort(x, 0), 6, 2), [0], [0], "b", (6, 2))[:2]
    ('sort', 'mixes places along b')
    """
    walk = _Walk(dim, sizes, contract)
    try:
        values = walk.run(full, block, [_Value(axis) for axis in ins])
        for number, (axis, value) in enumerate(zip(outs, values, strict=True)):
            which = "returns" if len(outs) == 1 else f"returns result {number},"
            if value.axis != axis or value.outer != 1:
                raise _refuse(f"{which} {dim} on another axis")
            if contract and value.sum == "whole":
                raise _refuse(f"{which} a value that is no sum over {dim}")
    except _RefusedError as refused:
        return refused.problem
    return None


@dataclass(frozen=True)
class _Walk:
    """The walk over both jaxprs, for one dim with these sizes."""

    dim: str
    sizes: tuple[int, int]
    contract: bool

    def run(self, full: Any, block: Any, ins: Sequence[_Value]) -> list[_Value]:
        """The results of a jaxpr for these inputs; raises an error for the first equation that mixes places."""
        (a, consts), (b, others) = opened(full), opened(block)
        if len(consts) != len(others) or len(a.eqns) != len(b.eqns):
            raise _refuse("does something else on a block: its equations depend on the size")
        env = dict(zip(a.invars, ins, strict=True))
        env.update((v, self.constant(*pair)) for v, *pair in zip(a.constvars, consts, others, strict=True))
        same = dict(zip([*b.constvars, *b.invars], [*a.constvars, *a.invars], strict=True))

        def read(x: Any, y: Any) -> _Value:
            if isinstance(x, Literal) and isinstance(y, Literal):
                return self.constant(x.val, y.val)
            if isinstance(x, Literal) or isinstance(y, Literal) or same[y] is not x:
                raise _refuse("does something else on a block")
            return env[x]

        live = _live(a)
        for x, y in zip(a.eqns, b.eqns, strict=True):
            same.update(zip(y.outvars, x.outvars, strict=False))
            if x.outvars and not x.effects and live.isdisjoint(x.outvars):
                continue
            env.update(zip(x.outvars, self.located(x, y, read), strict=True))
        return [read(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]

    def located(self, x: Any, y: Any, read: Callable[[Any, Any], _Value]) -> list[_Value]:
        """The results of one equation; an error names its primitive and the user's line."""
        try:
            if x.primitive.name != y.primitive.name or len(x.invars) != len(y.invars):
                raise _refuse(f"is {y.primitive.name} on a block")
            return self.results(x, y, list(map(read, x.invars, y.invars)))
        except _RefusedError as refused:
            # the line of the outermost call: an inner jaxpr may be cached from an earlier caller
            problem, line = refused.problem, line_of(x)
            name = problem.primitive or x.primitive.name
            raise _RefusedError(problem._replace(primitive=name, where=line or problem.where)) from None

    def constant(self, a: Any, b: Any) -> _Value:
        """A constant of the function: equal on a block, or one number at all places."""
        x, y = _bits(a), _bits(b)
        number = x.dtype != object and x.size and (x == x.flat[0]).all()
        zero = "zero" if number and x.flat[0] == 0 else "whole"
        if x.shape == y.shape and (x is y or x.tobytes() == y.tobytes()):
            return _Value(sum=zero)
        if not number or x.ndim != y.ndim or not x.ndim or not (y == x.flat[0]).all():
            raise _refuse("reads the size of a block")
        return self.placed(x.shape, y.shape, _Value(), new=True)

    def results(self, a: Any, b: Any, ins: list[_Value]) -> list[_Value]:
        """The results of one equation."""
        name, bodies = a.primitive.name, list(zip(inner(a), inner(b), strict=False))
        _check_params(a, b)
        if name in _CONTROL:
            return _CONTROL[name](self, a, b, ins)
        if name in CALLS and bodies:
            return self.run(*bodies[0], ins)
        if a.effects:
            raise _refuse("has side effects, once for every block")
        if name == "optimization_barrier":  # the only primitive whose results have operands of their own
            return ins
        full, block = equation(a), equation(b)
        tied = any(x.axis is not None or x.sum == "partial" for x in ins) or full.outs != block.outs
        if not tied and name not in TABLE and str(a.params) == str(b.params):
            return [_Value()] * len(a.outvars)
        value = self.passed(name, full, block, ins)
        state = self.sum(name, a, ins, value.sum == "partial")
        new = name == "broadcast_in_dim" or (name == "iota" and full.along("dimension") == block.along("dimension"))
        return [
            self.placed(*shapes, value._replace(sum=state), new=new and value.axis is None)
            for shapes in zip(full.outs, block.outs, strict=True)
        ]

    def passed(self, name: str, full: Equation, block: Equation, ins: Sequence[_Value]) -> _Value:
        """What becomes of the places of the operands."""
        if name in ("reshape", "expand_dims"):
            order = full.params.get("dimensions") or range(len(full.ins[0]))  # a reshape may transpose first
            x = ins[0] if ins[0].axis is None else ins[0]._replace(axis=list(order).index(ins[0].axis))
            return self.reshaped(x, [full.ins[0][i] for i in order], full.outs[0])
        if name not in TABLE:
            raise _refuse("is not known to keep places", unknown=True)
        targets = zip(ins, TABLE[name](full), TABLE[name](block), strict=False)
        moved = {self.moved(x, to[x.axis], other[x.axis]) for x, to, other in targets if x.axis is not None}
        if len(moved) > 1:
            raise _refuse(f"combines different places along {self.dim}")
        value = moved.pop() if moved else _Value()
        return value if value.axis is not None else _Value(sum=value.sum)

    def moved(self, x: _Value, target: int | str, other: int | str) -> _Value:
        """The value after its axis is passed on or summed."""
        if target != other:
            raise _refuse("does something else on a block")
        if target == SUM and self.contract:
            return x._replace(axis=None, sum="partial")
        if isinstance(target, str):
            raise _refuse(f"mixes places along {self.dim}")
        return x._replace(axis=target, sum="whole")

    def reshaped(self, x: _Value, before: Sequence[int], after: Sequence[int]) -> _Value:
        """The value after a reshape: the places keep their distance in memory, and must be inside one new axis."""
        if x.axis is None:
            return x._replace(sum="whole")
        size = self.sizes[0]
        stride = before[x.axis] // (x.outer * size) * math.prod(before[x.axis + 1 :])
        for axis in range(len(after)):
            inside = math.prod(after[axis + 1 :])
            if inside <= stride < inside * after[axis]:
                if stride % inside or after[axis] * inside % (stride * size):
                    break
                return _Value(axis, after[axis] * inside // (stride * size))
        raise _refuse(f"cuts through {self.dim}")

    def placed(self, full: Sequence[int], block: Sequence[int], x: _Value, *, new: bool = False) -> _Value:
        """The value; raises an error if its shapes contradict it. `new`: an axis that follows has one value."""
        follows = [i for i, pair in enumerate(zip(full, block, strict=False)) if pair[0] != pair[1]]
        if len(full) != len(block) or len(follows) > 1:
            raise _refuse("gives another shape on a block")
        if new and follows and full[follows[0]] * self.sizes[1] == block[follows[0]] * self.sizes[0]:
            x = x._replace(axis=follows[0])
        if follows != ([] if x.axis is None else [x.axis]):
            sizes = (
                f"makes an axis of {full[follows[0]]} elements, and of {block[follows[0]]}" if follows else "is equal"
            )
            raise _refuse(f"reads the size of a block: it {sizes} on a block,")
        if x.axis is not None and full[x.axis] * self.sizes[1] != block[x.axis] * self.sizes[0]:
            raise _refuse("gives another shape on a block")
        if x.axis is not None and x.sum == "partial":
            raise _refuse(f"uses the sum over {self.dim} at its own places")
        return x

    def sum(self, name: str, a: Any, ins: Sequence[_Value], summed: bool) -> str:
        """Whether the result of an equation is complete, partial, or zero."""
        if any(x.sum == "partial" for x in ins):
            self.check_partial(name, a, ins)
            return "partial"
        zeros = [x.sum == "zero" for x in ins]
        if (name in PRODUCTS and any(zeros)) or (name in JOINT | FIRST and zeros and all(zeros)):
            return "zero"
        return "partial" if summed else "whole"

    def check_partial(self, name: str, a: Any, ins: Sequence[_Value]) -> None:
        """Raise an error for an equation that reads a partial sum and is not linear in it."""
        partial = [x.sum == "partial" for x in ins]
        if name in JOINT:
            linear = ins[1:] if name == "select_n" else ins
            if any(x.sum == "whole" for x in linear) or (name == "select_n" and partial[0]):
                raise _refuse(f"adds to a sum over {self.dim} that is not complete")
        elif name in PRODUCTS:
            if sum(partial) > 1:
                raise _refuse(f"multiplies two sums over {self.dim} that are not complete")
        elif name not in FIRST or any(partial[1:]) or not _keeps_sums(a):
            raise _refuse(f"reads a sum over {self.dim} that is not complete")

    def joined(self, a: Sequence[_Value], b: Sequence[_Value]) -> list[_Value]:
        """Values that are either of two, such as results of branches."""
        for x, y in zip(a, b, strict=True):
            if (x.axis, x.outer) != (y.axis, y.outer):
                raise _refuse(f"combines different places along {self.dim}")
            if {x.sum, y.sum} == {"whole", "partial"}:
                raise _refuse(f"carries a sum over {self.dim} that is not complete")
        return [x if y.sum == "zero" else y for x, y in zip(a, b, strict=True)]

    def settled(self, carry: list[_Value], step: Callable[[list[_Value]], list[_Value]]) -> list[_Value]:
        """The carry of a loop that its body maps to itself."""
        for _ in range(len(carry) + 1):
            before, carry = carry, self.joined(carry, step(carry))
            if before == carry:
                break
        return carry


def _scan(walk: _Walk, a: Any, b: Any, ins: list[_Value]) -> list[_Value]:
    rank = lambda v: len(v.aval.shape)  # noqa: E731 - short
    full, block = a.params["jaxpr"], b.params["jaxpr"]
    inside = opened(full)[0]  # the ranks tell what is taken or stacked in rows; the parameters changed in JAX 0.12
    rows = len(ins) - sum(map(lambda v, w: rank(v) > rank(w), a.invars, inside.invars))
    carries = sum(map(lambda v, w: rank(v) == rank(w), a.outvars, inside.outvars))
    taken = [x if x.axis is None else x._replace(axis=x.axis - 1) for x in ins[rows:]]

    def body(carry: list[_Value]) -> list[_Value]:
        return walk.run(full, block, [*ins[: rows - carries], *carry, *taken])

    carry = walk.settled(ins[rows - carries : rows], lambda carry: body(carry)[:carries])
    return [*carry, *(y if y.axis is None else y._replace(axis=y.axis + 1) for y in body(carry)[carries:])]


def _while(walk: _Walk, a: Any, b: Any, ins: list[_Value]) -> list[_Value]:
    p, q = a.params, b.params
    test, fixed = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    step = lambda carry: walk.run(p["body_jaxpr"], q["body_jaxpr"], [*ins[test:fixed], *carry])  # noqa: E731 - short
    carry = walk.settled(ins[fixed:], step)
    _decides(walk, walk.run(p["cond_jaxpr"], q["cond_jaxpr"], [*ins[:test], *carry])[0])
    return carry


def _cond(walk: _Walk, a: Any, b: Any, ins: list[_Value]) -> list[_Value]:
    _decides(walk, ins[0])
    if len(inner(a)) != len(inner(b)):
        raise _refuse("has other branches on a block")
    first, *others = (walk.run(*bodies, ins[1:]) for bodies in zip(inner(a), inner(b), strict=True))
    for other in others:
        first = walk.joined(first, other)
    return first


def _decides(walk: _Walk, condition: _Value) -> None:
    if condition.sum == "partial":
        raise _refuse(f"decides by a sum over {walk.dim} that is not complete")


def _linear_solve(walk: _Walk, a: Any, b: Any, ins: list[_Value]) -> list[_Value]:
    counts = a.params["const_lengths"]
    before = counts.matvec + counts.vecmat
    if any(x.sum == "partial" for x in ins):
        raise _refuse(f"solves with a sum over {walk.dim} that is not complete")
    operands = [*ins[before : before + counts.solve], *ins[sum(counts) :]]
    return walk.run(a.params["jaxprs"].solve, b.params["jaxprs"].solve, operands)


def _check_params(a: Any, b: Any) -> None:
    """Raise an error if a parameter of a primitive depends on the block size, so that it differs between a and b."""
    for key, value in a.params.items():
        if key not in _FREE and _simple(value) and not _equal(value, b.params.get(key)):
            raise _refuse(f"reads the size of a block: its {key} is {value}, and {b.params.get(key)} there,")


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _linear_solve}


def _live(jaxpr: Any) -> set[Any]:
    """The variables on which results, effects or equations without results depend."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not eqn.outvars or not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live


def _bits(x: Any) -> Any:
    if isinstance(x, Tracer):
        raise TraceError(
            f"a function closes over an array that a JAX transformation traces: {x.aval.str_short()}\n"
            "  pass it to the function as one of its tensors: md.tensor(array, dims)"
        )
    if jax.numpy.issubdtype(getattr(x, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _equal(a: Any, b: Any) -> bool:
    """True if two parameters are equal; NaN equals NaN."""
    try:
        return bool(a is b or a == b or (a != a and b != b))
    except (TypeError, ValueError):
        return False


def _simple(value: Any) -> bool:
    """True for a parameter that is compared: numbers, text, dtypes, and what they are listed in."""
    if isinstance(value, tuple | list):
        return all(map(_simple, value))
    return value is None or isinstance(value, bool | int | float | complex | str | np.generic | np.dtype | Enum)


def _keeps_sums(a: Any) -> bool:
    """True unless a primitive rounds to integers before the sum is complete, or fills in values that are not zero."""
    inexact, name = a.outvars[0].aval.dtype.kind in "fcV", a.primitive.name
    if name == "gather" and "FILL" in str(a.params["mode"]):
        fill = a.params["fill_value"]
        return inexact if fill is None else bool(fill == 0 or fill != fill)  # NaN stays NaN in a sum
    return inexact or name not in ("convert_element_type", "div")


def line_of(eqn: Any, caller: Where | None = None) -> Where | None:
    """The user's line that made an equation, and its `jax.named_scope`s; else those of the call that it is in."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    where = users_line((frame.file_name, frame.line_num) for frame in frames) or caller
    names = [
        *(caller.scope.split("/") if caller else ()),
        *_TRANSFORM.sub("", str(eqn.source_info.name_stack)).split("/"),
    ]
    own = [name for name, after in itertools.pairwise([*names, ""]) if name not in ("", after)]
    return where and where._replace(scope="/".join(own))


_TRANSFORM = re.compile(r"\w+\(|\)|rematted_computation")  # jvp(block)/attention: the names alone
