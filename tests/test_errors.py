"""Every misuse of the language gets an error that says what was asked, what is there, and one way out.

The texts are tests/golden/errors.txt, to be read as a page; line numbers of this file are left out of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.trace import trace

x = md.tensor(np.ones((2, 3), np.float32), "batch io")
w = md.tensor(np.ones((3, 4), np.float32), "io hidden")
row = md.tensor(np.arange(2, dtype=np.int32), "batch")
zero = md.tensor(np.int32(0))
too_short = md.custom_vjp(lambda a, b: md.sum(a * b), lambda a, b: (md.sum(a * b), a), lambda a, ct: (ct * a,))
other_dims = md.custom_vjp(md.sum, lambda a: (md.sum(a), ()), lambda _, ct: (ct,))
steps = md.tensor(np.ones(3, np.float32), "time")


def traced(f: Callable[..., Any]) -> Any:
    """`f` of a traced float32[batch=2 io=3]."""
    return trace(f, [x.type])


def outside(a: md.Tensor) -> Callable[..., Any]:
    return md.custom_vjp(lambda b: md.sum(a * b), lambda b: (md.sum(a * b), ()), lambda _, ct: (ct * x,))


def leak() -> Any:
    kept = []
    traced(lambda x: kept.append(x * 2) or x)
    return kept[0] + 1


def misuse() -> dict[str, Callable[[], Any]]:
    """Mistakes of newcomers, by their names in the golden file."""
    return {
        "a dim twice in a tensor": lambda: md.tensor(np.ones((2, 2)), "batch batch"),
        "a dim twice, in two sizes": lambda: md.spec("batch:2 batch:3"),
        "no such dtype": lambda: md.spec("batch:2", "float33"),
        "a dim twice after renaming": lambda: md.rename(x, io="batch"),
        "a dim twice in a result": lambda: md.einsum(x, w, out="batch batch"),
        "a dim of another size": lambda: x + md.tensor(np.ones(5, np.float32), "io"),
        "a dim of another size in einsum": lambda: md.einsum(x, md.tensor(np.ones(5, np.float32), "io"), out="batch"),
        "a dim of another size by md.Dim": lambda: md.sum(x, md.Dim("io", 7)),
        "an outer product": lambda: x + w,
        "einsum with an unknown dim": lambda: md.einsum(x, w, out="batch hiden"),
        "einsum with a new dim": lambda: md.einsum(x, w, out=[md.Dim("depth", 3)]),
        "a misspelt dim": lambda: md.sum(x, "bach"),
        "a dim without its size": lambda: md.iota("n"),
        "a dim with a bad name": lambda: md.Dim("3d", 2),
        "a dim with a bad size": lambda: md.Dim("time", 2.5),  # type: ignore[arg-type]  # a mistake, tested
        "a dim as a number": lambda: md.top_k(x, "io", 2),  # type: ignore[arg-type]  # a mistake, tested
        "dims as text without a size": lambda: md.dims("batch io"),
        "too few dims for an array": lambda: md.tensor(np.ones((2, 3)), "batch"),
        "dims that do not fit an array": lambda: md.tensor(np.ones((2, 3)), "batch:2 io:4"),
        "a Python if": lambda: traced(lambda x: x if md.sum(x) > 0 else -x),
        "a Python and": lambda: traced(lambda x: x and x),
        "the truth of many": lambda: bool(x > 0),
        "a number of a traced tensor": lambda: traced(lambda x: float(md.sum(x))),
        "NumPy of a traced tensor": lambda: traced(lambda x: np.asarray(x)),
        "a traced tensor after its trace": leak,
        "an index": lambda: x[0],
        "a loop over a tensor": lambda: list(x),
        "the @ operator": lambda: x @ w,  # type: ignore[operator]  # a mistake, tested
        "an array as an operand": lambda: x * np.ones(3),
        "an array as the first operand": lambda: jnp.ones(3) * x,
        "an array as an argument": lambda: md.exp(np.ones(3)),
        "None as an argument": lambda: md.exp(None),
        "a number of many": lambda: float(x),
        "a condition that is no boolean": lambda: md.where(x, x, 0),
        "logical_not of floats": lambda: md.logical_not(x),
        "& of floats": lambda: x & x,
        "a shift of floats": lambda: x << 1,
        "an unknown dtype": lambda: md.cast(x, "flot32"),
        "indices that are floats": lambda: md.take(w, x, "io"),
        "put_add of too many dims": lambda: md.put_add(steps, row, md.broadcast(1.0, "batch:2 extra:3"), "time"),
        "more than there are": lambda: md.top_k(x, "io", md.Dim("k", 9)),
        "a slice beyond the end": lambda: md.slice(x, "io", 1, 3),
        "another number of elements": lambda: md.reshape(x, "n:4"),
        "unflatten that does not fit": lambda: md.unflatten(x, "io", "a:2 b:2"),
        "transpose that forgets a dim": lambda: md.transpose(x, "io"),
        "broadcast that loses a dim": lambda: md.broadcast(x, "io:3 layer:2"),
        "concat of different dims": lambda: md.concat([x, w], "io"),
        "stack of different dims": lambda: md.stack([x, w], "layer"),
        "stack of nothing": lambda: md.stack([], "layer"),
        "a maximum of nothing": lambda: md.max(md.tensor(np.ones(0), "batch")),
        "two dims where one is meant": lambda: md.argmax(x, "batch io"),
        "map of a reduction": lambda: md.map(jnp.sum, x),
        "map of a norm": lambda: md.map(lambda x: x / jnp.linalg.norm(x), x),
        "map of a running sum": lambda: md.map(lambda x: jnp.cumsum(x, 0), x),
        "map that reverses": lambda: md.map(lambda x: jnp.flip(x, 0), x),
        "map that reads a size": lambda: md.map(lambda x: x / x.size, x),
        "map that draws": lambda: md.map(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), x),
        "map with an array from outside": lambda: md.map(lambda x: x * jnp.ones((2, 3)), x),
        "iota beyond its dtype": lambda: md.iota("vocab:300", "uint8"),
        "a gradient of many numbers": lambda: md.grad(lambda x: x * x)(x),
        "a gradient by integers": lambda: md.grad(lambda i: md.sum(i * 2.0))(row),
        "a gradient by a missing argument": lambda: md.grad(md.sum, argnums=2)(x),
        "aux that is not there": lambda: md.value_and_grad(md.sum, has_aux=True)(x),
        "a custom gradient too short": lambda: md.grad(lambda a: too_short(a, a))(x),
        "a custom gradient of other dims": lambda: md.grad(lambda a: other_dims(a))(x),
        "a custom gradient of what is outside": lambda: md.grad(lambda a: outside(a)(x))(x),
        "a scan that returns no pair": lambda: md.scan(lambda c, v: c + v, 0.0, steps, over="time"),
        "a scan whose carry changes dtype": lambda: md.scan(lambda c, v: (c + v, v), zero, steps, over="time"),
        "a scan whose carry changes dims": lambda: md.scan(lambda c, v: (c * v, v), md.tensor(1.0), x, over="batch"),
        "a scan over an unknown dim": lambda: md.scan(lambda c, v: (c, v), 0.0, steps, over="tim"),
        "a predicate of many": lambda: md.cond(x > 0, lambda x: x, lambda x: x, x),
        "branches that differ": lambda: md.cond(True, lambda x: x, md.sum, x),
        "an unknown policy": lambda: md.checkpoint(md.exp, policy="dots"),
        "a key that is none": lambda: md.random.normal(x, "n:3"),
        "random integers as floats": lambda: md.random.normal(md.random.key(0), "n:3", "int32"),
        "a seed that is a float": lambda: md.random.key(1.5),
    }  # fmt: skip


def test_texts_of_errors(golden: Callable[[str, str], None]) -> None:
    page = []
    for name, f in misuse().items():
        with pytest.raises(md.MeshdslError) as caught:
            f()
        text = re.sub(r"at \S*test_errors\.py:\d+", "at test_errors.py", str(caught.value))
        page.append(f"# {name}\n{type(caught.value).__name__}: {text}\n")
    golden("errors", "\n".join(page))


def test_every_error_shows_the_users_line() -> None:
    for name, f in misuse().items():
        with pytest.raises(md.MeshdslError) as caught:
            f()
        last = str(caught.value).splitlines()[-1]
        assert re.match(r"  at \S*test_errors\.py:\d+  \S", last), f"{name}: {last}"


def test_operators_leave_strangers_to_python() -> None:
    for stranger in ("a", [1], object()):
        with pytest.raises(TypeError):
            x + stranger  # type: ignore[operator]  # a mistake, tested
        assert (x == stranger) is False
