"""Loops, branches and rematerialisation are equations that hold graphs.

A `scan` over a stacked dim is one equation, forward and backward, so the size of a program does not grow with depth.
Its gradient is a second scan, in reverse, over what the first one saved. A `while_loop` runs until its predicate says
no, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .autodiff import pullback, vjp_of_graph, zeros
from .dims import Dim, DimLike, find, pick
from .errors import MeshdslError, ShapeError, TraceError, at, caller
from .ir import Graph, Op, Type, Var, dce
from .ops.contraction import located
from .ops.joining import stack, unstack
from .ops.reshape import transpose
from .trace import Tensor, as_tensor, bind, bind1, evaluate, trace, tree

__all__ = ["checkpoint", "cond", "name", "scan", "while_loop"]


def _leaves(x: Any) -> tuple[list[Tensor], Any]:
    leaves, structure = tree.tree_flatten(x)
    return [as_tensor(leaf) for leaf in leaves], structure


def _scan_type(*ins: Type, body: Graph, consts: int, carries: int, dim: Dim, reverse: bool, trips: int) -> Any:
    ys = tuple(Type((dim, *v.shape), v.dtype) for v in body.outs[carries:])
    return (*(v.type for v in body.outs[:carries]), *ys)


def _scan_eager(run: Any, *ins: Tensor, body: Graph, consts: int, carries: int, dim: Dim, reverse: bool, trips: int):
    held, carry, xs = ins[:consts], list(ins[consts : consts + carries]), ins[consts + carries :]
    slices = list(zip(*(unstack(x, dim) for x in xs), strict=True)) or [()] * dim.size
    rows: list[list[Tensor]] = []
    for x in reversed(slices) if reverse else slices:
        outs = run(body, [*held, *carry, *x])
        carry = outs[:carries]
        rows.append(outs[carries:])
    rows = rows[::-1] if reverse else rows
    empty = [zeros(Type((dim, *v.shape), v.dtype)) for v in body.outs[carries:]]
    return [*carry, *([stack(y, dim) for y in zip(*rows, strict=True)] if rows else empty)]


def _scan_fwd(*ins: Tensor, active: Sequence[bool], body: Graph, consts: int, carries: int, **params: Any):
    """Run the loop that also stacks what its gradient needs; see `_split`."""
    on = list(active)
    on[consts : consts + carries] = [True] * carries
    forward, backward, kept, want = _split(body, consts, carries, on)
    outs = bind(SCAN, *ins, body=forward, consts=consts, carries=carries, **params)
    n = len(body.outs)
    xs = ins[consts + carries :]
    held = [ins[i] for i in kept if i < consts] + [xs[i - consts - carries] for i in kept if i >= consts]
    return outs[:n], (backward, kept, want, held, outs[n:])


# Elementwise operations that cost less to compute again in the backward loop than to keep for every step.
CHEAP = {
    "add", "subtract", "multiply", "negative", "square", "where", "cast", "broadcast", "transpose", "rename", "equal",
    "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_not", "stop_gradient", "reshape",
}  # fmt: skip


def _split(body: Graph, consts: int, carries: int, active: Sequence[bool]):
    """The body's forward half with its residuals as further results, and the backward half.

    Residuals are the forward values that the backward half uses, less what it can have for nothing: constants of the
    loop and slices of its inputs are passed again, and what follows from constants alone, or cheaply from what is
    kept anyway, is computed again.
    """
    joint, forward_values, want = vjp_of_graph(body, active)
    n, outs = len(body.ins), len(body.outs)
    made = {v: eqn for eqn in joint.eqns for v in eqn.outs}
    free = {v for i, v in enumerate(joint.ins[:n]) if not consts <= i < consts + carries}
    constant = set(joint.ins[:consts])
    for eqn in joint.eqns:
        if not eqn.op.effects and not eqn.op.control and all(v in constant for v in eqn.ins):
            constant.update(eqn.outs)
    later = [eqn for eqn in joint.eqns if eqn.outs[0] not in forward_values]
    cts, known = joint.ins[n:], {v for eqn in later for v in eqn.outs}
    used = dict.fromkeys(v for v in (*(v for eqn in later for v in eqn.ins), *joint.outs[outs:]) if v not in known)
    residuals = {v for v in used if v not in cts}

    def derived(v: Var) -> bool:
        """Whether v follows cheaply from inputs, constants and other residuals."""
        eqn = made.get(v)
        return eqn is not None and (
            v in constant or (eqn.op.name in CHEAP and all(x in free or x in residuals or derived(x) for x in eqn.ins))
        )

    again: set[Var] = set()
    for eqn in reversed([eqn for eqn in joint.eqns if eqn.outs[0] in forward_values]):
        if eqn.outs[0] in residuals | again and derived(eqn.outs[0]):
            again.update(eqn.outs)
            residuals -= set(eqn.outs)
            again.update(v for v in eqn.ins if v not in free and v not in residuals)
    redo = [eqn for eqn in joint.eqns if eqn.outs[0] in again]
    saved = [v for v in (*joint.ins[:n], *made) if v in residuals and v not in free]
    needed = {v for eqn in (*redo, *later) for v in eqn.ins} | set(joint.outs[outs:])
    kept = [i for i, v in enumerate(joint.ins[:n]) if v in free and v in needed]
    first = tuple(eqn for eqn in joint.eqns if eqn.outs[0] in forward_values)
    forward = dce(Graph(joint.ins[:n], first, (*joint.outs[:outs], *saved)))
    backward = dce(Graph((*(joint.ins[i] for i in kept), *saved, *cts), (*redo, *later), joint.outs[outs:]))
    return forward, backward, kept, want


def _scan_vjp(
    cts: Sequence[Tensor | None],
    residuals: Any,
    *,
    body: Graph,
    consts: int,
    carries: int,
    dim: Dim,
    reverse: bool,
    trips: int,
):
    backward, kept, want, held, saved = residuals
    floating = [i for i, v in enumerate(body.outs) if v.dtype.kind in "fVc"]
    types = _scan_type(body=body, consts=consts, carries=carries, dim=dim, reverse=reverse, trips=trips)
    given = {i: zeros(types[i]) if cts[i] is None else cts[i] for i in floating}
    n_held = sum(i < consts for i in kept)
    const_want = [i for i in want if i < consts]
    carry_want = [i for i in want if consts <= i < consts + carries]
    carry_cts = [i for i in floating if i < carries]
    y_cts = [i for i in floating if i >= carries]
    n_xs = len(kept) - n_held

    def step(carry: tuple[list[Tensor], list[Tensor]], xs: list[Tensor]) -> Any:
        flowing, sums = carry
        by_out = dict(zip(carry_cts, flowing, strict=True)) | dict(zip(y_cts, xs[n_xs + len(saved) :], strict=True))
        given_out = [by_out[i] for i in floating]
        outs = evaluate(backward, [*held[:n_held], *xs[: n_xs + len(saved)], *given_out])
        by_in = dict(zip(want, outs, strict=True))
        return (
            [by_in[consts + i] for i in carry_cts],
            [total + by_in[i] for total, i in zip(sums, const_want, strict=True)],
        ), [by_in[i] for i in want if i >= consts + carries]

    init = ([given[i] for i in carry_cts], [zeros(body.ins[i].type) for i in const_want])
    (flowing, sums), x_cts = scan(
        step, init, [*held[n_held:], *saved, *(given[i] for i in y_cts)], over=dim, reverse=not reverse
    )
    found = dict(zip(carry_want, flowing, strict=True)) | dict(zip(const_want, sums, strict=True))
    found |= dict(zip([i for i in want if i >= consts + carries], x_cts, strict=True))
    return [found.get(i) for i in range(len(body.ins))]


SCAN = Op("scan", type=_scan_type, kernel=_scan_eager, fwd=_scan_fwd, vjp=_scan_vjp, control=True)


def scan(f: Callable[..., Any], carry: Any, xs: Any, over: DimLike, *, reverse: bool = False) -> tuple[Any, Any]:
    """Run `f(carry, x) -> (carry, y)` over the slices of `xs` along a dim, in order (backwards when `reverse`).

    >>> import meshdsl as md
    >>> md.scan(lambda total, x: (total + x, total + x), 0.0, md.tensor([1.0, 2.0, 3.0], "t"), over="t")[1]
    tensor(float32[t=3], [1. 3. 6.])

    `carry` and `xs` are pytrees; every tensor of `xs` has the dim. The results `y` are stacked along it, first.
    Raises `ShapeError` when the carry changes structure, dims or dtype.
    """
    first, structure = _leaves(carry)
    rows, row_structure = _leaves(xs)

    def resolve() -> Dim:
        if not rows and not isinstance(over, Dim):
            return pick(over, (), new=True)[0]
        return find(over, rows[0].dims if rows else pick(over, (), new=True))

    dim = located(resolve)
    rows = [transpose(x, [located(lambda x=x: find(dim, x.dims)), *(d for d in x.dims if d != dim)]) for x in rows]
    n = len(first)

    def body(*args: Tensor) -> Any:
        result = f(tree.tree_unflatten(structure, args[:n]), tree.tree_unflatten(row_structure, args[n:]))
        if not isinstance(result, tuple) or len(result) != 2:
            raise at(ShapeError("the function of md.scan returns a pair (carry, y)"), caller())
        return _carried(result[0], first, structure, "md.scan"), result[1]

    specs = [*(x.type for x in first), *(Type(x.dims[1:], x.dtype) for x in rows)]
    graph, captures, out = trace(body, specs)
    results = bind(
        SCAN,
        *captures,
        *first,
        *rows,
        body=graph,
        consts=len(captures),
        carries=n,
        dim=dim,
        reverse=reverse,
        trips=dim.size,
    )
    carried, ys = tree.tree_unflatten(out, results)
    return tree.tree_unflatten(structure, carried), ys


def _carried(after: Any, before: Sequence[Tensor], structure: Any, loop: str) -> list[Tensor]:
    """What a loop's function returned as its carry, in the order of dims in which it went in."""
    leaves, after_structure = tree.tree_flatten(after)
    leaves = [x if isinstance(x, Tensor) else as_tensor(x, k.dtype) for x, k in zip(leaves, before, strict=False)]
    same = after_structure == structure and all(
        set(a.dims) == set(b.dims) and a.dtype == b.dtype for a, b in zip(leaves, before, strict=True)
    )
    if not same:
        raise at(
            ShapeError(
                f"the carry of {loop} changes\n"
                f"  it goes in as {[x.type for x in before]} and comes out as {[x.type for x in leaves]}\n"
                "  keep its structure, dims and dtype the same, with md.cast or md.broadcast on the initial value"
            ),
            caller(),
        )
    return [transpose(x, k.dims) for x, k in zip(leaves, before, strict=True)]


