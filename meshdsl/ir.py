"""A graph is let-bound equations over named-dim values; every value is defined once, before its uses.

`Graph` is the global view: no mesh, no devices. `lowering.Program` is one device's view of the same equations, with a
sharding on every value and collectives among the operations. Both are these types, share this printer, `dce` and
`cse`, and are never edited: a pass builds a new one.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np

from .dims import Dim, Shape, check_shape, show
from .errors import NOWHERE, InternalError, Where

__all__ = ["Eqn", "Graph", "Labels", "Op", "Type", "Var", "cse", "dce", "format_graph", "operations", "verify", "walk"]


@dataclass(frozen=True)
class Type:
    """What is known of a value before it exists: its dims in storage order and its dtype."""

    shape: Shape
    dtype: np.dtype

    def __post_init__(self):
        object.__setattr__(self, "shape", check_shape(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __repr__(self) -> str:
        return f"{self.dtype.name}{show(self.shape)}"


@dataclass(frozen=True, eq=False)
class Var:
    """A value of a graph; two variables are the same only when they are the same object."""

    shape: Shape
    dtype: np.dtype
    name: str = ""
    sharding: Any = None  # layouts.Sharding in a program, None in a graph

    @property
    def type(self) -> Type:
        """Dims and dtype."""
        return Type(self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"{self.name or 'value'}: {self.type}"


Params = Mapping[str, Any]
Names = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Labels:
    """Which dims of the operands and results of one operation are split together: those with equal labels.

    A dim whose label is None must be whole. A label in `exact` can be split only where every dim that has it divides
    without padding. A label in `fresh` takes the layout's axes whatever the operand brings, where the dims
    that have it are padded alike; one in `mapped` does so when the layout has a rule for it.
    """

    ins: tuple[Names, ...]
    outs: tuple[Names, ...]
    exact: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Op:
    """One record per operation: its type rule, kernel, gradient, cost, and where it departs from the sharding rule.

    The sharding rule: a name in inputs and output passes through; a name that vanishes leaves the output partial
    (`reduce`); a name that appears is born in its layout. The fields below `fuses` are the exceptions.
    """

    name: str
    type: Callable[..., Type | tuple[Type, ...]]  # (*input types, **params); raises ShapeError
    kernel: Callable[..., Any]  # (local: backend.Local, *arrays, **params) on one device's blocks
    vjp: Callable[..., Any] | None = (
        None  # (ct, *ins[, out][, params by name]) -> one ct per input, None for no gradient
    )
    fwd: Callable[..., Any] | None = None  # (*ins, **params) -> (outs, residuals), then vjp(cts, residuals, **params)
    flops: Callable[..., float] | None = (
        None  # (input sizes, output sizes[, shapes, dtypes of inputs], **params) on one
    )
    # device; default: one for each element of the outputs; see `operations`
    fuses: str = ""  # what a compiler makes of it: "view" costs nothing, "map" is computed inside the kernel that reads
    # it, "pick" too and reads no more than it writes, "reduce" computes its operands inside; "" is a kernel of its own
    linear: str = ""  # where a pending sum may pass: "joint" in all inputs together, "each" in any one of them,
    # "first" or "second" in that one only, "branches" in all but the first, "padded" as joint when the fill is zero,
    # "widening" where the result's dtype holds every value of the operand's
    reduce: str = ""  # how dims that vanish combine over devices: sum, max or min
    blocked: Callable[..., tuple[str, ...]] | None = None  # (*input types, **params) -> dims that must be whole
    mask: Any = None  # identity that replaces padding of dims that vanish: a number, or "low"/"high" of the dtype
    moves: Callable[..., Any] | None = None  # (*input types, **params) -> ops.moves.Moves along one dim, or None
    rule: Callable[..., Labels] | None = None  # (*input types, **params) when equal names are not the rule
    control: bool = False  # its params hold graphs; evaluators and partition treat it by name
    effects: bool = False  # never merged with an equal equation

    def __repr__(self) -> str:
        return self.name

    def keywords(self, function: Callable[..., Any], available: Params) -> dict[str, Any]:
        """The part of `available` that a rule asks for by parameter name (all of it when it takes `**`)."""
        names = _parameters(function)
        return dict(available) if names is None else {name: available[name] for name in names if name in available}

    def infer(self, ins: Sequence[Type], params: Params) -> tuple[Type, ...]:
        """Types of the results; raises ShapeError for operands that do not fit."""
        outs = self.type(*ins, **params)
        return (outs,) if isinstance(outs, Type) else tuple(outs)


@lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's parameters; None when it takes any (`**`)."""
    parameters = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(p.name for p in parameters)


