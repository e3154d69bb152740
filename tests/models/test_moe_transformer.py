"""Groups are some sequences together; what a config asks for and cannot have is an error.

Decoding is in tests/nn/test_decode.py, layouts in tests/models/test_moe_layouts.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import gpt_moe, moe_transformer


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_moe_transformer_groups_are_consecutive_sequences(sequences: int):
    x = md.tensor(np.arange(4 * 3 * 2.0).reshape(4, 3, 2), "batch length model")
    y = moe_transformer.grouped(x, "length", sequences)
    np.testing.assert_array_equal(y.numpy(), x.numpy().reshape(4 // sequences, 3 * sequences, 2))
    back = moe_transformer.ungrouped(y, x)
    assert back.dims == x.dims
    np.testing.assert_array_equal(back.numpy(), x.numpy())


def test_moe_transformer_errors():
    for workload in (moe_transformer.moe, gpt_moe.gpt_moe):
        with pytest.raises(md.ShapeError, match=r"must be a multiple of 2, .* got 3\n  use 4 layers"):
            workload.model(workload.replace(layers=3).config)
    with pytest.raises(md.ShapeError, match="the batch of 4 is not a multiple of 3"):
        moe_transformer.grouped(md.tensor(np.zeros((4, 3)), "batch length"), "length", 3)


def test_gpt_moe_has_dropout():
    sizes = {"batch": 1, "length": 4, "vocab": 8, "layers": 2, "d_model": 8, "heads": 2, "d_head": 4, "d_ff": 8}
    workload = gpt_moe.gpt_moe.replace(**sizes, experts=2, expert_hidden=8)
    params, _ = md.compile(workload.init, "", "")(md.random.key(0))
    ids = md.tensor(np.array([[1, 2, 3, 4]], np.int32), "batch length")

    loss_of = md.compile(workload.loss(workload.replace(dropout=0.5).config), "", "")
    one, same, other = (float(loss_of(params, {"tokens": ids, "targets": ids}, md.random.key(k))[0]) for k in (1, 1, 2))
    assert one == same != other
