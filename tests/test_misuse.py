"""Wrong calls: random ones, and those that people make. The long form of the first is `python -m tests.misuse`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests import misuse

X = md.tensor([[1.0, 2.0], [3.0, 4.0]], "batch io")
ON_ROWS = md.compile(lambda x: x * 2, "rows:2", "batch:rows")
ON_COLS = md.compile(lambda x: x * 2, "cols:4", "io:cols")


def donated() -> md.Tensor:
    """A tensor that a compiled function has overwritten."""
    x = md.compile(lambda x: x * 2, "rows:2", "batch:rows")(X)
    md.compile(lambda x: x * 3, "rows:2", "batch:rows", donate=0)(x)
    return x


def odd(value: Any) -> Any:
    """An argument of a type that a type checker would refuse."""
    return value


def assign(name: str, value: Any) -> None:
    setattr(X, name, value)


# The call, and a part of the message
REALISTIC: dict[str, tuple[Callable[[], Any], str]] = {
    "mesh of a number": (lambda: md.Mesh(odd(8)), "a mesh is 8 (int); expected str"),
    "layout of a number": (lambda: md.Layout(odd(3)), "a layout is 3 (int); expected str"),
    "unknown axis": (lambda: md.shard(X, odd("batch:zz")), ""),
    "dims of nothing": (lambda: md.dims(odd(None)), "None"),
    "JAX key": (lambda: md.random.normal(odd(jax.random.key(0, impl="rbg")), "a:3"), "md.random.key(seed)"),
    "JAX key as a tensor": (lambda: md.tensor(jax.random.key(0, impl="rbg")), "md.random.key(seed)"),
    "ragged rows": (lambda: md.tensor([[1, 2], [3]], "a b"), "different lengths"),
    "objects": (lambda: md.tensor(np.array(["a", None], object), "a"), "numbers or booleans;"),
    "nothing": (lambda: md.tensor(None), "numbers or booleans;"),
    "beyond 64 bits": (lambda: md.tensor([10**30], "a"), "numbers or booleans;"),
    "slice from a half": (lambda: md.slice(X, "io", odd(0.5), 1), "0.5 (float); expected int"),
    "shift by a text": (lambda: md.shift(X, "io", odd("1")), "'1' (str); expected int"),
    "empty range": (lambda: md.random.randint(md.random.key(0), "a:2", 5, 1), "no integer from 5 to below 1"),
    "set dims": (lambda: assign("dims", ()), "a tensor does not change"),
    "rate as text": (lambda: md.optim.adamw(odd("0.1")), "the learning rate is a number or a function, got str"),
    "unknown dtype": (lambda: md.nn.Precision(compute="float33"), "float33"),
    "layer outside a model": (lambda: md.nn.layer_norm(X, "io"), "outside a model"),
    "jnp array": (lambda: md.sum(jnp.ones(3)), "md.tensor(array, dims)"),
    "in jit": (lambda: jax.jit(lambda a: md.sum(a))(jnp.ones(3)), "a JAX transformation"),
    "tensors of two meshes": (lambda: ON_ROWS(X) + ON_COLS(X), "different devices"),
    "donated tensor": (lambda: donated() + 1, "was donated to an earlier call"),
    "too few arguments": (lambda: ON_ROWS(), "takes"),
    "einsum of nothing": (lambda: md.einsum(out="io"), "at least one tensor"),
    "norm of integers": (lambda: md.optim.global_norm({"w": md.tensor([1], "a")}), "a norm needs floats"),
    "machine by number": (lambda: md.machine(odd(3)), "expected str"),
    "optimizer of a text": (lambda: md.optim.sgd(odd("fast")), "the learning rate is a number or a function"),
    "model of a text": (lambda: md.model(odd("mlp")), "expected a function"),
}


@pytest.mark.parametrize("case", REALISTIC)
def test_mistakes_raise_our_error_with_the_callers_line(case: str) -> None:
    call, part = REALISTIC[case]
    with pytest.raises(md.MeshdslError) as caught:
        call()
    assert part in caught.value.args[0]
    assert caught.value.where is not None and caught.value.where.file == __file__


def test_integers_do_not_wrap_without_64_bits() -> None:
    with jax.enable_x64(False), pytest.raises(md.ShapeError, match="does not fit into int32"):
        md.tensor([2**40], "a")


def test_the_users_own_errors_pass_unchanged() -> None:
    def loss(x: md.Tensor) -> md.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        md.grad(loss)(X)


def test_random_wrong_calls_raise_our_error() -> None:
    failures: list[str] = []
    counts = misuse.run(400, 1, failures.append)
    assert not failures and counts["error"] > 240 and counts["accepted"] < 80, (counts, failures)


def test_errors_leave_the_interpreter_as_it_is() -> None:
    lines = [
        "import gc, sys",
        "import meshdsl as md",
        "def model(x):",
        "    return md.sum(md.tanh(x), 'bach')",
        "assert sys.excepthook is sys.__excepthook__",
        "collects = lambda _: gc.isenabled() or 1 / 0",
        "md.search(md.tanh, md.spec('batch:8'), mesh='a:2', machine='tpu-v4', progress=collects)",
        "md.compile(model, 'r:4', 'batch:r').program(md.spec('batch:8'))",
    ]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    said, line = run.stderr.splitlines()[-2:]
    assert said.startswith("meshdsl.errors.ShapeError: no dim 'bach' here; did you mean 'batch'?"), run.stderr
    assert line.startswith("  at "), run.stderr
