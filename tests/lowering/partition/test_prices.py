"""Products that share an operand choose together what is gathered."""

from __future__ import annotations

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
