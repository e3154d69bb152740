"""Formulas of products and exponentials that are operations: softmax, attention, and cross entropy.

A formula of attention stores its scores, one for each query and key, several times for its gradient; `md.attention`
computes them in blocks. A formula of softmax stores the exponentials and their sum; `md.softmax` keeps its result. A
read of one logit in each row of a cross entropy becomes a sum over a mask, of the values whose exponentials are summed:
one kernel and one all-reduce compute both sums, and the gradient has no scatter. Formulas are found in a graph, before
it is differentiated, from the equation that ends them: the product of weights and values, the division, or the read.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ..dims import Dim, names
from ..errors import ShapeError
from ..ir import Call, Eqn, Graph, Scan, Var, dce
from ..ops.attention import attention
from ..ops.contraction import EINSUM
from ..ops.dtypes import CAST, cast
from ..ops.elementwise import ADD, DIVIDE, EQUAL, EXP, MAXIMUM, MULTIPLY, STOP_GRADIENT, SUBTRACT, WHERE, where
from ..ops.indexing import IOTA, TAKE, one_hot
from ..ops.placement import PREFER
from ..ops.reductions import BROADCAST, MAX, SUM, sum
from ..ops.reshape import TRANSPOSE, transpose
from ..ops.softmax import softmax
from ..trace import FULL, Tensor, evaluate, location, trace, tree
from .blockwise import run_on

MOST = 1 << 26  # elements of a mask that is computed to see what it is: of 8,192 positions
LOWEST = -1e9  # what scores that nobody sees are at most
Known = Callable[[], np.ndarray | None]
_SAME = (CAST, TRANSPOSE, PREFER, BROADCAST)  # they move or convert elements


def with_operations(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function `f` of tensors, with operations in the place of formulas.

    >>> import meshdsl as md
    >>> def weights(x):
    ...     e = md.exp(x - md.stop_gradient(md.max(x, "k")))
    ...     return e / md.sum(e, "k")
    >>> md.eval_shape(with_operations(weights), md.spec("n:2 k:8"))
    float32[n=2 k=8]
    """

    @functools.wraps(f)
    def rewritten(*xs: Tensor) -> Any:
        graph, captures, structure = trace(f, [x.type for x in xs])
        return tree.tree_unflatten(structure, evaluate(recognised(graph), [*captures, *xs]))

    return rewritten


def recognised(graph: Graph, outside: Mapping[Var, Known] = MappingProxyType({})) -> Graph:
    """The graph with operations in the place of formulas, also in loops and branches.

    `outside` computes inputs that do not change while a loop runs, if nothing is read for them.
    """
    search = _Search(graph, outside)
    graph = graph.replace(eqns=tuple(map(search.inside, graph.eqns)))
    if not any(eqn.op is EXP for eqn in graph.eqns):
        return graph
    eqns = [new for eqn in graph.eqns for new in search.instead_of(eqn)]
    return dce(graph.replace(eqns=tuple(eqns)))


@dataclass
class _Scores:
    """Scores as a product, and what was done to it: `scale`, and masks and biases, outermost first."""

    product: Eqn
    scale: float
    masks: Sequence[Var]
    biases: Sequence[Var]


@dataclass(frozen=True)
class _Seen:
    """The mask of an attention: options of `md.attention`, or a tensor; `rows` are the positions of queries."""

    rows: Dim | None
    keep: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _in_order(order: Sequence[Dim], v: Var, values: Any) -> np.ndarray:
    """The values with an axis for each of these dims, of one element where they lack it."""
    moved = np.transpose(values, [v.dims.index(d) for d in order if d in v.dims])
    return moved.reshape([d.size if d in v.dims else 1 for d in order])


def _before(mask: np.ndarray) -> dict[str, Any] | None:
    """The options for a mask of the positions before each query; None for another mask."""
    n, widest = len(mask), int(mask.sum(-1).max())
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    if np.array_equal(mask, distance >= 0):
        return {"causal": True}
    return {"causal": True, "window": widest} if np.array_equal(mask, (distance >= 0) & (distance < widest)) else None


