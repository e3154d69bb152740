"""Rematerialisation: the backward pass recomputes the values that the forward pass does not store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ShapeError, expect
from ..ir import Call, Fuses, Graph, Linear, Op, Reduce, Var, silent
from ..ops.dtypes import CAST
from ..ops.reductions import spread
from ..trace import Tensor, as_tensor, bind, bind1, trace, tree
from .autodiff import pullback
from .carry import leaves_of
from .host import FETCH, OFFLOAD

BARRIER = Op(
    "barrier",
    type=lambda x: x,
    kernel=lambda c, x: c.xp.barrier(x),
    vjp=lambda ct, x: (ct,),
    linear=Linear.JOINT,
    effects=True,
    fuses=Fuses.VIEW,
)


NAME = Op(
    "name",
    type=lambda x, *, name: x,
    kernel=lambda c, x, *, name: x,
    vjp=lambda ct, x: (ct,),
    linear=Linear.JOINT,
    fuses=Fuses.VIEW,
)
KEEP = Op(  # partitioning selects `stored` if recomputing the value would send data, else `recomputed`
    "keep",
    type=lambda stored, recomputed: recomputed,
    kernel=lambda c, stored, recomputed: stored,
    vjp=lambda ct, stored, recomputed: (None, ct),
    vmap=lambda *ins, new: bind1(KEEP, *spread(ins, new)),
    linear=Linear.SECOND,
    fuses=Fuses.VIEW,
)


def name(x: Any, name: str) -> Tensor:
    """The same tensor with a name, so that a policy of md.checkpoint can store it.

    >>> import meshdsl as md
    >>> md.name(md.tensor(2.0), "gate")
    tensor(float32[], 2.)
    """
    if not isinstance(name, str) or not name:
        raise ShapeError(f"a name is a text, for example 'gate'; got {name!r}")
    return bind1(NAME, as_tensor(x), name=name)


# "nothing", "offload", "products", "collectives", or the names of the values to store
Policy = str | tuple[str, ...]
POLICIES = ("nothing", "offload", "products", "collectives")


def _may_communicate(graph: Graph) -> list[Var]:
    """The values that need communication under some layout.

    These are the results of all operations that are not elementwise, and values that a partial sum can reach before
    it is reduced.
    """
    values: list[Var] = []
    unfinished: set[Var] = set()
    for eqn in graph.eqns:
        op = eqn.operation
        passes = bool(op.linear) and not unfinished.isdisjoint(eqn.ins)
        if passes or op.reduce is Reduce.SUM or eqn.control is not None:
            unfinished.update(eqn.outs)
        if eqn.ins and (passes or op.reduce or eqn.control is not None or op.rule or op.blocked or op.moves):
            values += eqn.outs
    return values


def _as_read(graph: Graph, values: Sequence[Var]) -> list[Var]:
    """These values; instead of one that is read only to be cast to a narrower dtype, the result of the cast."""
    readers = graph.readers

    def read(v: Var) -> Var:
        now = v
        while now not in graph.outs and len(readers.get(now, ())) == 1:
            (eqn,) = readers[now]
            now = eqn.outs[0]
            if eqn.op is CAST:
                return now if now.dtype.itemsize < v.dtype.itemsize else v
            same = not eqn.control.graph.eqns if isinstance(eqn.control, Call) else eqn.operation.fuses is Fuses.VIEW
            if not same or len(eqn.ins) > 1:
                break
        return v

    return list(dict.fromkeys(map(read, values)))


def _checkpoint_fwd(*ins: Tensor, active: Sequence[bool], read: Sequence[bool], control: Call, policy: Policy) -> Any:
    """Run the graph that also returns the values to store."""
    graph = control.graph
    stored: list[Var] = []
    if policy == "collectives":
        stored = _as_read(graph, _may_communicate(graph))
    elif policy == "products":
        stored = _as_read(graph, [eqn.outs[0] for eqn in graph.eqns if eqn.operation.product])
    elif isinstance(policy, tuple):
        stored = [eqn.outs[0] for eqn in graph.eqns if eqn.op is NAME and eqn.params["name"] in policy]
    outs = bind(_CHECKPOINT, *ins, control=Call(graph.replace(outs=(*graph.outs, *stored))), policy=policy)
    n = len(graph.outs)
    saved = [bind1(OFFLOAD, x) if x.dims else x for x in ins] if policy == "offload" else ins
    return outs[:n], (saved, active, dict(zip(stored, outs[n:], strict=True)))


def _checkpoint_vjp(cts: Sequence[Tensor | None], residuals: Any, *, control: Call, policy: Policy) -> Any:
    ins, active, stored = residuals

    def stored_or_recomputed(v: Var, x: Tensor) -> Tensor:
        if v not in stored:
            return x
        return bind1(KEEP, stored[v], x) if policy == "collectives" else stored[v]

    recompute_ins = [_again(x, policy) if x.dims else x for x in ins]
    read = [ct is not None for ct in cts]
    return pullback(silent(control.graph), recompute_ins, active, stored_or_recomputed, read)[1](cts)


def _again(x: Tensor, policy: Policy) -> Tensor:
    """An argument for the computation that runs again, which a compiler cannot merge with the first one."""
    return bind1(BARRIER, bind1(FETCH, x) if policy == "offload" else x)


_CHECKPOINT = Op(
    "checkpoint",
    type=lambda *_, control, policy: tuple(v.type for v in control.graph.outs),
    kernel=lambda run, *ins, control, policy: run(control.graph, ins),
    fwd=_checkpoint_fwd,
    vjp=_checkpoint_vjp,
)


def _policy(policy: str | Sequence[str]) -> Policy:
    if isinstance(policy, str) and policy.startswith("names:"):
        policy = policy.removeprefix("names:").replace(",", " ").split()
    if policy in POLICIES:
        return str(policy)
    if isinstance(policy, str) or not policy:
        raise ShapeError(
            f"md.checkpoint has no policy {policy!r}\n"
            f"  there are: {', '.join(map(repr, POLICIES))}, and the names of values to keep, 'names:a,b' or "
            "('a', 'b')"
        )
    return tuple(policy)


def checkpoint(f: Callable[..., Any], policy: str | Sequence[str] = "nothing") -> Callable[..., Any]:
    """A function equal to `f` whose gradient recomputes f instead of storing its intermediate values.

    `policy` selects the values that are stored in addition to the arguments:

    - "nothing": none;
    - "offload": none, and the arguments are stored in the host's memory: a device copies them there, and back for the
      backward pass. Arguments of the whole step, such as parameters, stay on the device;
    - "products": the results of products and convolutions, outside loops and branches inside f; in the narrower dtype,
      if that is all that f reads of one;
    - "collectives": values whose recomputation would send data. This depends on the layout: if nothing is sharded,
      nothing is stored. What is read only in a narrower dtype is stored in it, if it is a sum over devices. Collectives
      in loops and branches inside f run again.
    - "names:a,b", or ("a", "b"): values that f named with md.name, outside loops and branches inside f.

    Raises `ShapeError` for another policy, and for a name that f does not define.

    >>> import meshdsl as md
    >>> md.grad(md.checkpoint(lambda x: md.sum(x * x)))(md.tensor([3.0], "a"))
    tensor(float32[a=1], [6.])
    """
    expect("f", f, Callable)
    chosen = _policy(policy)

    def wrapped(*args: Any) -> Any:
        xs, structure = leaves_of(tuple(args))
        graph, captures, out = trace(lambda *ins: f(*tree.tree_unflatten(structure, ins)), [x.type for x in xs])
        defined = {eqn.params["name"] for eqn in graph.eqns if eqn.op is NAME}
        missing = [name for name in chosen if name not in defined] if isinstance(chosen, tuple) else []
        if missing:
            listing = ", ".join(sorted(defined)) or "none"
            raise ShapeError(
                f"the policy of md.checkpoint has {', '.join(map(repr, missing))}, "
                "but the function names no such value\n"
                f"  name a value with md.name(x, {missing[0]!r}), outside loops and branches\n"
                f"  names that its result depends on: {listing}"
            )
        return tree.tree_unflatten(out, bind(_CHECKPOINT, *captures, *xs, control=Call(graph), policy=chosen))

    return wrapped
