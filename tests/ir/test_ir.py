"""Records of the intermediate representation refuse what is not one of their words, and bodies of other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.dims import Dim
from meshdsl.ir import Because, Cause, Collective, Eqn, Graph, Op, Scan, Var, verify, walk
from meshdsl.layouts import Sharding
from meshdsl.lowering.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, Slice
from meshdsl.lowering.partition.index_map import Exchange
from meshdsl.lowering.permute import Permute
from meshdsl.lowering.ragged import RaggedAllToAll


@pytest.mark.parametrize("field", ["linear", "fuses", "reduce", "product"])
def test_an_operation_with_a_word_that_is_none_is_refused(field: str) -> None:
    wrong: Any = {field: "jiont"}
    with pytest.raises(ValueError, match="jiont"):
        Op("op", type=lambda x: x, kernel=lambda c, x: x, **wrong)


def test_a_value_of_a_graph_is_replicated() -> None:
    graph = md.compile(lambda x: md.sum(x), "r:2").graph(md.spec("a:4"))
    assert {v.sharding for eqn, _ in walk(graph) for v in (*eqn.ins, *eqn.outs)} == {Sharding()}


COLLECTIVES: list[Collective] = [  # the type checker holds each to the protocol
    Slice("a", ("r",)),
    AllGather("a", ("r",)),
    AllToAll("a", "b", ("r",)),
    AllReduce(("r",)),
    ReduceScatter("a", ("r",)),
    Permute((("a", ("r",), ("c",)),)),
    Exchange("a", ("r",), ((0, 1),)),
    RaggedAllToAll("a", "b", ("r",), ("a", "b"), "slot"),
]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=str)
def test_every_collective_satisfies_the_protocol(collective: Collective) -> None:
    assert collective.sends == (collective.name != "slice")
    assert collective.axes and isinstance(collective.wire_dtype(np.dtype("float32")), np.dtype)
    assert callable(collective.emit) and callable(collective.simulate) and callable(collective.step)


def scanned() -> tuple[Graph, Eqn]:
    def f(x: md.Tensor, xs: md.Tensor) -> Any:
        return md.scan(lambda c, x: (c + x, c), x, xs, over="t")

    graph = md.compile(f, "r:2").graph(md.spec("a:4"), md.spec("t:3 a:4"))
    return graph, next(eqn for eqn in graph.eqns if eqn.control)


def other(v: Var) -> Var:
    return Var((Dim("z", 2), *v.dims), v.dtype)


CHANGES: dict[str, Callable[[Scan], dict[str, Any]]] = {
    "a first carry": lambda loop: {"body": loop.body.replace(ins=(other(loop.body.ins[0]), *loop.body.ins[1:]))},
    "a stack and its rows": lambda loop: {"body": loop.body.replace(ins=(loop.body.ins[0], other(loop.body.ins[1])))},
}


@pytest.mark.parametrize("role", CHANGES)
def test_verify_refuses_a_loop_whose_body_takes_other_types(role: str) -> None:
    graph, eqn = scanned()
    assert isinstance(eqn.control, Scan)
    wrong = eqn.with_control(**CHANGES[role](eqn.control))
    with pytest.raises(md.InternalError, match=role):
        verify(graph.replace(eqns=tuple(wrong if e is eqn else e for e in graph.eqns)), "test")


@pytest.mark.parametrize("kind", Because)
def test_every_kind_of_cause_has_a_sentence(kind: Because) -> None:
    first = Cause(Because.REDUCES, "sum", ("x",), what="sum")
    cause = Cause(kind, "einsum", ("io", "rows"), ("w",), "tensors", (2, 3), (first,))
    assert "{" not in str(cause) and bool(str(cause)) == bool(cause)
    assert cause.about == ("io", "rows", "x")


def test_a_joined_collective_keeps_the_causes_of_its_members() -> None:
    def f(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> Any:
        return md.einsum(x, w, out="batch o"), md.einsum(x, v, out="batch p"), md.sum(x)

    specs = md.spec("batch:8 i:8"), md.spec("i:8 o:4"), md.spec("i:8 p:4")
    step = md.compile(
        md.grad(lambda w, v, x: sum(md.sum(md.square(y)) for y in f(x, w, v)[:2]), (0, 1)), "r:4", "batch:r"
    )
    update = md.WeightUpdate(bucket_bytes=1 << 20)
    joined = md.compile(step.function, "r:4", "batch:r", weight_update=update).program(specs[1], specs[2], specs[0])
    (record,) = [r for r in joined.collectives if r.cause.parts]
    apart = step.program(specs[1], specs[2], specs[0])
    assert set(record.cause.parts) == {r.cause for r in apart.collectives}
    assert record.cause.about == ("batch",)
