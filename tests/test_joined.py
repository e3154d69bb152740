"""Functions that are compiled together give what each gives alone, and one that is wrong fails alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.compile import signature
from tests.joined import calls, calls_in_groups, in_groups

X, W = (md.tensor(np.random.default_rng(i).normal(size=n), dims) for i, (n, dims) in enumerate(
    (((6, 8), "batch io"), ((8, 5), "io hidden"))
))  # fmt: skip
PLACES = [("r:2 s:2", "batch:r; hidden:s"), ("a:4", "io:a"), ("r:3", "batch:r"), ("r:2 s:2", ""), ("r:4 s:2", "io:s,r")]


def step(w: md.Tensor, x: md.Tensor) -> Any:
    value, grad = md.value_and_grad(lambda w: md.mean(md.tanh(md.dot(x, w, "io"))))(w)
    return {"value": value, "new": w - grad}


def test_calls_give_what_each_call_gives() -> None:
    each = [(md.compile(step, *place), (W, X)) for place in PLACES]
    for place, found, (function, args) in zip(PLACES, calls(*each), each, strict=True):
        alone = function(*args)
        assert found.keys() == alone.keys(), place
        for name, x in alone.items():
            assert (found[name].dims, found[name].dtype) == (x.dims, x.dtype)
            assert found[name].stored.sharding == x.stored.sharding, (place, name)
            np.testing.assert_allclose(found[name].numpy(), x.numpy(), rtol=1e-13, err_msg=f"{place} {name}")


def test_calls_run_the_program_of_each_and_a_wrong_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [md.compile(step, *place) for place in PLACES]
    right, emitted = [f(W, X)["new"].numpy() for f in steps], []
    wrong, emit = steps[1].program(W, X), signature.emit

    def one_is_wrong(program: md.Program, *rest: Any) -> Any:
        emitted.append(program)
        f = emit(program, *rest)
        return (lambda *xs: [y + 1 for y in f(*xs)]) if program is wrong else f

    monkeypatch.setattr(signature, "emit", one_is_wrong)
    found = calls_in_groups({place: lambda f=f: (f, (W, X)) for place, f in zip(PLACES, steps, strict=True)})
    same = [np.allclose(found(place)["new"].numpy(), x) for place, x in zip(PLACES, right, strict=True)]
    assert same == [True, False, True, True, True]
    assert sorted(map(id, emitted)) == sorted(id(f.program(W, X)) for f in steps)


def test_a_function_that_raises_fails_alone() -> None:
    found = in_groups({"right": jnp.sin, "wrong": lambda x: x.reshape(7), "also right": jnp.cos}, np.ones(3))
    assert found("right").tolist() == [jnp.sin(1.0)] * 3 and found("also right").tolist() == [jnp.cos(1.0)] * 3
    with pytest.raises(TypeError, match="reshape"):
        found("wrong")


def test_groups_are_one_program_each() -> None:
    traced: list[int] = []
    found = in_groups({i: lambda x, i=i: traced.append(i) or x * i for i in range(10)}, np.ones(2), size=4)
    assert [float(found(i)[0]) for i in (5, 4, 6)] == [5.0, 4.0, 6.0] and traced == [4, 5, 6, 7]
    assert float(found(0)[0]) == 0 and isinstance(found(9), jax.Array) and traced == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9]
