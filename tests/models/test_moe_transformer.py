"""Groups are some sequences together; what a config asks for and cannot have is an error.

Decoding is in tests/nn/test_decode.py, layouts in tests/models/test_moe_layouts.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from models import moe_transformer


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_a_group_is_some_sequences_one_after_the_other(sequences: int):
    x = md.tensor(np.arange(4 * 3 * 2.0).reshape(4, 3, 2), "batch length model")
    y = moe_transformer.grouped(x, "length", sequences)
    np.testing.assert_array_equal(y.numpy(), x.numpy().reshape(4 // sequences, 3 * sequences, 2))
    back = moe_transformer.ungrouped(y, x)
    assert back.dims == x.dims
    np.testing.assert_array_equal(back.numpy(), x.numpy())


def test_what_there_is_not():
    with pytest.raises(md.ShapeError, match="every second layer has experts, and 3 layers are odd"):
        moe_transformer.model(moe_transformer.moe.replace(layers=3).config)
    with pytest.raises(md.ShapeError, match="groups of 3 sequences do not divide a batch of 4"):
        moe_transformer.grouped(md.tensor(np.zeros((4, 3)), "batch length"), "length", 3)