@dataclass(frozen=True, eq=False)
class Eqn:
    """`outs = op(*ins, **params)`, with the user's line that asked for it."""

    op: Any  # Op, or a lowering.collectives record
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    params: Params = field(default_factory=dict[str, Any])
    where: Where = NOWHERE
    backward: bool = False  # made by differentiation
    cause: str = ""  # of a collective: why it is there

    def graphs(self) -> Iterator[tuple[str, Graph]]:
        """The graphs held in the parameters (loop bodies, branches)."""
        for key, value in self.params.items():
            if isinstance(value, Graph):
                yield key, value


@dataclass(frozen=True, eq=False)
class Graph:
    """A function as equations. `print(graph)` shows it."""

    ins: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outs: tuple[Var, ...]
    mentions: frozenset[str] = field(default=frozenset(), kw_only=True)  # dims the function used, left out since or not

    def __str__(self) -> str:
        return format_graph(self)

    @property
    def instructions(self) -> int:
        """The number of equations, those of loop bodies and branches included, each counted once; numbers are none.

        How many numbers there are depends on sizes: of two that are equal one is kept.
        """
        return sum(1 for eqn, _ in walk(self) if not _is_number(eqn))

    def replace(self, **changes: Any) -> Any:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)


def _is_number(eqn: Eqn) -> bool:
    return str(eqn.op) == "full" and not eqn.outs[0].shape


def walk(graph: Graph, trips: int = 1) -> Iterator[tuple[Eqn, int]]:
    """Every equation, those of loop bodies and branches included, with how often it runs."""
    for eqn in graph.eqns:
        yield eqn, trips
        inner = trips * eqn.params["trips"] if "trips" in eqn.params else trips
        for _, sub in eqn.graphs():
            yield from walk(sub, inner)


def operations(eqn: Eqn, sizes: Callable[[Var], tuple[int, ...]]) -> float:
    """The floating-point operations of one equation without graphs in it, on operands and results of these sizes."""
    ins, outs = [sizes(v) for v in eqn.ins], [sizes(v) for v in eqn.outs]
    if eqn.op.flops is None:
        return float(sum(math.prod(n) for n in outs))
    given = {**eqn.params, "shapes": [v.shape for v in eqn.ins], "dtypes": [v.dtype for v in eqn.ins]}
    return float(eqn.op.flops(ins, outs, **eqn.op.keywords(eqn.op.flops, given)))


def dce(graph: Graph) -> Any:
    """Dead code elimination: equations whose results nobody uses are left out, inside bodies too."""
    live = set(graph.outs)
    kept: list[Eqn] = []
    for eqn in reversed(graph.eqns):
        if live.isdisjoint(eqn.outs):
            continue
        eqn = _without_unused_rows(eqn, live)
        subs = {key: dce(sub) for key, sub in eqn.graphs()}
        if subs:
            eqn = _without_unused_operands(dataclasses.replace(eqn, params={**eqn.params, **subs}))
        kept.append(eqn)
        live.update(eqn.ins)
    return graph.replace(eqns=tuple(reversed(kept)))


