"""Kernels do not see dims of local size 1 that they have no use for, and give the same values."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.emit import emit
from meshdsl.targets.tpu import TPU

pytestmark = pytest.mark.usefixtures("every_size")

SPECS = md.spec("batch:1 heads:4 length:8 head:16"), md.spec("batch:1 heads:4 memory:8 head:16")


def weights(q: md.Tensor, k: md.Tensor) -> Any:
    """Attention weights, whose batch has size 1, and whose heads do so on each of four devices."""
    return md.softmax(md.einsum(q, k, out="batch heads length memory"), "memory")


def reductions(q: md.Tensor, k: md.Tensor) -> Any:
    """Reductions over dims of local size 1, and values that have no other dims."""
    alone = md.sum(q * q, ["length", "head"])
    return md.sum(q, "heads"), md.max(k, ["batch", "heads"]), md.sqrt(alone), md.einsum(alone, q, out="length head")


def repeated(q: md.Tensor, k: md.Tensor) -> Any:
    """Broadcasts to dims of local size 1 and from them, choices, casts and powers."""
    wide = md.broadcast(md.sum(q, ["batch", "heads", "length"]), q.dims)
    return md.where(wide > 0, q, 0.0), md.cast(wide, "int32"), (wide**3) * q


@pytest.mark.parametrize("f", [weights, reductions, repeated], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", ["heads:cols", "memory:cols", "head:cols", ""])
def test_emit_without_dims_of_local_size_1_keeps_the_values(f: Any, layout: str) -> None:
    program = md.compile(f, "cols:4", layout).program(*SPECS)
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-3, 4, [d.size for d in spec.dims]).astype(np.float32) for spec in SPECS]
    results = jax.jit(emit(program, program.mesh.bind(), TPU.emission))(*arrays)
    results = results if isinstance(results, tuple | list) else [results]
    simulated = md.simulate(program, *arrays)
    for result, expected in zip(results, simulated, strict=True):
        np.testing.assert_allclose(result, expected, rtol=3e-7)  # NumPy's exponential is another one


@pytest.mark.parametrize(("layout", "rank"), [("heads:cols", 2), ("", 3)])
def test_emitted_softmax_has_no_dims_of_local_size_1(layout: str, rank: int) -> None:
    text = md.compile(weights, "cols:4", layout).lower(*SPECS).as_text()
    for name in ("exponential", "divide", "subtract"):
        (shape,) = re.findall(rf"stablehlo\.{name} .*: tensor<([\dx]+)xf32>", text)
        assert len(shape.split("x")) == rank, f"{name} of {shape}"


def test_emitted_products_outside_a_softmax_keep_dims_of_local_size_1() -> None:
    """The TPU compiler copies a larger operand otherwise (`targets/tpu/emission.py`)."""
    x, ct = md.spec("batch:2 length:8 model:16"), md.spec("batch:2 length:8 heads:4 head:8")
    step = md.compile(lambda x, ct: md.einsum(x, ct, out="model heads head"), "cols:4", "heads:cols")
    (shape,) = re.findall(r"dot_general .*-> tensor<([\dx]+)xf32>", step.lower(x, ct).as_text())
    assert sorted(shape.split("x")) == ["1", "16", "8"]


def test_emitted_softmax_of_many_elements_keeps_dims_of_local_size_1() -> None:
    """The TPU compiler would store its exponentials."""
    specs = SPECS[0], md.spec("batch:1 heads:4 memory:4096 head:16")
    text = md.compile(weights, "cols:4", "heads:cols").lower(*specs).as_text()
    (shape,) = re.findall(r"stablehlo\.exponential .*: tensor<([\dx]+)xf32>", text)
    assert len(shape.split("x")) == 4


def test_rows_of_loops_are_stored_without_dims_of_local_size_1():
    """The TPU compiler copies saved rows with such dims into another device layout: 9 % of a pipeline's cycles."""

    def step(x: md.Tensor) -> md.Tensor:
        return md.scan(lambda c, row: (c + row, md.tanh(c + row)), md.broadcast(0.0, "batch:4 io:5"), x, over="t")[1]

    compiled = md.compile(step, "r:4", "batch:r")
    text = compiled.lower(md.spec("t:3 batch:4 io:5")).as_text()
    loop = text[text.index("stablehlo.while") :]
    assert "tensor<3x5xf32>" in loop and "tensor<3x1x5xf32>" not in loop[: loop.index("stablehlo.return")]


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_a_program_whose_arguments_all_have_no_elements_runs(donate: tuple[int, ...]) -> None:
    x, y = (md.zeros(dims, "float32") for dims in ("rows:0 cols:3", "rows:0"))
    step = md.compile(lambda x, y: (md.sum(x) + md.sum(y) + 2, x * 2, y), "a:2", "rows:a", donate=donate)
    total, *rest = step(x, y)
    assert total.numpy() == 2 and [r.shape for r in rest] == [(0, 3), (0,)]


def test_a_call_finds_what_lower_traced() -> None:
    """So does a `.lower` after a call; the text is that of the program that runs."""
    traced: list[None] = []

    def f(x: Any) -> Any:
        traced.append(None)  # meshdsl runs it once, and JAX once for each program that it traces
        return jax.numpy.sin(x)

    x = md.tensor(np.arange(8.0), "io")
    step = md.compile(lambda x: md.map(f, x), "r:4", "io:r")
    step.program(x)
    known = len(traced)
    first = step.lower(x).as_text()
    after_lower = len(traced)
    np.testing.assert_allclose(step(x).numpy(), np.sin(np.arange(8.0)), rtol=1e-12)
    assert step.lower(x).as_text() == first and len(traced) == after_lower > known
