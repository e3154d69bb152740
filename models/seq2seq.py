"""The encoder-decoder Transformer of Mesh-TensorFlow (Shazeer et al., 2018, section 9; Vaswani et al., 2017), pre-norm.

    memory = encoder(source):  for each layer, x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    logits = decoder(inputs):  the same with causal attention, and with attention to memory before the feed-forward
    loss   = mean of the cross entropy over the targets that are not padding

Token 0 is padding. The layers are in models/encoder_decoder.py, decoding is in models/decoding.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models import encoder_decoder
from meshdsl.models.decoding import Search, decoder
from meshdsl.models.encoder_decoder import Feed, transformer

__all__ = [
    "Config", "Feed", "LAYOUTS", "Search", "decoder", "inputs", "loss", "model", "optimizer", "seq2seq", "token_loss",
    "transformer",
]  # fmt: skip


@dataclass(frozen=True)
class Config(encoder_decoder.Config):
    """Sizes and options of models/encoder_decoder.py, and the length of the source text."""

    source: int = 64  # length of the source text
    label_smoothing: float = 0.1


_MODEL = "vocab:cols; d_ff:cols; heads:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "model": ("cols:8", _MODEL),
    "data_model": ("rows:2 cols:4", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:2 cols:4", f"batch:rows; length:cols; source:cols; {_MODEL}"),
}


def inputs(config: Config) -> dict[str, object]:
    """The specs of a batch of ids: source [batch, source]; inputs and targets [batch, length], shifted by one."""
    batch = md.Dim("batch", config.batch)
    target = md.spec([batch, md.Dim("length", config.length)], "int32")
    return {
        "source": md.spec([batch, md.Dim("source", config.source)], "int32"),
        "inputs": target,
        "targets": target,
    }


def token_loss(config: Config, logits: md.Tensor, targets: md.Tensor) -> md.train.Metric:
    """The mean cross entropy of the targets that are not padding, in nats."""
    each = md.nn.softmax_cross_entropy(logits, targets, label_smoothing=config.label_smoothing, ignore=0)
    return md.train.mean(each, targets != 0)


def model(config: Config) -> md.Model:
    """A model of a batch: (logits [batch, length, vocab], 0)."""
    return transformer(config)


def loss(config: Config) -> Callable[..., md.train.Metric]:
    """The loss function: mean cross entropy of the targets; with dropout it also takes a key."""
    logits_of = model(config)

    def plain(params: Any, batch: dict[str, md.Tensor]) -> md.train.Metric:
        return token_loss(config, logits_of(params, batch)[0], batch["targets"])

    def with_dropout(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> md.train.Metric:
        return token_loss(config, logits_of(params, batch, key)[0], batch["targets"])

    return with_dropout if config.dropout else plain


def optimizer(config: Config) -> md.optim.Optimizer:
    """Adam."""
    return md.optim.adam(config.learning_rate)


seq2seq = md.Workload(
    "seq2seq", Config(), model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS,
    mean_over=lambda config: None if config.dropout else "batch",
)  # fmt: skip