def _without_unused_rows(eqn: Eqn, live: set[Var]) -> Eqn:
    """A loop without the stacked results that nobody uses, and without the carries that only feed themselves."""
    if str(eqn.op) != "scan":
        return eqn
    body, held, n = eqn.params["body"], eqn.params["consts"], eqn.params["carries"]
    used = {i for i, v in enumerate(eqn.outs) if v in live}
    while True:
        read = _reads(body, [body.outs[i] for i in used])
        more = {i for i in range(n) if body.ins[held + i] in read} - used
        if not more:
            break
        used |= more
    gone = set(range(n)) - used
    outs = [i for i in range(len(body.outs)) if i in used]
    ins = [i for i in range(len(body.ins)) if i - held not in gone or not held <= i < held + n]
    body = body.replace(ins=tuple(body.ins[i] for i in ins), outs=tuple(body.outs[i] for i in outs))
    params = {**eqn.params, "body": body, "carries": n - len(gone)}
    return dataclasses.replace(
        eqn, ins=tuple(eqn.ins[i] for i in ins), outs=tuple(eqn.outs[i] for i in outs), params=params
    )


def _reads(graph: Graph, outs: Sequence[Var]) -> set[Var]:
    """Every value that these depend on, themselves included."""
    needed = set(outs)
    for eqn in reversed(graph.eqns):
        if not needed.isdisjoint(eqn.outs):
            needed.update(eqn.ins)
    return needed


def _without_unused_operands(eqn: Eqn) -> Eqn:
    """A loop without the constants and slices that its body does not read; its carry stays whole."""
    if str(eqn.op) != "scan":
        return eqn
    body: Graph = eqn.params["body"]
    consts, n = eqn.params["consts"], eqn.params["carries"]
    read = {v for inner in body.eqns for v in inner.ins} | set(body.outs)
    used = [i for i, v in enumerate(body.ins) if v in read or consts <= i < consts + n]
    body = body.replace(ins=tuple(body.ins[i] for i in used))
    params = {**eqn.params, "body": body, "consts": sum(i < consts for i in used)}
    return dataclasses.replace(eqn, ins=tuple(eqn.ins[i] for i in used), params=params)


def cse(graph: Graph) -> Any:
    """Common subexpressions: equal equations on equal values are computed once."""
    same: dict[Var, Var] = {}
    seen: dict[Any, Eqn] = {}
    kept: list[Eqn] = []
    for eqn in graph.eqns:
        ins = tuple(same.get(v, v) for v in eqn.ins)
        subs = {key: cse(sub) for key, sub in eqn.graphs()}
        eqn = dataclasses.replace(eqn, ins=ins, params={**eqn.params, **subs})
        key = None if subs or getattr(eqn.op, "effects", False) else _key(eqn)
        if key is not None and key in seen:
            same.update(zip(eqn.outs, seen[key].outs, strict=True))
            continue
        if key is not None:
            seen[key] = eqn
        kept.append(eqn)
    return graph.replace(eqns=tuple(kept), outs=tuple(same.get(v, v) for v in graph.outs))


