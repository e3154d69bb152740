"""`md.print` and `md.callback`: every shard once, in the order of the program, in loops and branches, never removed."""

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


@pytest.mark.usefixtures("at_once_in_jax")
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


@pytest.mark.parametrize("layout", ["", "b:x", "a:x", "a:y; b:x", "a:y"])
def test_a_callback_gets_every_shard_of_every_step_once(layout: str) -> None:
    got: list[tuple[dict[str, slice], np.ndarray]] = []

    def give(block: np.ndarray, part: dict[str, slice]) -> None:
        got.append((part, block))

    def running(x: md.Tensor) -> md.Tensor:
        return md.scan(lambda c, _: (md.callback(c + x, give), None), x, md.ones("t:3"), over="t")[0]

    def steps() -> list[np.ndarray]:
        """The values that were given, put together from their shards: a step ends when it is full."""
        wholes, filled = [], X.numpy().size
        for part, block in got:
            if filled == X.numpy().size:
                wholes, filled = [*wholes, np.full(X.numpy().shape, np.nan)], 0
            where = part["a"], part["b"]
            assert np.isnan(wholes[-1][where]).all() and block.shape == wholes[-1][where].shape and block.size
            wholes[-1][where], filled = block, filled + block.size
        got.clear()
        return wholes

    compiled = md.compile(running, "x:2 y:4", layout)
    for run in (lambda: md.simulate(compiled.program(X), X), lambda: compiled(X).stored):
        jax.block_until_ready(run())
        jax.effects_barrier()
        assert [np.array_equal(w, X.numpy() * n) for w, n in zip(steps(), (2, 3, 4), strict=True)] == [True] * 3


def test_a_callback_and_prints_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: md.Tensor) -> md.Tensor:
        md.print(x, "first")
        md.callback(x * 2, lambda block, part: print(f"second: {part['a'].start} {block[:, 0]}"))
        md.print(x, "third")
        return x

    compiled = md.compile(step, "x:2", "a:x")
    lines = [line.split(":")[0].split()[0] for line in printed(capsys, lambda: compiled(X).stored)]
    assert lines == ["first", "first", "second", "second", "third", "third"]
    gradient = md.compile(md.grad(lambda x: md.sum(md.callback(x * x, lambda block, part: print("x:")))), "x:2", "b:x")
    assert printed(capsys, lambda: gradient(X).stored) == ["x:", "x:"]
    assert np.array_equal(gradient(X).numpy(), 2 * X.numpy())


def test_errors_of_callbacks() -> None:
    with pytest.raises(md.ShapeError, match=r"md\.callback calls a function with each shard; got 3"):
        md.callback(X, 3)  # pyright: ignore[reportArgumentType]

    def fails(block: np.ndarray, part: dict[str, slice]) -> None:
        raise ValueError("no space left")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no space left"):
        jax.block_until_ready(md.compile(lambda x: md.callback(x, fails), "x:2", "a:x")(X).stored)
    plain = md.compile(lambda x: md.print(x, "after"), "x:2", "a:x")
    assert np.array_equal(plain(X).numpy(), X.numpy())


def test_a_program_without_prints_is_unchanged() -> None:
    assert np.array_equal(md.compile(lambda x: x * 2, "x:2", "a:x")(X).numpy(), 2 * X.numpy())
    assert not [
        s for s in md.compile(lambda x: x * 2, "x:2", "a:x").history(X).stages if s.name == "order prints" and s.changed
    ]
