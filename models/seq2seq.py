"""The encoder-decoder Transformer of Mesh-TensorFlow (Shazeer et al., 2018, section 9; Vaswani et al., 2017), pre-norm.

    memory = encoder(source):  x = x + attention(norm(x));  x = x + feed_forward(norm(x)), for each layer
    logits = decoder(inputs):  the same, causal, with attention to memory between the two
    loss   = mean over targets that are not padding of the cross entropy

Token 0 is padding. Layers are one scan each. `transformer` takes the feed-forward layer of every second block from
outside: models/moe_transformer.py puts its experts there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["Config", "LAYOUTS", "inputs", "loss", "model", "optimizer", "seq2seq", "transformer"]

# a second feed-forward layer: (x, the dim of its places, which of them are not padding, key) -> (y, auxiliary loss)
Feed = Callable[[md.Tensor, str, md.Tensor, "md.Tensor | None"], tuple[md.Tensor, md.Tensor]]


@dataclass(frozen=True)
class Config:
    """Sizes and choices; a vocabulary of 259 reads bytes, with padding, start and end."""

    batch: int = 16
    source: int = 64  # places of the source text
    length: int = 64  # places of the target text
    vocab: int = 264
    layers: int = 4  # of the encoder, and of the decoder
    d_model: int = 256
    heads: int = 8
    d_head: int = 32
    d_ff: int = 1024
    tied: bool = True  # the output layer is the embedding table, which source and target share
    dropout: float = 0.0
    label_smoothing: float = 0.1
    remat: bool | str = False
    learning_rate: float = 1e-3
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"


_MODEL = "vocab:cols; d_ff:cols; heads:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "model": ("cols:8", _MODEL),
    "data_model": ("rows:2 cols:4", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:2 cols:4", f"batch:rows; length:cols; source:cols; {_MODEL}"),
}


def inputs(config: Any) -> dict[str, object]:
    """One batch of ids: source [batch, source]; inputs and targets [batch, length], the one shifted by a place."""
    batch = md.Dim("batch", config.batch)
    target = md.spec([batch, md.Dim("length", config.length)], "int32")
    return {
        "source": md.spec([batch, md.Dim("source", config.source)], "int32"),
        "inputs": target,
        "targets": target,
    }


def transformer(config: Any, feed: Feed | None = None, every: int = 1) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch; with a key, under dropout and the feed's noise.

    A block of the scan is `every` layers; the last of them has `feed` for its feed-forward layer, where it is given.
    """
    vocab, wide, d_ff = md.Dim("vocab", config.vocab), md.Dim("model", config.d_model), md.Dim("d_ff", config.d_ff)
    heads, head = md.Dim("heads", config.heads), md.Dim("head", config.d_head)
    blocks = md.Dim("layer", config.layers // every)
    precision = md.nn.Precision(config.param_dtype, config.compute_dtype, config.reduce_dtype)

    def residual(x: md.Tensor, name: str, f: Callable[[md.Tensor], md.Tensor], key: md.Tensor | None) -> md.Tensor:
        y = f(md.nn.layer_norm(x, wide, name=f"norm_{name}", precision=precision))
        return x + md.nn.dropout(y, config.dropout, key)

    def stack(
        x: md.Tensor, at: str, real: md.Tensor, memory: md.Tensor | None, key: md.Tensor | None
    ) -> tuple[md.Tensor, md.Tensor]:
        """All layers of the encoder, or, with a memory, of the decoder; places `at`, of which some are real."""

        def attend(x: md.Tensor, to: md.Tensor | None, name: str) -> md.Tensor:
            decodes = memory is not None
            readable = None if decodes and to is None else md.rename(source_real, source="memory")
            return md.nn.multi_head_attention(
                x, heads, head, memory=to, length=at, causal=decodes and to is None, name=name, precision=precision,
                mask=None if readable is None else readable,
            )  # fmt: skip

        def layer(x: md.Tensor, number: int, keys: list[md.Tensor | None]) -> tuple[md.Tensor, md.Tensor | None]:
            with md.scope(f"sub_{number}"):
                x = residual(x, "self", lambda y: attend(y, None, "attention"), keys[0])
                if memory is not None:
                    x = residual(x, "cross", lambda y: attend(y, memory, "cross_attention"), keys[1])
                if feed is None or number < every - 1:
                    plain = lambda y: md.nn.feed_forward(y, d_ff, precision=precision)  # noqa: E731
                    return residual(x, "feed", plain, keys[2]), None
                y, aux = feed(md.nn.layer_norm(x, wide, name="norm_feed", precision=precision), at, real, keys[3])
                return x + md.nn.dropout(y, config.dropout, keys[2]), aux

        def block(carry: Any, key: md.Tensor | None = None) -> Any:
            x, total = carry
            for number in range(every):
                mine = None if key is None else md.random.fold_in(key, number)
                keys = [None if mine is None else md.random.fold_in(mine, i) for i in range(4)]
                x, aux = layer(x, number, keys)
                total = total if aux is None else total + md.cast(aux, total.dtype)
            return x, total

        keys = None if key is None else md.random.split(key, blocks)
        start = md.cast(0.0, "float64" if config.reduce_dtype == "float64" else "float32")
        x, total = md.layers(block, (x, start), over=blocks, xs=keys, remat=config.remat)
        return md.nn.layer_norm(x, wide, name="norm", precision=precision), total

    source_real: Any = None

    def encode_decode(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        nonlocal source_real
        source_real = batch["source"] != 0
        keys = [None, None] if key is None else [md.random.fold_in(key, i) for i in range(2)]
        x, table = md.nn.embedding(batch["source"], vocab, wide, precision=precision)
        with md.scope("encoder"):
            x = md.nn.learned_positions(x, "source", precision=precision)
            memory, aux = stack(x, "source", source_real, None, keys[0])
        memory = md.rename(memory, source="memory")
        y = md.cast(md.take(table, batch["inputs"], vocab), precision.compute)
        with md.scope("decoder"):
            y = md.nn.learned_positions(y, "length", precision=precision)
            y, more = stack(y, "length", batch["inputs"] != 0, memory, keys[1])
        if not config.tied:
            table = md.param("unembed", [wide, vocab], init=md.init.lecun(fan_in=wide), dtype=config.param_dtype)
        logits = precision.einsum(y, table, out=[*batch["inputs"].dims, vocab])
        return md.prefer(logits, vocab), aux + more

    return md.model(encode_decode)


def token_loss(config: Any, logits: md.Tensor, targets: md.Tensor) -> md.Tensor:
    """The mean cross entropy, in nats, of the targets that are not padding."""
    each = md.nn.softmax_cross_entropy(logits, targets, label_smoothing=config.label_smoothing)
    real = targets != 0
    return md.sum(md.where(real, each, 0)) / md.maximum(md.sum(md.cast(real, each.dtype)), 1)


def model(config: Config) -> md.Model:
    """(logits [batch, length, vocab], 0) of a batch."""
    return transformer(config)


def loss(config: Config) -> Callable[..., md.Tensor]:
    """The mean cross entropy of the targets; with dropout the function also takes a key."""
    logits_of = model(config)

    def plain(params: Any, batch: dict[str, md.Tensor]) -> md.Tensor:
        return token_loss(config, logits_of(params, batch)[0], batch["targets"])

    def with_dropout(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> md.Tensor:
        return token_loss(config, logits_of(params, batch, key)[0], batch["targets"])

    return with_dropout if config.dropout else plain


def optimizer(config: Any) -> md.optim.Optimizer:
    """Adam."""
    return md.optim.adam(config.learning_rate)


seq2seq = md.Workload("seq2seq", Config(), model=model, inputs=inputs, loss=loss, optimizer=optimizer, layouts=LAYOUTS)