def _while_type(*ins: Type, test: Graph, body: Graph, consts: int) -> Any:
    (p,) = test.outs
    if p.shape or p.dtype.kind != "b":
        raise ShapeError(
            f"the predicate of md.while_loop is one boolean without dims, got {p.type}; "
            "compare, or reduce with md.any or md.all"
        )
    return tuple(v.type for v in body.outs)


def _while_eager(run: Any, *ins: Tensor, test: Graph, body: Graph, consts: int) -> list[Tensor]:
    held, carry = ins[:consts], list(ins[consts:])
    while bool(run(test, [*held, *carry])[0]):
        carry = run(body, [*held, *carry])
    return carry


def _while_vjp(*_: Any, **__: Any) -> Any:
    raise TraceError(
        "md.while_loop has no gradient: how often it runs is not known, so what its steps made cannot be kept\n"
        "  use md.scan over a known number of steps (md.where holds the carry once it is done), "
        "or md.stop_gradient of what goes in"
    )


_WHILE = Op("while_loop", type=_while_type, kernel=_while_eager, vjp=_while_vjp, control=True)


def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
    """`carry = body(carry)` for as long as `cond(carry)` holds; the carry at the end.

    >>> import meshdsl as md
    >>> md.while_loop(lambda x: md.sum(x) < 100, lambda x: 2 * x, md.tensor([1.0, 2.0], "a"))
    tensor(float32[a=2], [ 64. 128.])

    The carry is a pytree; `cond` gives one boolean without dims. All devices see the same predicate, so a split
    carry is reduced in it. Raises `ShapeError` when the carry changes structure, dims or dtype, and `TraceError` when
    a gradient is asked for through the loop: md.scan has one.
    """
    first, structure = _leaves(init)
    specs = [x.type for x in first]

    def step(*carry: Tensor) -> Any:
        return _carried(body(tree.tree_unflatten(structure, carry)), first, structure, "md.while_loop")

    test, held_test, out = trace(lambda *carry: cond(tree.tree_unflatten(structure, carry)), specs)
    if len(test.outs) != 1:
        raise at(ShapeError(f"the predicate of md.while_loop is one boolean, got {out}"), caller())
    again, held, _ = trace(step, specs)
    test = test.replace(ins=(*test.ins[: len(held_test)], *_unused(held), *test.ins[len(held_test) :]))
    again = again.replace(ins=(*_unused(held_test), *again.ins))
    captures = [*held_test, *held]
    results = bind(_WHILE, *captures, *first, test=test, body=again, consts=len(captures))
    return tree.tree_unflatten(structure, results)


