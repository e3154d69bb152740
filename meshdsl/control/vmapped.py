"""The rules of `md.vmap` for loops and branches: their graphs run on tensors with the extra dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..dims import Dim, names
from ..ir import Cond, Graph, Op, Scan, While
from ..ops.elementwise import where
from ..ops.reductions import any, broadcast, spread
from ..ops.reshape import transpose
from ..trace import Tensor, bind, evaluate, trace
from .batching import batched, batched_graph


def _has(xs: Sequence[Tensor], new: Dim) -> list[bool]:
    return [new in x.dims for x in xs]


def _spread(xs: Sequence[Tensor], on: Sequence[bool], new: Dim) -> list[Tensor]:
    return [spread([x], new)[0] if mapped else x for x, mapped in zip(xs, on, strict=True)]


def _mapped_body(body: Graph, consts: int, on: Sequence[bool], new: Dim, carries: int) -> tuple[list[bool], Graph]:
    """The carries that have the new dim in some trip, and the body with them.

    They are those that have it at first, and those that then depend on it.
    """
    on = list(on)
    while True:
        carried = on[consts : consts + carries]
        mapped = batched_graph(body, on, new, [*carried, *(False for _ in body.outs[carries:])])
        more = [i for i, v in enumerate(mapped.outs[:carries]) if new.name in names(v.dims) and not carried[i]]
        if not more:
            return carried, mapped
        for i in more:
            on[consts + i] = True


def scan_rule(op: Op, *ins: Tensor, new: Dim, control: Scan) -> list[Tensor]:
    consts, first, stacks = control.inputs(ins)
    on, body = _mapped_body(control.body, control.consts, _has(ins, new), new, control.carries)
    rows = [transpose(x, (control.dim, *(d for d in x.dims if d != control.dim))) for x in stacks]
    return list(bind(op, *consts, *_spread(first, on, new), *rows, control=dataclasses.replace(control, body=body)))


def while_rule(op: Op, *ins: Tensor, new: Dim, control: While) -> list[Tensor]:
    """With one predicate per place, the loop runs while any holds, and a place keeps its carry after its own end."""
    consts, first = control.inputs(ins)
    on, body = _mapped_body(control.body, control.consts, _has(ins, new), new, len(first))
    held = _has(consts, new)
    test = batched_graph(control.test, [*held, *on], new)
    each = new.name in names(test.outs[0].dims)
    if each:
        on = [True] * len(on)
        body = batched_graph(control.body, [*held, *on], new, on)
        test, body = _stepped(batched_graph(control.test, [*held, *on], new), body, control.consts)
    return list(bind(op, *consts, *_spread(first, on, new), control=While(test, body, control.consts)))


def _stepped(test: Graph, body: Graph, consts: int) -> tuple[Graph, Graph]:
    """A loop over places that end at different trips: whether any runs, and the step of those that run."""

    def step(*xs: Tensor) -> list[Tensor]:
        (running,) = evaluate(test, xs)
        return [where(running, y, x) for x, y in zip(xs[consts:], evaluate(body, xs), strict=True)]

    types, labels = [v.type for v in test.ins], [v.name for v in test.ins]
    whole, _, _ = trace(lambda *xs: any(evaluate(test, xs)[0]), types, labels)
    return whole, trace(step, types, labels)[0]


def cond_rule(op: Op, p: Tensor, *ins: Tensor, new: Dim, control: Cond) -> list[Tensor]:
    """With one predicate per place, both branches run, and each place takes its own."""
    if new in p.dims:
        yes, no = batched(control.yes, ins, new), batched(control.no, ins, new)
        return [_chosen(p, a, b, new) for a, b in zip(yes, no, strict=True)]
    on = _has(ins, new)
    outs = [[new.name in names(v.dims) for v in batched_graph(graph, on, new).outs]
            for graph in (control.yes, control.no)]  # fmt: skip
    either = [a or b for a, b in zip(*outs, strict=True)]
    yes, no = (batched_graph(graph, on, new, either) for graph in (control.yes, control.no))
    return list(bind(op, p, *ins, control=dataclasses.replace(control, yes=yes, no=no)))


def _chosen(p: Tensor, a: Tensor, b: Tensor, new: Dim) -> Tensor:
    if new in a.dims or new in b.dims or not a.dims:
        return where(p, a, b)
    return where(broadcast(p, (new, *a.dims)), a, b)
