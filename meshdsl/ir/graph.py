"""A graph is a list of equations over values with named dims; each value is defined once, before its uses.

`Graph` is the global view, without mesh or devices. `lowering.Program` is one device's view of the same equations:
every value has a sharding, and some equations are collectives. Both use these types, this printer, `dce` and `cse`.
Both are immutable: a pass builds a new one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, TypeVar, cast

import numpy as np

from ..dims import Dim, Shape, show
from ..errors import NOWHERE, InternalError, Where
from ..errors.markup import page_part
from ..layouts import Sharding
from .cause import NO_CAUSE, Cause
from .collective import BlockEffect, Collective, Start
from .op import Fuses, Op, Params, Type

T = TypeVar("T")
G = TypeVar("G", bound="Graph")
REPLICATED = Sharding()
SHORT = 30  # notebooks show a graph of at most so many equations opened


@dataclass(frozen=True, eq=False, slots=True)
class Var:
    """A value of a graph. Variables are compared by identity."""

    dims: Shape
    dtype: np.dtype[Any]
    name: str = ""
    sharding: Sharding = REPLICATED  # set in a program; a graph's values keep the default
    _type: Type | None = field(default=None, init=False, repr=False)

    @property
    def type(self) -> Type:
        """Dims and dtype."""
        if self._type is None:
            object.__setattr__(self, "_type", Type(self.dims, self.dtype))
        return cast(Type, self._type)

    def __repr__(self) -> str:
        return f"{self.name or 'value'}: {self.type}"


@dataclass(frozen=True, eq=False)
class Scan:
    """A loop over the slices of stacks along `dim`.

    The body takes constants, carries and rows, and returns carries and rows. The equation takes constants, first
    carries and stacks, and returns last carries and stacks.
    """

    body: Graph
    consts: int
    carries: int
    dim: Dim
    reverse: bool = False

    @property
    def trips(self) -> int:
        """The number of times that the body runs."""
        return self.dim.size

    def inputs(self, xs: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Split operands into constants, carries and stacks, or body inputs into constants, carries and rows."""
        first = self.consts + self.carries
        return xs[: self.consts], xs[self.consts : first], xs[first:]

    def results(self, ys: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Split results of the equation into carries and stacks, or results of the body into carries and rows."""
        return ys[: self.carries], ys[self.carries :]


@dataclass(frozen=True, eq=False)
class While:
    """A loop that runs while `test` holds. Both graphs take constants and carries; the body returns carries."""

    test: Graph
    body: Graph
    consts: int

    def inputs(self, xs: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Split operands, or inputs of one of the graphs, into constants and carries."""
        return xs[: self.consts], xs[self.consts :]


@dataclass(frozen=True, eq=False)
class Cond:
    """A branch. The equation's first operand, the predicate, selects a graph; both graphs take all other operands."""

    yes: Graph
    no: Graph
    frequency: float | None = None  # the fraction of runs in which the predicate is true, if it is known


@dataclass(frozen=True, eq=False)
class Call:
    """A graph with a custom gradient, or one that is recomputed for its gradient; `simplify` inlines it."""

    graph: Graph


Control = Scan | While | Cond | Call


def graphs_of(control: Control) -> dict[str, Graph]:
    """The graphs of a loop, branch or call, by field name."""
    match control:
        case Scan():
            return {"body": control.body}
        case While():
            return {"test": control.test, "body": control.body}
        case Cond():
            return {"yes": control.yes, "no": control.no}
        case Call():
            return {"graph": control.graph}


OF_TYPES = ("typed", "labels")  # what passes learn about an equation that depends on its parameters and types alone
_FIELDS = ("op", "ins", "outs", "params", "where", "backward", "cause")  # of an equation


@dataclass(frozen=True, eq=False, init=False)
class Eqn:
    """`outs = op(*ins, **params)`, with the user's source line.

    `op` is a record from `ops`; in a program it may be a collective, or the start of one. Loops, branches and calls
    store their graphs in the parameter `control`.
    """

    op: Op | Collective | Start
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    params: Params
    where: Where
    backward: bool  # created by differentiation
    cause: Cause  # set on collectives, and where an `md.shard` decided
    control: Control | None = field(init=False, repr=False)  # the loop, branch or call, if the equation is one

    def __init__(
        self,
        op: Op | Collective | Start,
        ins: tuple[Var, ...],
        outs: tuple[Var, ...],
        params: Params | None = None,
        where: Where = NOWHERE,
        backward: bool = False,
        cause: Cause = NO_CAUSE,
    ):
        # half the time of the `__init__` of a frozen dataclass: a search creates hundreds of thousands of equations
        params = {} if params is None else params
        control = params.get("control")
        self.__dict__.update(
            op=op, ins=ins, outs=outs, params=params, where=where, backward=backward, cause=cause, control=control
        )

    @property
    def collective(self) -> Collective | None:
        """The collective that an equation runs or starts; None if the equation is an operation."""
        if isinstance(self.op, Start):
            return self.op.collective
        return None if isinstance(self.op, Op) else self.op

    @property
    def effect(self) -> BlockEffect:
        """How the equation's collective changes blocks; of an operation, an effect without dims."""
        collective = self.collective
        return BlockEffect() if collective is None else collective.effect

    @property
    def sends(self) -> bool:
        """True if the equation is a collective that sends data."""
        return not isinstance(self.op, Op) and self.op.sends

    @property
    def operation(self) -> Op:
        """The operation's record. Raises `InternalError` if the equation is a collective."""
        if isinstance(self.op, Op):
            return self.op
        raise InternalError(f"{self.op} at {self.where} is a collective")

    @property
    def scan(self) -> Scan | None:
        """Its loop, if it is a scan."""
        return self.control if isinstance(self.control, Scan) else None

    @property
    def trips(self) -> int:
        """The number of times that a loop runs its body per run of the equation; 1 if unknown (`While`)."""
        return self.control.trips if isinstance(self.control, Scan) else 1

    def runs(self, key: str, unknown: float = 1) -> float:
        """How often a graph runs per run of the equation; `unknown` for a branch of unknown frequency."""
        if not isinstance(self.control, Cond):
            return self.trips
        often = self.control.frequency
        return unknown if often is None else often if key == "yes" else 1 - often

    def graphs(self) -> dict[str, Graph]:
        """The graphs of the equation (loop bodies, branches), by field name."""
        return {} if self.control is None else graphs_of(self.control)

    def replace(self, **changes: Any) -> Eqn:
        """A copy with other fields; the equation itself if all of them are the same objects as before."""
        if not _differs(self, changes):
            return self
        fields: dict[str, Any] = {name: self.__dict__[name] for name in _FIELDS}
        return Eqn(**{**fields, **changes})

    def on(self, ins: tuple[Var, ...], outs: tuple[Var, ...]) -> Eqn:
        """The same operation on values of the same types, so that what is known of its types and labels stays valid."""
        eqn = Eqn(self.op, ins, outs, self.params, self.where, self.backward, self.cause)
        eqn.__dict__.update((fact, self.__dict__[fact]) for fact in OF_TYPES if fact in self.__dict__)
        return eqn

    def reading(self, instead: Mapping[Var, Var]) -> Eqn:
        """A copy that reads `instead[v]` where it reads v, for some values; the equation itself if it reads none."""
        return self.replace(ins=tuple(instead.get(v, v) for v in self.ins))

    def with_control(self, **changes: Any) -> Eqn:
        """A copy whose loop, branch or call has other fields; the equation itself if nothing changes."""
        assert self.control is not None
        if not _differs(self.control, changes):
            return self
        return self.replace(params={**self.params, "control": dataclasses.replace(self.control, **changes)})

    def map_graphs(self, change: Callable[[Any], Graph]) -> Eqn:
        """A copy with `change` applied to each graph; the equation itself if no graph changes."""
        if self.control is None:
            return self
        graphs = self.graphs()
        changed = {key: change(graph) for key, graph in graphs.items()}
        return self if all(changed[key] is graph for key, graph in graphs.items()) else self.with_control(**changed)


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A function as a list of equations: inputs, equations, results. `print(graph)` shows it."""

    ins: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outs: tuple[Var, ...]
    mentions: frozenset[str] = field(default=frozenset(), kw_only=True)  # dims the function used, also removed ones

    def __str__(self) -> str:
        return format_graph(self)

    def __repr__(self) -> str:
        return f"<{self._heading()}>"

    def _heading(self) -> str:
        counts = [(len(self.ins), "input"), (self.instructions, "operation"), (len(self.outs), "result")]
        return "graph: " + ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts)

    def _repr_html_(self) -> str:
        return page_part(self._heading(), str(self), opened=self.instructions <= SHORT)

    @property
    def instructions(self) -> int:
        """The number of equations, including loop bodies and branches, each counted once. Literal scalars are excluded.

        The number of literal scalars depends on sizes, because equal literals are merged.
        """
        return sum(1 for eqn, _ in walk(self) if not _is_number(eqn))

    @cached_property
    def kinds(self) -> frozenset[object]:
        """The operations, and the types of loops, branches and calls, of all its equations, including inner graphs.

        A pass that looks for some of them leaves a graph without any as it is.
        """
        controlled = [eqn for eqn in self.eqns if eqn.control is not None]
        inner = [sub.kinds for eqn in controlled for sub in eqn.graphs().values()]
        return frozenset({eqn.op for eqn in self.eqns}).union((type(eqn.control) for eqn in controlled), *inner)

    @cached_property
    def dim_names(self) -> tuple[str, ...]:
        """The names of all dims of the operands and results of its equations, including inner graphs."""
        inner = [name for eqn in self.eqns for sub in eqn.graphs().values() for name in sub.dim_names]
        return tuple(dict.fromkeys([*dim_names(self.eqns), *inner]))

    @cached_property
    def known_dim_names(self) -> frozenset[str]:
        """The names of the dims that the function used, of its inputs and of all values: a made-up dim has another."""
        return self.mentions.union(self.dim_names, (d.name for v in self.ins for d in v.dims))

    @cached_property
    def readers(self) -> Mapping[Var, Sequence[Eqn]]:
        """The equations that read each value, in order; loop bodies and branches are not searched."""
        readers: dict[Var, list[Eqn]] = {}
        for eqn in self.eqns:
            for v in dict.fromkeys(eqn.ins):
                readers.setdefault(v, []).append(eqn)
        return readers

    @cached_property
    def producers(self) -> Mapping[Var, Eqn]:
        """The equation that computes each value; inputs have none."""
        return {v: eqn for eqn in self.eqns for v in eqn.outs}

    @cached_property
    def places(self) -> Mapping[Eqn, int]:
        """The number of each equation."""
        return {eqn: i for i, eqn in enumerate(self.eqns)}

    def replace(self: G, **changes: Any) -> G:
        """A copy with other fields; the graph itself if nothing changes, so that what is known of it stays valid."""
        return dataclasses.replace(self, **changes) if _differs(self, changes) else self


def learn(record: Eqn | Graph, fact: str, value: object = True) -> None:
    """Remember what a pass found out about an equation or graph, which does not change, for as long as it exists."""
    record.__dict__[fact] = value


def known(record: Eqn | Graph, fact: str, value: object = True) -> bool:
    """True if `learn` was told so."""
    return record.__dict__.get(fact) is value


def _differs(record: object, changes: Mapping[str, object]) -> bool:
    """True if a change of fields puts other objects into a record."""
    for name, value in changes.items():  # no `any`: passes ask this of every equation
        old = getattr(record, name)
        if old is not value and not _same(old, value):
            return True
    return False


def _same(a: object, b: object) -> bool:
    """True if two fields hold tuples of the same objects."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        one, two = cast("tuple[object, ...]", a), cast("tuple[object, ...]", b)
        return len(one) == len(two) and all(map(is_, one, two))
    return False


def _is_number(eqn: Eqn) -> bool:
    return isinstance(eqn.op, Op) and eqn.op.literal and not eqn.outs[0].dims


def dim_names(eqns: Sequence[Eqn]) -> dict[str, None]:
    """The names of the dims of the operands and results, in order."""
    return dict.fromkeys(d.name for eqn in eqns for v in (*eqn.ins, *eqn.outs) for d in v.dims)


def params_with(eqn: Eqn, new: Mapping[Dim, Dim]) -> dict[str, Any]:
    """The parameters of an equation, with some dims replaced."""
    return {key: _with_dims(value, new) for key, value in eqn.params.items()}


def _with_dims(value: Any, new: Mapping[Dim, Dim]) -> Any:
    if isinstance(value, Dim):
        return new.get(value, value)
    return tuple([_with_dims(x, new) for x in cast("tuple[Any, ...]", value)]) if isinstance(value, tuple) else value


def walk(graph: Graph, trips: float = 1, every_branch: bool = False) -> Iterator[tuple[Eqn, float]]:
    """Yield every equation, including those of loop bodies and branches, with how often it runs.

    A branch of unknown frequency, and with `every_branch` each branch, counts as if it ran whenever its equation does.
    """
    for eqn in graph.eqns:
        yield eqn, trips
        for key, graph in eqn.graphs().items():
            often = eqn.trips if every_branch else eqn.runs(key)
            yield from walk(graph, trips * often, every_branch)


def operations(eqn: Eqn, sizes: Callable[[Var], tuple[int, ...]]) -> float:
    """The floating-point operations of one equation without inner graphs; `sizes` gives the sizes of each value."""
    if eqn.operation.flops is None:
        return 0.0 if eqn.operation.fuses is Fuses.VIEW else float(sum(math.prod(sizes(v)) for v in eqn.outs))
    return _of_sizes(eqn, eqn.operation.flops, sizes)


def scratch_bytes(eqn: Eqn, sizes: Callable[[Var], tuple[int, ...]]) -> int:
    """The bytes that the kernel of an equation needs besides its operands and results."""
    scratch = eqn.op.scratch if isinstance(eqn.op, Op) else None
    return 0 if scratch is None else round(_of_sizes(eqn, scratch, sizes))


def _of_sizes(eqn: Eqn, count: Callable[..., float], sizes: Callable[[Var], tuple[int, ...]]) -> float:
    ins, outs = [sizes(v) for v in eqn.ins], [sizes(v) for v in eqn.outs]
    params = {**eqn.params, "shapes": [v.dims for v in eqn.ins], "dtypes": [v.dtype for v in eqn.ins]}
    return float(count(ins, outs, **eqn.operation.keywords(count, params)))


def format_graph(
    graph: Graph,
    show_type: Callable[[Var], str] = lambda v: repr(v.type),
    title: str = "graph",
    note: Callable[[Eqn], str] = lambda eqn: str(eqn.cause),
) -> str:
    """The text that `print` shows: one equation per line, its type after the colon, the user's line after the hash."""
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
            names[eqn.outs[0]] = _short(eqn.params["value"])  # literals are printed where they are used
            continue
        for v in eqn.outs:
            names[v] = _name(v, names)
        outs, ins = ", ".join(map(names.__getitem__, eqn.outs)), " ".join(map(names.__getitem__, eqn.ins))
        params = " ".join(f"{k}={_short(v)}" for k, v in _shown(eqn))
        types = ", ".join(map(show_type, eqn.outs))
        annotation = f"{eqn.where.with_scope()}{' (backward)' if eqn.backward else ''}  {note(eqn)}".rstrip()
        yield f"{indent}  {outs} = {' '.join(x for x in (str(eqn.op), ins, params) if x)} : {types}", annotation
        for key, sub in eqn.graphs().items():
            inner = dict(names)
            for v in sub.ins:
                inner[v] = _name(v, inner)
            yield f"{indent}    {key}({', '.join(f'{inner[v]}: {show_type(v)}' for v in sub.ins)}):", ""
            yield from _lines(sub, inner, show_type, note, indent + "    ")
    yield f"{indent}  return {', '.join(map(names.__getitem__, graph.outs))}", ""


# parameters that are not printed: the printed types already show them, or they are internal tables
UNSHOWN = {
    *("out", "shape", "dtype", "starts", "axes", "table", "dims", "dim", "rows", "sides", "results", "label"),
    *("whole", "key", "follows", "control", "site", "how", "call"),
}


def options(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of an equation, with those that a value `shown` lists in place of that value."""
    for key, value in params.items():
        shown: Mapping[str, Any] = getattr(value, "shown", {key: value})
        yield from shown.items()


def _shown(eqn: Eqn) -> Iterator[tuple[str, Any]]:
    """Yield the parameters to print, those of a loop first."""
    for key, value in options({**({} if eqn.control is None else vars(eqn.control)), **eqn.params}):
        if key not in UNSHOWN and value is not None and not isinstance(value, Graph):
            yield key, value


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
    if isinstance(value, np.generic):
        return str(cast(Any, value)).removesuffix(".0")
    if callable(value):
        return getattr(value, "__name__", "function")
    if isinstance(value, str) and " " in value:
        return repr(value)
    items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
    if items and all(isinstance(d, Dim) for d in items):
        return show(cast(Shape, items))
    return str(cast(object, value)).replace(" ", "")