BARRIER = Op(
    "barrier",
    type=lambda x: x,
    kernel=lambda c, x: c.xp.barrier(x),
    vjp=lambda ct, x: (ct,),
    linear="joint",
    flops=lambda *_, **__: 0,
    effects=True,
    fuses="view",
)


NAME = Op(
    "name",
    type=lambda x, *, name: x,
    kernel=lambda c, x, *, name: x,
    vjp=lambda ct, x: (ct,),
    linear="joint",
    flops=lambda *_, **__: 0,
    fuses="view",
)
KEEP = Op(  # partition decides: what was kept, where computing it again would send something, else what was computed
    "keep",
    type=lambda kept, again: again,
    kernel=lambda c, kept, again: kept,
    vjp=lambda ct, kept, again: (None, ct),
    linear="second",
    flops=lambda *_, **__: 0,
    fuses="view",
)


def name(x: Any, name: str) -> Tensor:
    """The same tensor, under a name by which the policy of md.checkpoint can keep it.

    >>> import meshdsl as md
    >>> md.name(md.tensor(2.0), "gate")
    tensor(float32[], 2.)
    """
    return bind1(NAME, as_tensor(x), name=name)


Policy = str | tuple[str, ...]  # "nothing", "collectives", or the names of what is kept


def _may_send(graph: Graph) -> list[Var]:
    """The values that some layout has to send something for: all that is not computed element by element, and what
    a pending sum can reach without being finished.
    """
    found: list[Var] = []
    unfinished: set[Var] = set()
    for eqn in graph.eqns:
        op: Op = eqn.op
        passes = bool(op.linear) and not unfinished.isdisjoint(eqn.ins)
        if passes or op.reduce == "sum" or op.control:
            unfinished.update(eqn.outs)
        if eqn.ins and (passes or op.reduce or op.control or op.rule or op.blocked or op.moves):
            found += eqn.outs
    return found


