"""A product runs before a loop if that frees memory, although compilers have a reason to run it after the loop."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.emit import emit
from meshdsl.lowering.program import Program
from meshdsl.models.transformer import lm
from meshdsl.targets.tpu.before_loops import products_before_loops
from tests.lowering.programs import same_bits


def gradient(tied: bool, batch: int, layers: int = 3, layout: str = "batch:rows") -> tuple[md.Compiled, list[Any]]:
    """The gradient of a loss whose first and last product may share their matrix, and its arguments."""

    def loss(table: md.Tensor, last: md.Tensor, w: md.Tensor, x: md.Tensor) -> md.Tensor:
        h = md.einsum(x, table, out="batch model")
        h, _ = md.scan(lambda h, row: (md.tanh(h * row), None), h, w, over="layer")
        logits = md.einsum(h, table if tied else last, out="batch vocab")
        return md.sum(md.square(md.softmax(logits, "vocab")))

    table = md.spec("vocab:64 model:4")
    specs = table, table, md.spec([md.Dim("layer", layers), md.Dim("model", 4)]), md.spec(f"batch:{batch} vocab:64")
    return md.compile(md.grad(loss, (0, 1, 2)), "rows:2", layout), list(specs)


def before_and_after(tied: bool, batch: int, layers: int, layout: str = "batch:rows") -> tuple[Program, Program]:
    """The program of that gradient around the pass."""
    step, specs = gradient(tied, batch, layers, layout)
    program = step.program(*specs)
    return program, products_before_loops(program)


def arrays(specs: list[Any]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=[d.size for d in spec.dims]).astype(np.float32) for spec in specs]


def during_the_last_loop(program: Program) -> int:
    """Bytes when the backward loop begins."""
    return [moment.bytes for moment in md.memory(program).profile if moment.op == "scan"][-1]


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize(
    ("tied", "batch", "layers", "layout", "fences"),
    [
        pytest.param(True, 64, 3, "", 1, id="the gradient is added to another one"),
        pytest.param(False, 64, 3, "batch:rows", 1, id="the gradient is summed over devices"),
        pytest.param(False, 64, 3, "", 0, id="nothing that the loop computes is added, nothing is summed"),
        pytest.param(True, 2, 3, "batch:rows", 0, id="the product is larger than the logits"),
        pytest.param(True, 64, 1, "batch:rows", 0, id="a loop of one trip"),
    ],
)
def test_a_fence_only_where_a_product_might_wait_and_frees_memory(
    tied: bool, batch: int, layers: int, layout: str, fences: int
) -> None:
    before, after = before_and_after(tied, batch, layers, layout)
    assert str(after).count(" = fence ") == fences
    assert (after is before) == (not fences) and products_before_loops(after) is after
    if fences:  # the model does not know that a sum would wait
        assert during_the_last_loop(after) <= during_the_last_loop(before)
    drawn = arrays(gradient(tied, batch, layers)[1])
    assert same_bits(md.simulate(after, *drawn), md.simulate(before, *drawn))


def test_devices_and_simulator_agree_with_a_fence() -> None:
    _, program = before_and_after(True, 64, 3)
    drawn = arrays(gradient(True, 64)[1])
    ran = jax.jit(emit(program, program.mesh.bind()))(*drawn)
    for got, expected in zip(ran, md.simulate(program, *drawn), strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("unprepared")
def test_the_logits_of_a_tied_model_are_not_in_memory_during_the_backward_loop() -> None:
    workload = lm.replace(tied=True, layers=4, batch=16, length=64, vocab=512)
    before = md.compile(workload.train_step(), "rows:2", "batch:rows").program(*workload.specs())
    after = products_before_loops(before)
    logits, gradient_of_table = 8 * 64 * 512 * 4, 512 * 256 * 4
    assert during_the_last_loop(before) - during_the_last_loop(after) >= logits - gradient_of_table


def test_a_loop_inside_a_loop_is_fenced_too() -> None:
    workload = lm.replace(tied=True, layers=4, batch=16, length=64, vocab=512)
    step = md.compile(workload.train_step(), plan=md.Plan("rows:2", "batch:rows", microbatches=2))
    program = products_before_loops(step.program(*workload.specs()))
    assert str(program).count(" = fence ") == 1 and not any(eqn.op.name == "fence" for eqn in program.eqns)
