"""`md.shard` reaches the operations before it, along dims that they keep, where nothing else decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md

X, W = md.spec("n:6 m:4"), md.spec("m:4 k:3")


def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.shard(md.exp(md.einsum(md.relu(x), w, out="n k")), {"n": "a"})


def read_whole(x: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
    y = md.einsum(md.relu(x), w, out="n k")
    return md.shard(y, {"n": "a"}), md.max(y, "n")


def two_shards(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    y = md.einsum(md.relu(x), w, out="n k")
    return md.shard(y, {"n": "a"}) + md.shard(y, {"k": "a"})


def in_a_loop(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.scan(lambda c, row: (md.shard(md.exp(c * row), {"k": "a"}), None), md.ones("k:3"), md.exp(w), over="m")[0]


def sharded(f: Callable[..., Any], layout: str) -> dict[str, dict[str, str]]:
    program = md.compile(f, "a:2 b:2", layout).program(X, W)
    made = {str(eqn.op): eqn.outs[0] for eqn in program.eqns if str(eqn.op) in ("relu", "einsum", "exp")}
    return {name: {d: ",".join(axes) for d, axes in v.sharding.split} for name, v in made.items()}


@pytest.mark.parametrize(
    ("f", "layout", "wanted"),
    [
        (product, "", {"relu": {"n": "a"}, "einsum": {"n": "a"}, "exp": {"n": "a"}}),
        (product, "n:b", {"relu": {"n": "b"}, "einsum": {"n": "b"}, "exp": {"n": "b"}}),  # the layout decides about n
        (product, "m:a", {"relu": {"m": "a"}, "einsum": {}, "exp": {"n": "a"}}),  # the sum over m uses the axis
        (product, "k:a", {"relu": {}, "einsum": {"k": "a"}, "exp": {"k": "a"}}),
        (read_whole, "", {"relu": {}, "einsum": {}}),
        (two_shards, "", {"relu": {}, "einsum": {}}),
    ],
)
def test_an_annotation_reaches_operands(f: Callable[..., Any], layout: str, wanted: dict[str, Any]) -> None:
    assert sharded(f, layout) == wanted


@pytest.mark.parametrize("f", [product, read_whole, two_shards, in_a_loop])
@pytest.mark.parametrize("layout", ["", "n:b", "m:a", "k:b,a", "n:a m:b"])
def test_results_are_those_without_annotations(f: Callable[..., Any], layout: str) -> None:
    rng = np.random.default_rng(0)
    xs = [md.tensor(rng.integers(-2, 3, t.shape).astype("f4"), t.dims) for t in (X, W)]
    step, plain = md.compile(f, "a:2 b:2", layout), md.compile(f, "a:1 b:1", "")
    for got, want in zip(md.simulate(step.program(*xs), *xs), md.simulate(plain.program(*xs), *xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def noted(f: Callable[..., Any], layout: str) -> dict[str, str]:
    program = md.compile(f, "a:2 b:2", layout).program(X, W)
    return {str(eqn.op): program.note(eqn) for eqn in program.eqns if str(eqn.op) in ("relu", "einsum", "exp")}


def test_a_program_says_which_annotation_decided() -> None:
    line = product.__code__.co_firstlineno + 1
    found = noted(product, "")
    assert found["relu"].startswith("n over a by md.shard at ") and found["relu"].endswith(
        f"{__name__.split('.')[-1]}.py:{line}"
    )
    assert (found["einsum"], found["exp"]) == ("", "")  # their operands decide
    assert found["relu"] in str(md.compile(product, "a:2 b:2", "").program(X, W))
    assert noted(product, "n:b") == {"relu": "", "einsum": "", "exp": ""}  # the layout decides
    assert noted(product, "m:a")["exp"] == found["relu"]
