"""Products that share an operand choose together what is gathered."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.transformer import lm

SMALL = {"layers": 3, "d_model": 64, "heads": 4, "d_head": 16, "d_ff": 256, "length": 256, "batch": 4, "vocab": 128}


def test_prices_gather_the_activation_that_three_weight_gradients_read() -> None:
    workload = lm.replace(**SMALL)
    layout = "batch:rows; length:cols; vocab:cols; d_ff:cols; heads:cols"
    program = md.compile(workload.train_step(), "rows:2 cols:4", layout).program(*workload.specs())
    in_layers = [r for r in program.collectives if r.count == SMALL["layers"]]
    assert {r.op.name for r in in_layers} == {"all_gather", "reduce_scatter"}
    # forward: the inputs of both halves; backward: both cotangents, and both inputs again for the weights' gradients
    assert sum(r.op.name == "all_gather" for r in in_layers) == 6
    assert not any(r.op.name == "reduce_scatter" and "heads" in str(r.op) for r in program.collectives)


@pytest.mark.parametrize(("products", "moved"), [(1, "all_to_all"), (2, "all_to_all"), (4, "all_gather")])
def test_prices_count_a_shared_operand_once(products: int, moved: str) -> None:
    def f(x: md.Tensor, others: dict[str, md.Tensor]) -> list[md.Tensor]:
        return [md.einsum(x, other, out="model heads") for other in others.values()]

    layout = md.Layout("length:all", overrides={"others/*": {"length": "", "heads": "all"}})
    args = md.spec("length:512 model:64"), {str(i): md.spec("length:512 heads:64") for i in range(products)}
    records = md.compile(f, "all:4", layout).program(*args).collectives
    moves = [r.op.name for r in records if "length" in str(r.op)]
    assert moves == [moved] * (1 if moved == "all_gather" else products)


def test_a_broadcast_value_is_sent_before_it_is_broadcast() -> None:
    """The cotangent of a sum over choices, which a product needs whole."""

    def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        wide = md.broadcast(md.tanh(x), ["choice:4", *x.dims])
        return md.prefer(md.einsum(wide, w, out="choice length out"), "out")

    x, w = md.spec("length:8 io:4"), md.spec("choice:4 io:4 out:8")
    program = md.compile(product, "cols:2", "length:cols; out:cols").program(x, w)
    assert [(r.kind, r.bytes) for r in program.collectives] == [("all_gather", 8 * 4 * 4)]
    draw = np.random.default_rng(0)
    given = [draw.integers(-2, 3, [d.size for d in each.dims]).astype(np.float32) for each in (x, w)]
    plain = md.compile(product, "").program(x, w)
    np.testing.assert_array_equal(md.simulate(program, *given)[0], md.simulate(plain, *given)[0])