class _Search:
    """The formulas of one graph."""

    def __init__(self, graph: Graph, outside: Mapping[Var, Known]) -> None:
        self.outside = outside
        self.maker, self.place = graph.producers, graph.places
        self.uses = Counter([v for eqn in graph.eqns for v in eqn.ins] + list(graph.outs))
        self.powers = {  # (logits, dim): the exponents of the sum of their exponentials
            (self.through(logits), d): exponents
            for eqn in graph.eqns
            if eqn.op is SUM and (power := self.made(self.through(eqn.ins[0]), EXP)) is not None
            for exponents in [self.through(power.ins[0])]
            for d in eqn.params["over"]
            for logits in (exponents, self.shifts(exponents, d)[0])
        }

    def inside(self, eqn: Eqn) -> Eqn:
        """An equation whose graphs have operations in the place of formulas."""
        match eqn.control:
            case Scan(body=body, consts=n):
                same = zip(body.ins[:n], eqn.ins, strict=False)
            case Call(graph=graph):
                same = zip(graph.ins, eqn.ins, strict=True)
            case _:
                same = ()
        known = {v: functools.partial(self.known, w) for v, w in same}
        return eqn.map_graphs(lambda body: recognised(body, known))

    def instead_of(self, eqn: Eqn) -> Sequence[Eqn]:
        """The equations in the place of one that ends a formula; else the equation itself."""
        if eqn.op is EINSUM and len(eqn.ins) == 2:
            return self.attention(eqn) or (eqn,)
        if eqn.op is DIVIDE and (found := self.softmax(eqn)) is not None:
            x, over = found
            return _inlined(eqn, [x], lambda x: softmax(x, over))
        if eqn.op is TAKE:
            x, i = eqn.ins
            return self.target_logits(eqn, x, i, eqn.params["over"]) or (eqn,)
        if eqn.op is SUM and (product := self.made(eqn.ins[0], MULTIPLY)) is not None:
            for x, mask in (product.ins, product.ins[::-1]):
                found = self.one_hot(mask)
                if found is not None and found[1] in eqn.params["over"]:
                    return self.target_logits(eqn, x, *found) or (eqn,)
        return (eqn,)

    def made(self, v: Var, *ops: Any) -> Eqn | None:
        """The equation that makes a value, if it is one of these operations."""
        eqn = self.maker.get(v)
        return eqn if eqn is not None and eqn.op in ops else None

    def through(self, v: Var, *ops: Any) -> Var:
        """The value before operations that move or convert its elements."""
        while (eqn := self.made(v, *(ops or _SAME))) is not None:
            v = eqn.ins[0]
        return v

    def number(self, v: Var) -> float | None:
        eqn = self.made(self.through(v, BROADCAST), FULL)
        return float(eqn.params["value"]) if eqn is not None else None

    def softmax(self, eqn: Eqn) -> tuple[Var, tuple[Dim, ...]] | None:
        """The operand and the dims of a softmax that ends in this division."""
        exponential, total = self.made(eqn.ins[0], EXP), self.made(self.through(eqn.ins[1], BROADCAST), SUM)
        if exponential is None or total is None or total.ins[0] is not eqn.ins[0]:
            return None
        below = self.made(exponential.ins[0], SUBTRACT)
        if below is None or not self.is_maximum(below.ins[1], below.ins[0], total.params["over"]):
            return None
        return below.ins[0], tuple(total.params["over"])

    def is_maximum(self, v: Var, of: Var, over: Sequence[Dim]) -> bool:
        """True for the maximum of a value over these dims, which takes no part in the gradient."""
        stopped = self.made(self.through(v, BROADCAST), STOP_GRADIENT)
        if stopped is None:
            return False
        v = self.through(stopped.ins[0], BROADCAST)
        if (either := self.made(v, MAXIMUM)) is not None:  # JAX's start of a maximum
            least = [self.number(x) == -math.inf for x in either.ins]
            v = either.ins[1 - least.index(True)] if True in least else v
        largest = self.made(v, MAX)
        return largest is not None and largest.ins[0] is of and set(largest.params["over"]) == set(over)

    def one_hot(self, v: Var) -> tuple[Var, Dim] | None:
        """The index and the dim of one-hot vectors; None for another value."""
        same = self.made(self.through(v), EQUAL)
        sides = list(map(self.through, same.ins)) if same is not None else []
        for i, places in (sides, sides[::-1]) if sides else ():
            if self.made(places, IOTA) is not None and places.dims[0] not in i.dims and i.dtype.kind in "iu":
                return i, places.dims[0]
        return None

    def shifts(self, v: Var, over: Dim) -> tuple[Var, list[Var]]:
        """The value before subtractions of others that are equal along a dim, and these others, first to last."""
        shifts = list[Var]()
        while (eqn := self.made(self.through(v, PREFER, TRANSPOSE), SUBTRACT)) is not None:
            shift = self.through(eqn.ins[1], BROADCAST)
            if over in shift.dims or set(eqn.ins[0].dims) != set(v.dims):
                break
            v, shifts = eqn.ins[0], [shift, *shifts]
        return self.through(v, PREFER, TRANSPOSE), shifts

    def exponents(self, x: Var, over: Dim, before: Eqn) -> tuple[Var, list[Var], list[Var]] | None:
        """The value to read instead of logits or their log-softmax x, and what to add and to subtract then.

        Of a cross entropy with exponents z - m, logits z are (z - m) + m, and z - m - log(sum) is (z - m) - log(sum).
        None for a value of which no exponentials are summed.
        """
        logits, minus = self.shifts(x, over)
        found = self.powers.get((self.through(logits), over))
        if found is None:
            return None
        start, plus = self.shifts(found, over)
        made = self.maker.get(found)
        later = made is not None and self.place[made] > self.place[before]
        if start is not logits or later or plus == minus:  # a cast is between them, or they are computed later
            return x, [], []
        while plus and minus and plus[0] is minus[0]:
            plus, minus = plus[1:], minus[1:]
        return found, plus[::-1], minus

    def target_logits(self, eqn: Eqn, x: Var, i: Var, over: Dim) -> Sequence[Eqn] | None:
        """The equations of a read of one element in each row of logits or their log-softmax, or of its sum.

        An index out of range reads 0.
        """
        while (wider := self.made(x, CAST)) is not None and wider.ins[0].dtype.itemsize <= x.dtype.itemsize:
            (x,) = wider.ins
        found = self.exponents(x, over, eqn) if {*i.dims, over} == set(x.dims) else None
        if found is None or (eqn.op is SUM and found[1]):
            return None  # one-hot products of logits have no scatter as they are
        exponents, plus, minus = found

        def read(x: Tensor, i: Tensor, *shifts: Tensor) -> Tensor:
            y = sum(where(one_hot(i, over, bool), x, 0), over)
            for k, shift in enumerate(shifts):
                y = y + shift if k < len(plus) else y - shift
            y = where((i >= 0) & (i < over.size), y, 0) if shifts else y
            rest = [d for d in y.dims if d not in eqn.outs[0].dims]
            return sum(cast(y, eqn.outs[0].dtype), rest) if rest else y

        return _inlined(eqn, [exponents, i, *plus, *minus], read)

    def attention(self, eqn: Eqn) -> Sequence[Eqn] | None:
        """Attention in the place of the product of its weights and values."""
        for weights, values in (eqn.ins, eqn.ins[::-1]):
            divided = self.made(self.through(weights), DIVIDE)
            found = self.softmax(divided) if divided is not None else None
            if divided is None or found is None or len(found[1]) != 1:
                continue
            if self.uses[divided.outs[0]] != 1 or self.uses[weights] != 1:
                continue  # something else reads the weights
            (memory,) = found[1]
            scores = self.scores(found[0])
            if scores is None or memory in eqn.outs[0].dims or memory not in values.dims:
                continue
            if (made := self.of_roles(eqn, scores, values, memory)) is not None:
                return made
        return None

    def scores(self, v: Var) -> _Scores | None:
        """The product behind scores; None for anything else that was done to it."""
        scale, masks, biases = 1.0, list[Var](), list[Var]()
        while (eqn := self.maker.get(v)) is not None:
            if eqn.op is EINSUM:
                return _Scores(eqn, scale, masks, biases) if len(eqn.ins) == 2 else None
            if eqn.op is WHERE and (self.number(eqn.ins[2]) or 0) <= LOWEST:
                masks.append(eqn.ins[0])
                v = eqn.ins[1]
            elif (factor := self.factor(eqn)) > 0 and scale == 1.0:
                scale, v = factor, eqn.ins[0]
            elif eqn.op is ADD and scale == 1.0:
                bias = 1 if len(eqn.ins[0].dims) == len(eqn.outs[0].dims) and self.leads(eqn.ins[0]) else 0
                biases.append(eqn.ins[bias])
                v = eqn.ins[1 - bias]
            elif eqn.op in _SAME:
                v = eqn.ins[0]
            else:
                return None
        return None

    def factor(self, eqn: Eqn) -> float:
        """The number by which an equation multiplies its first operand; 0 if it does something else."""
        by = self.number(eqn.ins[1]) if eqn.op in (MULTIPLY, DIVIDE) else None
        return 0.0 if not by else by if eqn.op is MULTIPLY else 1 / by

    def leads(self, v: Var) -> bool:
        """True if a product is behind a value."""
        eqn = self.maker.get(v)
        while eqn is not None and eqn.op in (*_SAME, WHERE, MULTIPLY, DIVIDE, ADD):
            v = eqn.ins[1 if eqn.op is WHERE else 0]
            eqn = self.maker.get(v)
        return eqn is not None and eqn.op is EINSUM

    def of_roles(self, eqn: Eqn, scores: _Scores, values: Var, memory: Dim) -> Sequence[Eqn] | None:
        """The equations of `md.attention`, if the dims of a formula have its roles."""
        a, b = scores.product.ins
        queries, keys = (a, b) if memory in b.dims else (b, a)
        summed = {*a.dims, *b.dims} - set(scores.product.outs[0].dims)
        if (memory in a.dims) == (memory in b.dims) or len(summed) != 1 or len(scores.biases) > 1:
            return None
        seen = self.seen(scores.masks, memory) if scores.masks else _Seen(None)
        own = [d for d in queries.dims if d not in keys.dims]
        if seen is None or seen.rows not in (None, *own):
            return None
        length = seen.rows or next((d for d in own if d.size == memory.size and not scores.masks), "no_positions")
        options = {"over": summed.pop(), "memory": memory, "length": length, "scale": scores.scale, **seen.options}
        extras = {"mask": scores.masks[0]} if seen.keep else {}
        extras |= dict(zip(("bias",), scores.biases, strict=False))

        def operation(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            given: dict[str, Any] = {**options, **dict(zip(extras, more, strict=True))}
            return attention(q, k, v, **given)

        try:
            return _inlined(eqn, [queries, keys, values, *extras.values()], operation)
        except (ShapeError, ValueError):
            return None  # the dims or dtypes have other roles

    def seen(self, masks: Sequence[Var], memory: Dim) -> _Seen | None:
        """The keys that each query sees, from masks that are constants; None if a mask depends on data.

        A row that sees nothing is an average in a formula, and zeros in `md.attention`: such masks are left alone.
        """
        dims = {d for v in masks for d in v.dims}
        rows = [d for d in dims if d != memory]
        if memory not in dims or len(rows) > 1 or math.prod(d.size for d in dims) > MOST:
            return None
        every = self.joint(masks, (*rows, memory))
        if every is None or not every.any(-1).all():
            return None
        row = rows[0] if rows else None
        before = _before(every) if row is not None and row.size == memory.size else None
        if before is None and len(masks) > 1:
            return None
        return _Seen(row, keep=before is None, options=before or {})

    def joint(self, masks: Sequence[Var], order: Sequence[Dim]) -> np.ndarray | None:
        """The conjunction of constant masks, with these axes; None if a mask depends on data."""
        values = [self.known(v) for v in masks]
        if any(x is None for x in values):
            return None
        return functools.reduce(np.logical_and, map(functools.partial(_in_order, order), masks, values))

    def known(self, v: Var) -> np.ndarray | None:
        """The values of something that no input is read for."""
        needed, given, queue = dict[Var, Eqn](), dict[Var, Any](), [v]
        while queue:
            at = queue.pop()
            eqn = self.maker.get(at)
            if math.prod(d.size for d in at.dims) > MOST:
                return None
            if at in self.outside:
                given[at] = self.outside[at]()
                if given[at] is None:
                    return None
            elif eqn is None or eqn.control is not None or len(eqn.outs) != 1:
                return None
            elif at not in needed:
                needed[at] = eqn
                queue += eqn.ins
        order = [eqn for eqn in self.maker.values() if eqn.outs[0] in needed]
        graph = Graph(tuple(given), tuple(order), (v,))
        return np.asarray(run_on(np, graph, list(given.values()))[0])


def _inlined(eqn: Eqn, ins: Sequence[Var], f: Callable[..., Tensor]) -> list[Eqn]:
    """The equations of f on some values, with the result of an equation."""
    (out,) = eqn.outs

    def like(*xs: Tensor) -> Tensor:
        with location(eqn.where, eqn.backward or None):
            y = f(*xs)
            return transpose(cast(y, out.dtype), names(out.dims))

    graph, _, _ = trace(like, [v.type for v in ins], closed=True)
    renamed: dict[Var, Var] = dict(zip(graph.ins, ins, strict=True))
    renamed[graph.outs[0]] = out
    return [each.replace(ins=_renamed(each.ins, renamed), outs=_renamed(each.outs, renamed)) for each in graph.eqns]


def _renamed(values: Iterable[Var], renamed: dict[Var, Var]) -> tuple[Var, ...]:
    return tuple(renamed.get(v, v) for v in values)
