"""The score of the encoder-decoder Transformer; padding is not read.

Decoding is in tests/nn/test_decode.py, layouts in tests/models/test_moe_layouts.py.
"""

from __future__ import annotations

import numpy as np

import meshdsl as md
from meshdsl.models import seq2seq
from tests.nn.moe_reference import simulated

WORKLOAD = seq2seq.seq2seq.replace(
    batch=2, source=4, length=4, vocab=8, layers=1, d_model=8, heads=2, d_head=4, d_ff=8, label_smoothing=0.0
)  # fmt: skip


def test_seq2seq_loss_ignores_padded_targets():
    logits = np.random.default_rng(1).standard_normal((2, 4, 8))
    targets = np.array([[3, 4, 2, 0], [5, 2, 0, 0]], np.int32)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    got = seq2seq.token_loss(
        WORKLOAD.config, md.tensor(logits, "batch length vocab"), md.tensor(targets, "batch length")
    )
    np.testing.assert_allclose(got.numpy(), each[targets != 0].mean(), rtol=1e-12)


def test_seq2seq_source_padding_is_masked():
    params, _ = WORKLOAD.init(md.random.key(0))
    model = seq2seq.model(WORKLOAD.config)
    inputs = md.tensor(np.array([[1, 3, 4, 5], [1, 6, 7, 3]], np.int32), "batch length")

    def logits(source: list[list[int]], places: np.ndarray) -> np.ndarray:
        batch = {"source": md.tensor(np.array(source, np.int32), "batch source"), "inputs": inputs}
        changed = {**params, "encoder/positions": md.tensor(places.astype(np.float32), "source model")}
        return simulated(model, changed, batch)[0]

    places = params["encoder/positions"].numpy()
    other = places.copy()
    other[2:] += 1  # the last two places of both sources are padding
    source = [[3, 4, 0, 0], [5, 6, 0, 0]]
    np.testing.assert_array_equal(logits(source, places), logits(source, other))
    assert not np.array_equal(logits(source, places), logits([[3, 4, 5, 0], [5, 6, 0, 0]], places))
