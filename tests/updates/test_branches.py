"""Updates beside and inside branches (Xu et al., 2020, 3.1 and 3.2): shards pass them, and rare readers gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import walk


def gradient(w: md.Tensor, x: md.Tensor) -> Any:
    return md.value_and_grad(lambda w: md.sum(md.square(md.dot(x, w, "io"))))(w)


def step(w: md.Tensor, m: md.Tensor, x: md.Tensor) -> Any:
    """Momentum in whole numbers: the loss, and the new weight and momentum."""
    value, g = gradient(w, x)
    m = 2 * m + g
    return value, w - m, m


def summary(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    _, w, m = step(w, m, x)
    return w, m, md.cond(i % 100 == 0, lambda m: md.sum(md.abs(m)), lambda m: md.zeros("", m.dtype), m)


def exported(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    _, w, m = step(w, m, x)
    return w, m, md.cond(i % 100 == 0, lambda m: m, lambda m: md.zeros(m.dims, m.dtype), m)


def evaluated(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    _, w, m = step(w, m, x)
    return w, m, md.cond(i % 100 == 0, lambda w: md.sum(md.dot(x, w, "io")), lambda w: md.zeros("", w.dtype), w)


def skipped(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    value, new_w, new_m = step(w, m, x)
    return md.cond(value < 1e9, lambda *new: new[:2], lambda *new: new[2:], new_w, new_m, w, m)


def inside(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    return md.cond(i % 3 != 1, lambda: step(w, m, x)[1:], lambda: (w, m))


def nested(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    _, new_w, new_m = step(w, m, x)

    def often(w: md.Tensor, old: md.Tensor) -> Any:
        return md.cond(i == 1, lambda w, old: (old, md.max(w)), lambda w, old: (w, md.min(w)), w, old)

    w, metric = md.cond(i < 2, often, lambda w, old: (old - w, md.sum(w)), new_w, w)
    return w, new_m, metric


def two(w: md.Tensor, m: md.Tensor, x: md.Tensor) -> Any:
    """Two weights, each with an update of its own."""
    return [p - 2 * gradient(p, x)[1] for p in (w, m)]


def either(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    w, m = two(w, m, x)
    return w, m, md.sum(md.abs(md.cond(i % 3 == 0, lambda w, m: w, lambda w, m: m, w, m)))


def restored(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    w, m = two(w, m, x)
    return w, md.cond(i % 3 == 0, lambda w, m: w, lambda w, m: m, w, m)


def read_otherwise(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    _, w, m = step(w, m, x)
    return w, md.prefer(m, "hidden"), md.rename(m, io="rounds"), md.print(w, "w")


def with_another_gradient(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    new = w - 2 * gradient(w, x)[1]
    return new, m + new + 3 * md.grad(lambda m: md.sum(md.dot(x, m, "io")))(m)


def evaluated_outside_too(w: md.Tensor, m: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
    w, m, inside = evaluated(w, m, x, i)
    return w, m, inside + md.max(md.dot(x, w, "io"))


CASES: list[tuple[Callable[..., Any], list[str], list[str]]] = [  # collectives outside branches, and inside them
    (summary, ["all_gather", "reduce_scatter"], ["all_reduce"]),
    (exported, ["all_gather", "reduce_scatter"], ["all_gather"]),
    (evaluated, ["all_gather", "reduce_scatter"], ["all_gather", "all_reduce"]),
    (skipped, ["all_gather", "all_reduce", "reduce_scatter"], []),
    (inside, [], ["all_gather", "reduce_scatter"]),
    (either, ["all_gather"] * 2 + ["all_reduce"] + ["reduce_scatter"] * 2, []),
    (restored, ["all_gather"] * 2 + ["reduce_scatter"] * 2, []),
    (read_otherwise, ["all_gather"] * 3 + ["reduce_scatter"], []),
    (with_another_gradient, ["all_gather"] + ["reduce_scatter"] * 2, []),
    (evaluated_outside_too, ["all_gather"] * 2 + ["all_reduce", "reduce_scatter"], ["all_reduce"]),
    (nested, ["all_gather", "reduce_scatter"], ["all_reduce", "all_reduce", "all_reduce"]),
]


def kinds(eqns: Iterator[Any]) -> list[str]:
    return [eqn.op.name for eqn in eqns if eqn.sends]


@pytest.mark.parametrize(("function", "outside", "in_branches"), CASES, ids=[case[0].__name__ for case in CASES])
def test_shards_pass_branches_and_rare_readers_gather(
    function: Callable[..., Any], outside: list[str], in_branches: list[str]
) -> None:
    rng = np.random.default_rng(1)
    w, m = (md.tensor(rng.integers(-2, 3, (5, 6)).astype("float64"), "io hidden") for _ in range(2))
    x = md.tensor(rng.integers(-2, 3, (7, 5)).astype("float64"), "batch io")
    layout = "batch:rows rounds:rows" if function is read_otherwise else "batch:rows"
    sharded = md.compile(function, "rows:4", layout, weight_update="sharded")
    for i in (0, 1, 2):
        args = w, m, x, md.cast(i, "int32")
        right, got = jax.tree.leaves(function(*args)), md.simulate(sharded.program(*args), *args)
        for a, b in zip(right, got, strict=True):
            np.testing.assert_array_equal(a.numpy(), b)
    program = sharded.program(w, m, x, md.cast(0, "int32"))
    top = kinds(iter(program.eqns))
    everywhere = kinds(eqn for eqn, _ in walk(program))
    assert sorted(top) == sorted(outside)
    for kind in top:
        everywhere.remove(kind)
    assert sorted(everywhere) == sorted(in_branches)
    assert [v.dims[-1].name for v in program.ins[:2]] == ["hidden__rows"] * 2  # weight and momentum stay split
    acting = [v for eqn, _ in walk(program) if not eqn.collective and eqn.operation.acts for v in eqn.ins]
    assert not any(d.name == "hidden__rows" for v in acting for d in v.dims)  # a print shows the user's dims


def test_auto_weighs_what_branches_gather() -> None:
    w, x = md.spec("io:1024 hidden:4096"), md.spec("batch:512 io:1024")

    def saved(often: float) -> float:
        def step(w: md.Tensor, x: md.Tensor, i: md.Tensor) -> Any:
            w = w - 2 * gradient(w, x)[1]
            return w, md.cond(i == 0, lambda w: w, lambda w: md.zeros(w.dims), w, frequency=often)

        compiled = md.compile(step, "rows:8", "batch:rows", weight_update="auto", machine="tpu-v4")
        compiled.program(w, x, md.spec("", "int32"))
        (decision,) = compiled.weight_update.decisions
        assert decision.seconds_saved is not None and decision.sharded == (decision.seconds_saved > 0)
        return decision.seconds_saved

    assert saved(0.01) > 0 > saved(1.0)
