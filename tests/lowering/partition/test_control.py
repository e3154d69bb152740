"""Shardings at the borders of branches and loops: results of either branch decide, and carries reach a fixed point."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

X, W = md.spec("batch:8 io:5", "float64"), md.spec("io:5 h:6", "float64")


def bytes_sent(program: Any) -> float:
    return sum(record.wire_bytes * record.count for record in program.collectives)


def zeros(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.zeros("batch:8 h:6", "float64")


def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.einsum(x, w, out="batch h")


def whole(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.broadcast(md.sum(w, "io"), "batch:8 h:6")


@pytest.mark.parametrize("branches", [(zeros, product), (product, zeros)])
def test_a_result_is_split_as_the_branch_that_computes_it(branches: Any) -> None:
    step = md.compile(lambda p, x, w: md.sum(md.cond(p, *branches, x, w)), "r:4", "batch:r")
    (record,) = step.program(md.spec("", "bool"), X, W).collectives
    assert record.kind == "all_reduce"  # of the sum; nothing is gathered in a branch


@pytest.mark.parametrize(("often", "cut"), [(0.001, "h"), (0.999, "batch")])
def test_where_branches_differ_the_one_that_runs_more_often_decides(often: float, cut: str) -> None:
    def f(p: md.Tensor, x: md.Tensor) -> md.Tensor:
        return md.cond(p, lambda x: md.shard(x, {"batch": "r"}), lambda x: md.shard(x, {"h": "r"}), x, frequency=often)

    program = md.compile(f, "r:4", "").program(md.spec("", "bool"), md.spec("batch:8 h:8"))
    (cond,) = (eqn for eqn in program.eqns if eqn.control is not None)
    assert cond.outs[0].sharding.axes(cut) == ("r",)


def passed_on(x: md.Tensor) -> Any:
    """Five carries that each take the value of the next, beside a sum over trips."""

    def body(carry: Any, _: None) -> Any:
        total, *others = carry
        return (total + md.sum(x, "batch"), *others[1:], x), None

    z, s = md.zeros("batch:8 h:6", "float64"), md.zeros("h:6", "float64")
    return md.scan(body, (s, z, z, z, z, z), None, over=md.Dim("t", 9))[0]


def exchanged(x: md.Tensor) -> Any:
    """Two carries that change places, and are split along different dims."""
    first = md.shard(x, {"h": "r"}), md.shard(2 * x, {"batch": "r"})
    return md.scan(lambda c, _: ((c[1], c[0]), None), first, None, over=md.Dim("t", 9))[0]


@pytest.mark.parametrize(("loop", "sent"), [(passed_on, 72), (exchanged, 9 * 2 * 96 + 2 * 336)])
def test_carries_reach_a_fixed_point_however_many_attempts_it_takes(loop: Any, sent: int) -> None:
    x = md.tensor(np.arange(48.0).reshape(8, 6), "batch h")
    program = md.compile(loop, "r:4", "batch:r" if loop is passed_on else "").program(x)
    assert bytes_sent(program) == sent
    for right, got in zip(jax.tree.leaves(loop(x)), md.simulate(program, x), strict=True):
        np.testing.assert_array_equal(right.numpy(), got)