def _checkpoint_fwd(*ins: Tensor, active: Sequence[bool], graph: Graph, policy: Policy) -> Any:
    """Run the graph that also returns what is kept."""
    kept: list[Var] = []
    if policy == "collectives":
        kept = _may_send(graph)
    elif isinstance(policy, tuple):
        kept = [eqn.outs[0] for eqn in graph.eqns if eqn.op is NAME and eqn.params["name"] in policy]
    outs = bind(_CHECKPOINT, *ins, graph=graph.replace(outs=(*graph.outs, *kept)), policy=policy)
    n = len(graph.outs)
    return outs[:n], (ins, active, dict(zip(kept, outs[n:], strict=True)))


def _checkpoint_vjp(cts: Sequence[Tensor | None], residuals: Any, *, graph: Graph, policy: Policy) -> Any:
    ins, active, kept = residuals

    def instead(v: Var, x: Tensor) -> Tensor:
        if v not in kept:
            return x
        return bind1(KEEP, kept[v], x) if policy == "collectives" else kept[v]

    again = [bind1(BARRIER, x) if x.dims else x for x in ins]
    return pullback(graph, again, active, instead)[1](cts)


_CHECKPOINT = Op(
    "checkpoint",
    type=lambda *_, graph, policy: tuple(v.type for v in graph.outs),
    kernel=lambda run, *ins, graph, policy: run(graph, ins),
    fwd=_checkpoint_fwd,
    vjp=_checkpoint_vjp,
    control=True,
)


def _policy(policy: str | Sequence[str]) -> Policy:
    if isinstance(policy, str) and policy.startswith("names:"):
        policy = policy.removeprefix("names:").replace(",", " ").split()
    if policy in ("nothing", "collectives"):
        return str(policy)
    if isinstance(policy, str) or not policy:
        raise ShapeError(
            f"md.checkpoint has no policy {policy!r}\n"
            "  there are: 'nothing', 'collectives', and the names of values to keep, 'names:a,b' or ('a', 'b')"
        )
    return tuple(policy)


