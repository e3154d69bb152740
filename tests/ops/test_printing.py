"""`md.print`: every shard once, in the order of the program, in loops and branches, and never removed as dead code."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

X = md.tensor(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32), "a b")


def everything(x: md.Tensor) -> md.Tensor:
    md.print(x, "x")
    total = md.sum(x, "a")
    md.print(total, "total")

    def step(c: md.Tensor, row: md.Tensor) -> Any:
        md.print(c, "carry")
        md.print(row, "row")
        return c + row, None

    last, _ = md.scan(step, total, x, over="a")
    md.print(md.ones("q:2"), "ones")
    counted = md.while_loop(lambda c: c < 3, lambda c: md.print(c, "count") + 1, 0)
    md.print(x, "again")
    chosen = md.cond(md.sum(last) > 0, lambda y: md.print(y, "yes") * 2, lambda y: md.print(y, "no"), last)
    return md.sum(chosen) + counted


ORDER = [
    "x", "total", "carry", "row", "carry", "row", "carry", "row", "ones", "count", "count", "count", "again", "yes",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], run: Any) -> list[str]:
    capsys.readouterr()
    jax.block_until_ready(run())
    jax.effects_barrier()
    return [line for line in capsys.readouterr().out.splitlines() if ":" in line]


def labels(lines: list[str]) -> list[str]:
    """The labels in order, one for each first shard."""
    heads = [re.match(r"(\w+)((?: \w+\[\d+:\d+\])*): ", line) for line in lines]
    return [head[1] for head in heads if head is not None and not re.search(r"\[[1-9]", head[2])]


@pytest.mark.parametrize("layout", ["", "b:x", "a:x", "a:y; b:x", "a:y"])
def test_prints_keep_their_order(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = md.compile(everything, "x:2 y:4", layout)
    program = compiled.program(X)
    simulated = printed(capsys, lambda: md.simulate(program, X))
    assert labels(simulated) == ORDER
    for _ in range(3):
        assert printed(capsys, lambda: compiled(X).stored) == simulated


def test_shards_are_labelled_and_copies_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    f = md.compile(lambda x: (md.print(x, "x"), md.sum(x))[1], "x:2 y:4", "a:y")
    assert printed(capsys, lambda: f(X).stored) == [
        "x a[0:1]: float32[a=3 b=2] [[1. 2.]]",
        "x a[1:2]: float32[a=3 b=2] [[3. 4.]]",
        "x a[2:3]: float32[a=3 b=2] [[5. 6.]]",
    ]
    pending = md.compile(lambda x: md.print(md.sum(x, "a"), "sum") * 2, "x:2 y:4", "a:y")
    assert printed(capsys, lambda: pending(X).stored) == ["sum: float32[b=2] [ 9. 12.]"]


def test_gradients_print_the_forward_values_once(capsys: pytest.CaptureFixture[str]) -> None:
    eager = printed(capsys, lambda: md.grad(everything)(X).stored)
    compiled = printed(capsys, lambda: md.compile(md.grad(everything), "x:2", "")(X).stored)
    assert labels(eager) == labels(compiled) == ORDER
    again = md.grad(lambda x: md.sum(md.checkpoint(lambda x: md.sin(md.print(x, "kept")))(x)))
    assert len(printed(capsys, lambda: md.compile(again, "", "")(X.sum("a")).stored)) == 1


def test_vmap_prints_one_more_dim(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, lambda: md.vmap(lambda row: md.print(md.sum(row), "s"), over="a")(X).stored)
    assert lines == ["s: float32[a=3] [ 3.  7. 11.]"]


def test_empty_tensors_and_default_labels(capsys: pytest.CaptureFixture[str]) -> None:
    empty = md.compile(lambda x: (md.print(x), md.sum(x))[1], "x:2", "a:x")
    (line,) = printed(capsys, lambda: empty(md.zeros("a:0 b:2")).stored)
    assert line.startswith(f"{__file__}:") and "float32[a=0 b=2] []" in line
    with pytest.raises(md.ShapeError, match=r"label of md\.print is a text"):
        md.print(X, 3)  # pyright: ignore[reportArgumentType]


def test_a_program_without_prints_is_unchanged() -> None:
    assert np.array_equal(md.compile(lambda x: x * 2, "x:2", "a:x")(X).numpy(), 2 * X.numpy())
    assert not [
        s for s in md.compile(lambda x: x * 2, "x:2", "a:x").history(X).stages if s.name == "order prints" and s.changed
    ]
