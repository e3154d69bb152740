"""A decoder-only language model, pre-norm, with its layers in one scan (Vaswani et al., 2017; layouts below).

    x = embed[tokens] + positions
    for each layer:  x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    logits = norm(x) unembed;  loss = mean over batch and length of the cross entropy

The layouts are those of Mesh-TensorFlow (Shazeer et al., 2018, section 9), with `vocab`, `d_ff` and `heads` on one axis
and `batch` on the other; and Megatron's sequence parallelism (Korthikanti et al., 2022), with `length` on the axis of
the model dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import meshdsl as md

__all__ = ["Config", "LAYOUTS", "benchmark", "inputs", "lm", "loss", "model", "optimizer"]


@dataclass(frozen=True)
class Config:
    """Sizes and options; a vocabulary of 256 is enough for bytes."""

    batch: int = 16
    length: int = 128
    vocab: int = 256
    layers: int = 4
    d_model: int = 256
    heads: int = 8
    d_head: int = 32
    queries_per_key: int = 1  # query heads per key and value head; `heads` counts key and value heads
    d_ff: int = 1024
    activation: str = "relu"
    gated: bool = False
    norm: str = "layer"  # or "rms"
    positions: str = "learned"  # or "rotary"
    attention: str = ""  # a method of md.attention; "": the formula for fewer than 4096 positions
    tied: bool = False  # the output layer uses the embedding table
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    remat: bool | str = False  # or a policy of md.checkpoint
    learning_rate: float = 1e-3
    clip_norm: float = 0.0  # 0: no clipping
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"


_MODEL = "vocab:cols; d_ff:cols; heads:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "model": ("cols:8", _MODEL),
    "data_model": ("rows:2 cols:4", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:2 cols:4", f"batch:rows; length:cols; {_MODEL}"),
}


def inputs(config: Config) -> dict[str, object]:
    """The specs of a batch: tokens and the tokens that follow them, both [batch, length]."""
    spec = md.spec([md.Dim("batch", config.batch), md.Dim("length", config.length)], "int32")
    return {"tokens": spec, "targets": spec}


def model(config: Config) -> md.Model:
    """A model that computes the logits [batch, length, vocab]; a key turns on dropout."""
    vocab, wide, d_ff = md.Dim("vocab", config.vocab), md.Dim("model", config.d_model), md.Dim("d_ff", config.d_ff)
    heads, head, layer = md.Dim("heads", config.heads), md.Dim("head", config.d_head), md.Dim("layer", config.layers)
    group = md.Dim("group", config.queries_per_key) if config.queries_per_key > 1 else None
    precision = md.nn.Precision(config.param_dtype, config.compute_dtype, config.reduce_dtype)
    normed = {"layer": md.nn.layer_norm, "rms": md.nn.rms_norm}[config.norm]

    def block(x: md.Tensor, key: md.Tensor | None = None) -> md.Tensor:
        keys = [None] * 2 if key is None else [md.random.fold_in(key, i) for i in range(2)]
        y = md.nn.multi_head_attention(
            normed(x, wide, name="norm_1", precision=precision),
            heads,
            head,
            causal=True,
            group=group,
            positions="rotary" if config.positions == "rotary" else "none",
            method=config.attention or None,
            precision=precision,
        )
        x = x + md.nn.dropout(y, config.dropout, keys[0])
        y = md.nn.feed_forward(
            normed(x, wide, name="norm_2", precision=precision),
            d_ff,
            activation=config.activation,
            gated=config.gated,
            precision=precision,
        )
        return x + md.nn.dropout(y, config.dropout, keys[1])

    def transformer(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> md.Tensor:
        x, table = md.nn.embedding(batch["tokens"], vocab, wide, precision=precision)
        if config.positions == "learned":
            x = md.nn.learned_positions(x, precision=precision)
        with md.scope("layer"):
            keys = None if key is None else md.random.split(key, layer)
            x = md.layers(block, x, over=layer, xs=keys, remat=config.remat)
        x = normed(x, wide, name="norm", precision=precision)
        if not config.tied:
            table = md.param("unembed", [wide, vocab], init=md.init.lecun(fan_in=wide), dtype=config.param_dtype)
        logits = precision.einsum(x, table, out=[*batch["tokens"].dims, vocab])
        return md.prefer(logits, vocab)

    return md.model(transformer)


def loss(config: Config) -> Callable[..., md.train.Metric]:
    """The loss function: mean cross entropy of the next token, in nats; with dropout it also takes a key.

    Targets of -100 are ignored.
    """
    logits_of = model(config)

    def mean_loss(logits: md.Tensor, batch: dict[str, md.Tensor]) -> md.train.Metric:
        each = md.nn.softmax_cross_entropy(
            logits, batch["targets"], z_loss=config.z_loss, label_smoothing=config.label_smoothing
        )
        return md.train.mean(each, batch["targets"] != -100)

    def plain(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.train.Metric:
        return mean_loss(logits_of(params, batch), batch)

    def with_dropout(params: dict[str, md.Tensor], batch: dict[str, md.Tensor], key: md.Tensor | None = None):
        return mean_loss(logits_of(params, batch, key), batch)

    return with_dropout if config.dropout else plain


def optimizer(config: Config) -> md.optim.Optimizer:
    """Adam, with clipping by the global norm if `clip_norm` is set."""
    adam = md.optim.adam(config.learning_rate)
    return md.optim.with_clipping(adam, config.clip_norm) if config.clip_norm else adam


lm = md.Workload(
    "lm",
    Config(),
    model=model,
    inputs=inputs,
    loss=loss,
    optimizer=optimizer,
    layouts=LAYOUTS,
    mean_over=lambda config: None if config.dropout else "batch",
)
benchmark = lm.replace(vocab=8192)  # the sizes of benchmarks/handwritten/language_model.py