def _key(eqn: Eqn) -> Any:
    params = tuple((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in sorted(eqn.params.items()))
    key = (eqn.op, eqn.ins, params, tuple((v.shape, v.dtype, v.sharding) for v in eqn.outs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def verify(graph: Graph, made_by: str) -> Any:
    """The graph itself; raises `InternalError`, naming the pass, when a law of this module is broken."""
    defined = set(graph.ins)
    if len(defined) != len(graph.ins):
        raise InternalError(f"{made_by}: an input appears twice")
    for eqn in graph.eqns:
        missing = [v for v in eqn.ins if v not in defined]
        if missing:
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} uses {missing[0]} before it is defined")
        if isinstance(eqn.op, Op):
            inferred = eqn.op.infer([v.type for v in eqn.ins], eqn.params)
            if inferred != tuple(v.type for v in eqn.outs):
                raise InternalError(
                    f"{made_by}: {eqn.op} at {eqn.where} declares {[v.type for v in eqn.outs]}, "
                    f"its rule says {inferred}"
                )
        for _, sub in eqn.graphs():
            verify(sub, made_by)
        if not defined.isdisjoint(eqn.outs):
            raise InternalError(f"{made_by}: {eqn.op} at {eqn.where} defines a value twice")
        defined.update(eqn.outs)
    if not defined.issuperset(graph.outs):
        raise InternalError(f"{made_by}: a result is never defined")
    return graph


def format_graph(
    graph: Graph,
    show_type: Callable[[Var], str] = lambda v: repr(v.type),
    title: str = "graph",
    note: Callable[[Eqn], str] = lambda eqn: eqn.cause,
) -> str:
    """The text that `print` shows: one equation a line, type after the colon, the user's line after the hash."""
    lines = list(_lines(graph, {}, show_type, note, ""))
    width = min(max((len(code) for code, _ in lines), default=0), 118)
    names: dict[Var, str] = {}
    for v in graph.ins:
        names[v] = _name(v, names)
    ins = "".join(f"\n  {names[v]}: {show_type(v)}" for v in graph.ins)
    body = "\n".join(f"{code:<{width}}  # {note}".rstrip(" #") if note else code for code, note in lines)
    return f"{title}({ins}\n):\n{body}"


def _lines(
    graph: Graph, names: dict[Var, str], show_type: Callable[[Var], str], note: Callable[[Eqn], str], indent: str
) -> Iterator[tuple[str, str]]:
    for v in graph.ins:
        names[v] = _name(v, names)
    for eqn in graph.eqns:
        if _is_number(eqn):
            names[eqn.outs[0]] = str(eqn.params["value"])  # a number reads best where it is used
            continue
        for v in eqn.outs:
            names[v] = _name(v, names)
        outs = ", ".join(names[v] for v in eqn.outs)
        ins = " ".join(names[v] for v in eqn.ins)
        params = " ".join(f"{k}={_short(v)}" for k, v in eqn.params.items() if _worth_showing(k, v))
        types = ", ".join(show_type(v) for v in eqn.outs)
        beside = f"{eqn.where}{' (backward)' if eqn.backward else ''}  {note(eqn)}".rstrip()
        yield f"{indent}  {outs} = {' '.join(x for x in (str(eqn.op), ins, params) if x)} : {types}", beside
        for key, sub in eqn.graphs():
            inner = dict(names)
            for v in sub.ins:
                inner[v] = _name(v, inner)
            yield f"{indent}    {key}({', '.join(f'{inner[v]}: {show_type(v)}' for v in sub.ins)}):", ""
            yield from _lines(sub, inner, show_type, note, indent + "    ")
    yield f"{indent}  return {', '.join(names[v] for v in graph.outs)}", ""


# parameters that the types beside them already say, or that are tables for the machine
UNSHOWN = {
    *("out", "shape", "dtype", "trips", "starts", "axes", "table", "dims", "dim", "rows", "sides", "result", "label"),
    *("whole", "key", "follows"),
}


def _worth_showing(key: str, value: Any) -> bool:
    return not isinstance(value, Graph) and value is not None and key not in UNSHOWN


def _name(var: Var, names: Mapping[Var, str]) -> str:
    if var in names:
        return names[var]
    return var.name if var.name and var.name not in names.values() else f"%{len(names)}"


def _short(value: Any) -> str:
    if isinstance(value, Dim):
        return repr(value)
    if isinstance(value, np.ndarray):
        sizes: tuple[int, ...] = np.shape(cast(Any, value))
        return f"array{list(sizes)}" if sizes else str(cast(Any, value))
    if callable(value):
        return getattr(value, "__name__", "function")
    items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
    if items and all(isinstance(d, Dim) for d in items):
        return show(cast(Shape, items))
    return str(cast(object, value)).replace(" ", "")
