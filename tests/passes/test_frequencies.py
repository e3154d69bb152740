"""How often branches run: learned from predicates that count, or given; costs weigh branches by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshdsl as md
from meshdsl.cost.report import explain
from meshdsl.ir import Cond
from meshdsl.passes.simplify import simplify
from meshdsl.trace import trace

Predicate = Callable[[md.Tensor, md.Tensor], md.Tensor]
PREDICATES: dict[str, tuple[Predicate, float | None]] = {
    "counts": (lambda i, x: i % 100 == 0, 1 / 100),
    "counts from the end": (lambda i, x: i % 8 == 7, 1 / 8),
    "all but one": (lambda i, x: i % 8 != 1, 7 / 8),
    "never": (lambda i, x: i % 8 == 9, 0.0),
    "compares": (lambda i, x: i < 8, None),
    "counts down": (lambda i, x: i % -8 == 0, None),
    "other number": (lambda i, x: i % 8 == i, None),
    "floats": (lambda i, x: md.sum(x) % 8 == 0, None),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_a_predicate_that_counts_has_a_frequency(name: str) -> None:
    predicate, often = PREDICATES[name]

    def f(i: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.cond(predicate(i, x), lambda x: x + 1, lambda x: x - 1, x)

    graph = simplify(trace(f, [md.spec("", "int32"), md.spec("a:4")])[0])
    (cond,) = (eqn for eqn in graph.eqns if eqn.control is not None)
    assert isinstance(cond.control, Cond) and cond.control.frequency == (
        None if often is None else pytest.approx(often)
    )


def test_predicates_in_loops_count_their_trips() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        def body(carry: tuple[md.Tensor, md.Tensor], _: None) -> tuple[tuple[md.Tensor, md.Tensor], None]:
            i, x = carry
            return (i + 1, md.cond(i % 5 == 0, lambda x: md.sum(x) * x, lambda x: x, x)), None

        return md.scan(body, (md.tensor(np.int32(0)), x), None, over=md.Dim("step", 50))[0][1]

    (record,) = md.compile(f, "r:4", "a:r").program(md.spec("a:8")).collectives
    assert record.count == pytest.approx(10)


def weighed(often: float | None) -> md.Compiled:
    def f(p: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.cond(p, lambda x: md.sum(x, "a"), lambda x: md.sum(x * x * x, "a") / 3, x, frequency=often)

    return md.compile(f, "r:4", "a:r")


@pytest.mark.parametrize("often", [0.0, 0.25, None])
def test_costs_weigh_branches(often: float | None) -> None:
    arguments = md.spec("", "bool"), md.spec("a:1024 b:1024")
    cost, yes, no = (weighed(one).cost(*arguments, machine="tpu-v4") for one in (often, 1.0, 0.0))
    first, *_ = (line for line in cost.ledger.lines if line.collective is not None)
    assert first.trips == (1 if often is None else often)
    mean = max(yes.seconds, no.seconds) if often is None else often * yes.seconds + (1 - often) * no.seconds
    assert cost.seconds == pytest.approx(mean)
    assert str(cost) and explain.collective_text(cost, 0, [])  # reports print any count
    compiled = weighed(often)
    assert md.verify(compiled.lower(*arguments).as_text(), compiled.program(*arguments)).equal
