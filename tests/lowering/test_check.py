"""A program whose loops or branches contradict their bodies is refused.

Each mutant is lawful but for one border: a collective that says what it does takes a value to another sharding just
outside a loop or a branch, or just inside, so that every equation's own rule still holds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import meshdsl as md
from meshdsl.ir import Eqn, Graph, Var, walk
from meshdsl.layouts import Sharding
from meshdsl.lowering import Program
from meshdsl.lowering.check import check
from meshdsl.lowering.partition.planner import Reshard
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm

LM = lm.replace(batch=4, length=4, vocab=12, layers=2, d_model=8, heads=2, d_head=2, d_ff=4)


def lm_step(mesh: str, layout: str) -> Program:
    return md.compile(LM.train_step(), mesh, layout).program(*LM.specs())


def accumulated(mesh: str, layout: str) -> Program:
    """A gradient that is pending through a scan, and a reverse scan with rows and stacked results."""

    def step(w: md.Tensor, xs: md.Tensor) -> Any:
        def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
            return md.sum(md.square(md.einsum(x, w, out="batch o")))

        def body(total: md.Tensor, x: md.Tensor) -> Any:
            return total + md.grad(loss)(w, x), md.sum(x, "i")

        return md.scan(body, 0 * w, xs, over="micro", reverse=True)

    return md.compile(step, mesh, layout).program(md.spec("i:8 o:8"), md.spec("micro:3 batch:4 i:8"))


def branching(mesh: str, layout: str) -> Program:
    """A while loop and a conditional with split operands and constants from outside."""

    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def halved(x: md.Tensor) -> md.Tensor:
            return 0.5 * x + w

        x = md.while_loop(lambda x: md.sum(x) > 10.0, halved, x)
        return md.cond(md.sum(x) > 1.0, lambda x: x * w, lambda x: x - md.sum(w, "a"), x)

    return md.compile(f, mesh, layout).program(md.spec("a:8 b:8"), md.spec("a:8 b:8"))


PROGRAMS = {
    "language model": lambda: lm_step("r:2 c:2", "batch:r; vocab:c; d_ff:c; heads:c"),
    "sequence": lambda: lm_step("r:2 c:2", "batch:r; length:c"),
    "accumulated": lambda: accumulated("r:2 c:2", "batch:r; o:c"),
    "branching": lambda: branching("r:2 c:2", "a:r"),
    "branching over two": lambda: branching("r:2 c:2", "a:r; b:c"),
}


def others(v: Var, program: Program) -> Iterator[Sharding]:
    """Shardings of a value next to its own: one dim more split, or less, or a sum pending."""
    kind, now = v.type, v.sharding
    free = [axis for axis in program.mesh.axes if axis not in now.varying]
    for dim in kind.dims:
        if now.axes(dim):
            yield now.with_split(dim.name, ())
        for axis in free:
            if not program.extents.padded(dim) % program.mesh.count((*now.axes(dim), axis)):
                yield now.with_split(dim.name, (*now.axes(dim), axis))
    for axis in free:
        if now.kind == "sum":
            yield Sharding.of(dict(now.split), (*now.partial, axis))
    if now.partial:
        yield now.whole()


def detour(v: Var, start: Sharding, end: Sharding, program: Program) -> tuple[Var, list[Eqn], Var] | None:
    """The value in two shardings and the collectives from one to the other; None where there is no way."""
    try:
        steps = Reshard(start, end, v.dims, program.mesh, program.extents, v.dtype.itemsize).steps
    except (md.InternalError, md.LayoutError):
        return None
    first = last = Var(v.dims, v.dtype, v.name, start)
    eqns: list[Eqn] = []
    for step in steps:
        before, last = last, Var(v.dims, v.dtype, v.name, step.step(last.sharding, program.mesh))
        eqns.append(Eqn(step, (before,), (last,)))
    return first, eqns, last


def bodies_with_other_borders(body: Program) -> Iterator[tuple[str, Program]]:
    """The body with one input, or one result, in another sharding than before."""
    for i, v in enumerate(body.ins):
        for other in others(v, body):
            if (made := detour(v, other, v.sharding, body)) is None:
                continue
            first, eqns, last = made
            ins = (*body.ins[:i], first, *body.ins[i + 1 :])
            renamed = tuple(with_ins(eqn, {v: last}) for eqn in body.eqns)
            outs = tuple(last if x is v else x for x in body.outs)
            yield f"input {i} {other}", body.replace(ins=ins, eqns=(*eqns, *renamed), outs=outs)
    for i, v in enumerate(body.outs):
        for other in others(v, body):
            if (made := detour(v, v.sharding, other, body)) is None:
                continue
            first, eqns, last = made
            eqns = [with_ins(eqn, {first: v}) for eqn in eqns]
            yield f"result {i} {other}", body.replace(eqns=(*body.eqns, *eqns), outs=at(body.outs, i, last))


def with_ins(eqn: Eqn, renamed: dict[Var, Var]) -> Eqn:
    return dataclasses.replace(eqn, ins=tuple(renamed.get(v, v) for v in eqn.ins))


def at(vars: Sequence[Var], i: int, v: Var) -> tuple[Var, ...]:
    return (*vars[:i], v, *vars[i + 1 :])


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one border of one loop or branch moved."""
    for n, eqn in enumerate(program.eqns):
        if eqn.control is None:
            continue
        before, after = program.eqns[:n], program.eqns[n + 1 :]
        for key, body in eqn.graphs().items():
            assert isinstance(body, Program)
            for what, changed in (*bodies_with_other_borders(body), *mutants(body)):
                new = eqn.with_control(**{key: changed})
                yield f"{eqn.op} {key} {what}", program.replace(eqns=(*before, new, *after))
        for i, v in enumerate(eqn.ins):
            for other in others(v, program):
                if (made := detour(v, v.sharding, other, program)) is not None:
                    first, steps, last = made
                    steps = [with_ins(step, {first: v}) for step in steps]
                    new = dataclasses.replace(eqn, ins=at(eqn.ins, i, last))
                    yield f"{eqn.op} operand {i} {other}", program.replace(eqns=(*before, *steps, new, *after))
        for i, v in enumerate(eqn.outs):
            for other in others(v, program):
                if (made := detour(v, other, v.sharding, program)) is not None:
                    first, steps, last = made
                    new = dataclasses.replace(eqn, outs=at(eqn.outs, i, first))
                    rest = tuple(with_ins(e, {v: last}) for e in after)
                    outs = tuple(last if x is v else x for x in program.outs)
                    eqns = (*before, new, *steps, *rest)
                    yield f"{eqn.op} result {i} {other}", program.replace(eqns=eqns, outs=outs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_check_refuses_every_border_that_contradicts_a_body(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = check(PROGRAMS[name](), "partition")
    counts: Counter[str] = Counter()
    for what, mutant in mutants(program):
        counts[what.split()[0]] += 1
        with pytest.raises(md.InternalError, match="mutant: "):
            check(mutant, "mutant")
            pytest.fail(f"nobody notices: {what}")
    with capsys.disabled():
        print(f"borders: {name}: {counts.total()} mutants")
    assert counts.total() >= 20
    assert set(counts) == {e.op.name for e, _ in walk(program) if e.control is not None}


def test_a_stack_whose_dim_is_split_is_refused() -> None:
    program = accumulated("r:2 c:2", "batch:r")
    loop = next(eqn for eqn in program.eqns if eqn.control is not None)
    stack = loop.outs[-1]
    split = Var(stack.dims, stack.dtype, "", Sharding.of({stack.dims[0].name: ("c",)}))
    with pytest.raises(md.InternalError, match="a stacked result"):
        check(program.replace(eqns=tuple(changed(e, loop, stack, split) for e in program.eqns)), "mutant")


def test_a_sharding_that_splits_a_dim_which_the_value_lacks_is_refused() -> None:
    program = md.compile(lambda x: x, "r:2", "a:r").program(md.spec("a:8"))
    (x,) = program.ins
    wrong = Var(x.dims, x.dtype, "x", Sharding.of({"b": ("r",)}))
    with pytest.raises(md.InternalError, match="'b', which it lacks"):
        check(program.replace(ins=(wrong,), outs=(wrong,)), "mutant")


def test_blocks_that_do_not_hold_all_of_a_dim_are_refused() -> None:
    program = md.compile(lambda x: x, "r:2", "").program(md.spec("a:5"))
    (x,) = program.ins
    wrong = Var(x.dims, x.dtype, "x", Sharding.of({"a": ("r",)}))
    with pytest.raises(md.InternalError, match="stores 5 of 'a' in 2 equal blocks"):
        check(program.replace(ins=(wrong,), outs=(wrong,)), "mutant")


def changed(eqn: Eqn, loop: Eqn, old: Var, new: Var) -> Eqn:
    outs = tuple(new if v is old else v for v in eqn.outs) if eqn is loop else eqn.outs
    return dataclasses.replace(with_ins(eqn, {old: new}), outs=outs)


def test_programs_without_loops_pass() -> None:
    small = mlp.replace(batch=4, io=4, hidden=8)
    program: Graph = md.compile(small.train_step(), "r:2", "batch:r").program(*small.specs())
    assert isinstance(program, Program) and check(program, "test") is program