def checkpoint(f: Callable[..., Any], policy: str | Sequence[str] = "nothing") -> Callable[..., Any]:
    """`f`, whose gradient computes f again instead of keeping its intermediate values (rematerialisation).

    `policy` says what is kept besides the arguments:

    - "nothing";
    - "collectives": what needs something sent to compute it again. The layout decides: where it splits nothing,
      nothing is kept. What a loop or a branch inside f sends is sent again.
    - "names:a,b", or ("a", "b"): what f gave these names with md.name, outside loops and branches of its own.

    Raises `ShapeError` for another policy, and for a name that f does not give.

    >>> import meshdsl as md
    >>> md.grad(md.checkpoint(lambda x: md.sum(x * x)))(md.tensor([3.0], "a"))
    tensor(float32[a=1], [6.])
    """
    chosen = located(lambda: _policy(policy))

    def wrapped(*args: Any) -> Any:
        xs, structure = _leaves(tuple(args))
        graph, captures, out = trace(lambda *ins: f(*tree.tree_unflatten(structure, ins)), [x.type for x in xs])
        given = {eqn.params["name"] for eqn in graph.eqns if eqn.op is NAME}
        missing = [name for name in chosen if name not in given] if isinstance(chosen, tuple) else []
        if missing:
            there = ", ".join(sorted(given)) or "none"
            raise at(
                ShapeError(
                    f"md.checkpoint is to keep {', '.join(map(repr, missing))}, which the function does not name\n"
                    f"  give a value of it the name with md.name(x, {missing[0]!r}), outside loops and branches\n"
                    f"  names of what its result needs: {there}"
                ),
                caller(),
            )
        return tree.tree_unflatten(out, bind(_CHECKPOINT, *captures, *xs, graph=graph, policy=chosen))

    return wrapped


def _cond_type(p: Type, *ins: Type, yes: Graph, no: Graph) -> Any:
    if p.shape or p.dtype.kind != "b":
        raise ShapeError(
            f"the predicate of md.cond is one boolean without dims, got {p}; compare, or reduce with md.any or md.all"
        )
    return tuple(v.type for v in yes.outs)


def _cond_vjp(cts: Sequence[Tensor | None], residuals: Any, *, yes: Graph, no: Graph) -> list[Tensor | None]:
    (p, *ins), (_, *active) = residuals
    given = [zeros(v.type) if ct is None else ct for ct, v in zip(cts, yes.outs, strict=True)]
    want = [i for i, on in enumerate(active) if on and ins[i].dtype.kind in "fVc"]

    def branch(graph: Graph) -> Callable[..., Any]:
        def run(*args: Tensor) -> list[Tensor]:
            found = pullback(graph, args[: len(ins)], active)[1](args[len(ins) :])
            return [zeros(ins[i]) if found[i] is None else found[i] for i in want]

        return run

    found = dict(zip(want, cond(p, branch(yes), branch(no), *ins, *given), strict=True))
    return [None, *(found.get(i) for i in range(len(ins)))]


_COND = Op(
    "cond",
    type=_cond_type,
    kernel=lambda run, p, *ins, yes, no: run(yes if bool(p) else no, ins),
    fwd=lambda *ins, active, yes, no: (bind(_COND, *ins, yes=yes, no=no), (ins, active)),
    vjp=_cond_vjp,
    control=True,
)


def cond(p: Any, f: Callable[..., Any], g: Callable[..., Any], *xs: Any) -> Any:
    """`f(*xs)` when the predicate holds, else `g(*xs)`; only the one taken runs.

    >>> import meshdsl as md
    >>> md.cond(md.tensor(True), lambda x: x + 1, lambda x: x - 1, md.tensor(1.0))
    tensor(float32[], 2.)

    Raises `ShapeError` when the branches return different structures, dims or dtypes.
    """
    ins, structure = _leaves(tuple(xs))
    traced = [trace(lambda *a, b=b: b(*tree.tree_unflatten(structure, a)), [x.type for x in ins]) for b in (f, g)]
    (yes, held_yes, out), (no, held_no, out_no) = traced
    kinds = [[v.type for v in graph.outs] for graph in (yes, no)]
    if out != out_no or kinds[0] != kinds[1]:
        raise at(
            ShapeError(
                f"the branches of md.cond differ: {kinds[0]} and {kinds[1]}\n"
                "  give both the same structure, dims, order and dtype, with md.broadcast, md.transpose or md.cast"
            ),
            caller(),
        )
    yes = yes.replace(ins=(*yes.ins[: len(held_yes)], *_unused(held_no), *yes.ins[len(held_yes) :]))
    no = no.replace(ins=(*_unused(held_yes), *no.ins))
    try:
        return tree.tree_unflatten(out, bind(_COND, as_tensor(p), *held_yes, *held_no, *ins, yes=yes, no=no))
    except MeshdslError as error:
        raise at(error, caller()) from None


def _unused(tensors: Sequence[Tensor]) -> tuple[Var, ...]:
    return tuple(Var(x.dims, x.dtype) for x in tensors)
