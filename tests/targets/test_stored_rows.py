"""Large rows that a loop stacks are read back on TPUs, with the same bits; stacks begin without values there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.emit import emit, run_equations
from meshdsl.lowering.program import Program
from meshdsl.targets.tpu.emission import EMISSION
from meshdsl.targets.tpu.stored_rows import read_stored_rows
from tests.lowering.programs import same_bits

SPECS = md.spec("batch:4 io:8"), md.spec("layer:3 io:8 out:8")


def attention_like(x: md.Tensor, w: md.Tensor) -> Any:
    """A loop whose weights are stacked and multiplied."""

    def trip(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        p = md.softmax(md.dot(h, row, "io"), "out")
        return md.dot(p, row, "out"), p

    return md.scan(trip, x, w, over="layer")


def product_rows(x: md.Tensor, w: md.Tensor) -> Any:
    """A loop that stacks a cast of its product."""

    def trip(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        y = md.cast(md.dot(h, row, "io"), "float64")
        return md.dot(md.cast(y, "float32"), row, "out"), y

    return md.scan(trip, x, w, over="layer")


def unread_rows(x: md.Tensor, w: md.Tensor) -> Any:
    return md.scan(lambda h, row: (h + md.sum(row), md.tanh(h)), x, w, over="layer")


def carried_rows(x: md.Tensor, w: md.Tensor) -> Any:
    def trip(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        h = md.tanh(h) + md.sum(row)
        return h, h

    return md.scan(trip, x, w, over="layer")


def gradient(x: md.Tensor, w: md.Tensor) -> Any:
    return md.grad(lambda w: md.sum(attention_like(x, w)[0]))(w)


def offloaded(x: md.Tensor, w: md.Tensor) -> Any:
    """The gradient of a loop that keeps its weights in the host's memory until the backward pass."""

    def layer(h: md.Tensor, row: md.Tensor) -> md.Tensor:
        return md.dot(md.softmax(md.dot(h, row, "io"), "out"), row, "out")

    def loss(w: md.Tensor) -> md.Tensor:
        return md.sum(md.scan(lambda h, row: (md.checkpoint(layer, "offload")(h, row), None), x, w, over="layer")[0])

    return md.grad(loss)(w)


def program_of(f: Any, mesh: str = "rows:2") -> Program:
    return md.compile(f, mesh, "batch:rows" if mesh else "").program(*SPECS)


def barriers(program: Program) -> int:
    return str(program).count(" = barrier ")


@pytest.mark.parametrize(
    ("f", "count"),
    [(attention_like, 1), (gradient, 1), (product_rows, 0), (unread_rows, 0), (carried_rows, 0)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_rows_that_would_be_computed_twice_are_read_back(f: Any, count: int) -> None:
    program = program_of(f)
    after = read_stored_rows(program, large=0)
    assert (barriers(program), barriers(after)) == (0, count)
    assert (after is program) is (count == 0)
    row = 4 // 2 * 8 * 4  # bytes on one device
    assert barriers(read_stored_rows(program, large=row)) == count
    assert read_stored_rows(program, large=row + 1) is program


@pytest.mark.parametrize("f", [attention_like, gradient, offloaded])
@pytest.mark.parametrize("mesh", ["", "rows:2", "rows:3"])
def test_rows_read_back_keep_the_bits(f: Any, mesh: str) -> None:
    program = program_of(f, mesh)
    after = read_stored_rows(program, large=0)
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=[d.size for d in spec.dims]).astype(np.float32) for spec in SPECS]
    assert same_bits(md.simulate(after, *arrays), md.simulate(program, *arrays))
    sizes = [program.stored_shape(v) for v in program.ins]
    stored = [np.pad(x, [(0, n - m) for n, m in zip(size, x.shape, strict=True)])
              for size, x in zip(sizes, arrays, strict=True)]  # fmt: skip
    run = [jax.jit(emit(one, one.mesh.bind()))(*stored) for one in (program, after)]
    assert same_bits([np.asarray(y) for y in run[1]], [np.asarray(y) for y in run[0]])


def test_stored_rows_are_read_behind_a_barrier_on_their_index() -> None:
    program = program_of(attention_like)
    texts = [
        jax.jit(emit(one, one.mesh.abstract())).trace(*_shapes(one)).lower(lowering_platforms=("tpu",)).as_text()
        for one in (program, read_stored_rows(program, large=0))
    ]
    assert [text.count("stablehlo.optimization_barrier") for text in texts] == [0, 1]
    assert "optimization_barrier %" in texts[1] and ": tensor<i32>" in texts[1].split("optimization_barrier")[1]


@pytest.mark.parametrize(("mesh", "count"), [("rows:2", 3), ("", 0)])
def test_stacks_on_a_mesh_begin_without_values_on_tpus(mesh: str, count: int) -> None:
    """Two residuals and the gradient; without mesh axes they are zeros, which GSPMD can split."""
    program = program_of(gradient, mesh)
    function = emit(program, program.mesh.abstract()) if mesh else lambda *xs: run_equations(program, xs, EMISSION)
    lowered = jax.jit(function).trace(*_shapes(program))
    texts = [lowered.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu")]
    assert [text.count("@AllocateBuffer") for text in texts] == [count, 0]


def test_large_stacks_of_a_backward_loop_are_allocated_when_it_starts() -> None:
    """A conditional on the carry allocates them in two equal branches. A forward loop has none."""
    program = program_of(gradient, "rows:2")
    x, w = np.arange(32, dtype=np.float32) / 16, np.arange(192, dtype=np.float32) / 64
    arrays = x.reshape(4, 8), w.reshape(3, 8, 8)
    texts, results = [], []
    for elements in (2**22, 0):
        emission = dataclasses.replace(EMISSION, late_stacks=elements)
        trace = jax.jit(emit(program, program.mesh.abstract(), emission)).trace(*_shapes(program))
        texts.append(trace.lower(lowering_platforms=("tpu",)).as_text())
        results.append([np.asarray(y) for y in jax.jit(emit(program, program.mesh.bind(), emission))(*arrays)])
    assert [text.count("@AllocateBuffer") for text in texts] == [3, 4], "the gradient in each branch"
    assert same_bits(*results)


def _shapes(program: Program) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(program.stored_shape(v), v.dtype) for v in program.ins]
