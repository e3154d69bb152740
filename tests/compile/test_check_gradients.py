"""`md.check_gradients` accepts right derivatives, on one device and on several, and finds the place of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md

X = md.tensor(np.random.default_rng(0).normal(size=(4, 3)), "batch io")
W = md.tensor(np.random.default_rng(1).normal(size=(3, 2)), "io hidden")
PLACES = [("", ""), ("rows:4", "batch:rows"), ("rows:2 cols:2", "batch:rows; io:cols"), ("rows:2", "io:rows")]

RIGHT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda x, w: md.tanh(md.einsum(x, w, out="batch hidden")), (X, W)),
    "softmax": (lambda x: md.log_softmax(x, "io"), (X,)),
    "scan": (lambda x: md.scan(lambda c, row: (md.sin(c + row), c), md.sum(x, "batch"), x, over="batch"), (X,)),
    "of a dict, with integers": (lambda p: {"y": md.take(p["x"], p["i"], "batch"), "i": p["i"] + 1},
                                 ({"x": X, "i": md.tensor([0, 2], "n")},)),
    "complex": (lambda x: md.exp(x * x), (md.cast(X, "complex64") * (1 + 0.5j),)),
    "custom": (md.custom_vjp(md.square, lambda x: (md.square(x), x), lambda x, ct: (2 * x * ct,)), (X,)),
    "bfloat16 arguments": (lambda x: md.sin(x), (md.cast(X, "bfloat16"),)),
    "float32 inside": (lambda x: md.sin(md.cast(x, "float32")), (X,)),
    "numbers": (lambda x, s: x * s, (X, 2.0)),
    "small and large": (lambda x: md.log(x), (md.tensor([0.01, 1.0, 1e6], "a"),)),
    "no elements": (lambda x: md.sum(x * x), (md.zeros("a:0"),)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_derivatives_pass(name: str) -> None:
    f, args = RIGHT[name]
    for mesh, layout in PLACES if name in ("product", "softmax", "custom") else PLACES[:1]:
        md.check_gradients(f, *args, mesh=mesh, layout=layout)


def rule(bwd: Callable[..., Any]) -> Callable[..., Any]:
    def times(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return x * w

    return md.custom_vjp(times, lambda x, w: (x * w, (x, w)), lambda saved, ct: bwd(*saved, ct))


AT = md.tensor(np.array([0.0, 0, 1]), "io")  # one wrong element
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "forgets the cotangent": (lambda x, w, ct: (w * 1, ct * x), "x at"),
    "forgets it for the second": (lambda x, w, ct: (ct * w, x * 1), "w at"),
    "twice": (lambda x, w, ct: (2 * ct * w, ct * x), "x at"),
    "a part": (lambda x, w, ct: (ct * w, ct * x * 1.001), "w at"),
    "another sign": (lambda x, w, ct: (-ct * w, ct * x), "x at"),
    "exchanged": (lambda x, w, ct: (ct * x, ct * w), "x at"),
    "none": (lambda x, w, ct: (ct * w, None), "w at"),
    "a number": (lambda x, w, ct: (1.0, ct * x), "x at"),
    "one element": (lambda x, w, ct: (ct * w * (1 + AT), ct * x), r"x at \[batch=\d, io=2\]"),
    "NaN": (lambda x, w, ct: (ct * w * np.nan, ct * x), "x at"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("mesh", "layout"), PLACES[:2])
def test_wrong_derivatives_are_found_with_their_argument_and_element(name: str, mesh: str, layout: str) -> None:
    bwd, place = WRONG[name]
    text = rf"md\.vjp of times is wrong for {place}.*\n  it gives \S+, and differences of values \S+, for a random"
    with pytest.raises(md.MeshdslError, match=text) as found:
        md.check_gradients(rule(bwd), X, X + 3, mesh=mesh, layout=layout)
    assert ("on rows:4 under 'batch:rows'" in str(found.value)) == bool(mesh)


def test_the_figures_of_a_wrong_element_are_its_derivatives() -> None:
    with pytest.raises(md.MeshdslError) as found:
        md.check_gradients(rule(lambda x, w, ct: (3 * ct * w, ct * x)), X, X + 3)
    ours, theirs = map(float, re.findall(r"gives (\S+), and differences of values (\S+),", str(found.value))[0])
    np.testing.assert_allclose(ours, 3 * theirs, rtol=1e-3)


def test_what_cannot_be_checked_is_refused() -> None:
    for f, args, text in [
        (lambda x: md.cast(x, "bfloat16") * 2, (X,), "f computes in bfloat16"),
        (lambda x: x + 1, (md.iota("a:3"),), "needs a floating argument"),
        (lambda x: md.cast(x, "int32"), (X,), "needs a floating result"),
        (lambda x: md.log(x - x), (X,), "is not finite"),
    ]:
        with pytest.raises(md.ShapeError, match=text):
            md.check_gradients(f, *args)


def test_64_bits_are_enabled_for_the_time_of_the_call() -> None:
    with jax.enable_x64(False):
        x = md.tensor(np.ones(3, np.float32), "a")
        seen: list[Any] = []
        md.check_gradients(lambda x: seen.append(x.dtype) or md.sin(x), x)
        assert {str(dtype) for dtype in seen} == {"float64"} and not jax.config.read("jax_enable_x64")
        with pytest.raises(md.MeshdslError, match="is wrong for x"):
            md.check_gradients(rule(lambda x, w, ct: (w * 1, ct * x)), x, x)


def test_a_number_is_the_cotangent_of_every_element() -> None:
    f = md.custom_vjp(lambda p, y: md.sum(p["a"]) + md.sum(y), lambda p, y: (md.sum(p["a"]) + md.sum(y), None),
                      lambda _, ct: (2, 0.5))  # fmt: skip
    ones = {"a": md.ones("a:2", "float32"), "b": md.ones("b:3", "float64")}
    p, y = md.grad(f, argnums=(0, 1))(ones, md.ones("c:2"))
    assert [(str(x.dtype), x.numpy().tolist()) for x in (p["a"], p["b"], y)] == [
        ("float32", [2, 2]), ("float64", [2, 2, 2]), ("float32", [0.5, 0.5]),
    ]  # fmt: skip
    short = md.custom_vjp(lambda p: md.sum(p["a"]), lambda p: (md.sum(p["a"]), None), lambda _, ct: ({"a": 1.0},))
    with pytest.raises(md.ShapeError, match="returned 1 cotangents for an argument of 2 tensors"):
        md.grad(short)(ones)
