"""Encoder and decoder, with one scan over layers each; `language_model` is only the decoder.

All positions are computed at once, as in training; models/decoding.py computes one position at a time with the same
parameters. A custom feed-forward layer can be passed for the last layer of every block: models/moe_transformer.py
passes its mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["Config", "Feed", "Parts", "language_model", "transformer"]

# a custom feed-forward layer: (x, name of its position dim, mask of real positions, key) -> (y, auxiliary loss)
Feed = Callable[[md.Tensor, str, md.Tensor, "md.Tensor | None"], tuple[md.Tensor, md.Tensor]]


@dataclass(frozen=True)
class Config:
    """Sizes and options of these models; a vocabulary of 259 is enough for bytes, padding, start and end."""

    batch: int = 16
    length: int = 64  # length of the target text
    vocab: int = 264
    layers: int = 4  # of the encoder, and also of the decoder
    d_model: int = 256
    heads: int = 8
    d_head: int = 32
    d_ff: int = 1024
    tied: bool = True  # the output layer uses the embedding table, which source and target share
    dropout: float = 0.0
    label_smoothing: float = 0.0
    remat: bool | str = False  # or a policy of md.checkpoint
    learning_rate: float = 1e-3
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"

    @property
    def precision(self) -> md.nn.Precision:
        return md.nn.Precision(self.param_dtype, self.compute_dtype, self.reduce_dtype)


@dataclass(frozen=True)
class Parts:
    """The dims and layers shared by encoder, decoder and decoding steps.

    Raises `ShapeError` if the number of layers is not a multiple of `every`.
    """

    config: Config
    feed: Feed | None
    every: int  # layers per block of the scan; the last layer of a block uses `feed` as its feed-forward layer

    def __post_init__(self) -> None:
        if self.config.layers % self.every:
            raise md.ShapeError(
                f"the number of layers must be a multiple of {self.every}, the layers per block; got "
                f"{self.config.layers}\n"
                f"  use {self.config.layers + self.every - self.config.layers % self.every} layers"
            )

    @property
    def precision(self) -> md.nn.Precision:
        return self.config.precision

    @property
    def vocab(self) -> md.Dim:
        return md.Dim("vocab", self.config.vocab)

    @property
    def wide(self) -> md.Dim:
        return md.Dim("model", self.config.d_model)

    @property
    def heads(self) -> tuple[md.Dim, md.Dim]:
        return md.Dim("heads", self.config.heads), md.Dim("head", self.config.d_head)

    @property
    def blocks(self) -> md.Dim:
        """The dim of the decoder's layers."""
        return md.Dim("layer", self.config.layers // self.every)

    @property
    def zero(self) -> md.Tensor:
        return md.cast(0.0, "float64" if self.config.reduce_dtype == "float64" else "float32")

    def norm(self, x: md.Tensor, name: str) -> md.Tensor:
        return md.nn.layer_norm(x, self.wide, name=name, precision=self.precision)

    def dropped(self, y: md.Tensor, key: md.Tensor | None) -> md.Tensor:
        return md.nn.dropout(y, self.config.dropout, key)

    def fed(
        self, x: md.Tensor, at: str, real: md.Tensor, number: int, key: md.Tensor | None, noise: md.Tensor | None
    ) -> tuple[md.Tensor, md.Tensor | None]:
        """Applies the feed-forward part of the block's layer `number` to x; returns x and the auxiliary loss."""
        y, aux = self.norm(x, "norm_feed"), None
        if self.feed is None or number < self.every - 1:
            y = md.nn.feed_forward(y, md.Dim("d_ff", self.config.d_ff), precision=self.precision)
        else:
            y, aux = self.feed(y, at, real, noise)
        return x + self.dropped(y, key), aux

    def embedded(self, ids: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        return md.nn.embedding(ids, self.vocab, self.wide, precision=self.precision)

    def looked_up(self, table: md.Tensor, ids: md.Tensor) -> md.Tensor:
        return md.cast(md.take(table, ids, self.vocab), self.precision.compute)

    def logits(self, y: md.Tensor, table: md.Tensor) -> md.Tensor:
        """The logits, computed with the embedding table or with a separate output table."""
        if not self.config.tied:
            init = md.init.lecun(fan_in=self.wide)
            table = md.param("unembed", [self.wide, self.vocab], init=init, dtype=self.config.param_dtype)
        out = [*(d for d in y.dims if d != self.wide), self.vocab]
        return md.prefer(self.precision.einsum(y, table, out=out), self.vocab)

    def stack(
        self,
        x: md.Tensor,
        at: str,
        real: md.Tensor,
        key: md.Tensor | None,
        causal: bool = False,
        memory: tuple[md.Tensor, md.Tensor] | None = None,
    ) -> tuple[md.Tensor, md.Tensor]:
        """Applies all layers of the encoder or, if `causal`, of the decoder; returns x and the auxiliary loss.

        `at` is the name of the position dim. `real` is false for padding. `memory` is the encoder's output and its mask
        of real positions, if the decoder has cross-attention.
        """
        heads, head = self.heads
        options: Any = {"length": at, "precision": self.precision}
        reads: Any = {"causal": True} if causal else {"mask": md.rename(real, **{at: "memory"})}

        def layer(x: md.Tensor, number: int, keys: list[md.Tensor | None]) -> tuple[md.Tensor, md.Tensor | None]:
            with md.scope(f"sub_{number}"):
                y = self.norm(x, "norm_self")
                x = x + self.dropped(md.nn.multi_head_attention(y, heads, head, **reads, **options), keys[0])
                if memory is not None:
                    y = md.nn.multi_head_attention(
                        self.norm(x, "norm_cross"), heads, head, memory=memory[0], mask=memory[1],
                        name="cross_attention", **options,
                    )  # fmt: skip
                    x = x + self.dropped(y, keys[1])
                return self.fed(x, at, real, number, keys[2], keys[3])

        def block(carry: Any, key: md.Tensor | None = None) -> Any:
            x, total = carry
            for number in range(self.every):
                layer_key = None if key is None else md.random.fold_in(key, number)
                x, aux = layer(
                    x, number, [None if layer_key is None else md.random.fold_in(layer_key, i) for i in range(4)]
                )
                total = total if aux is None else total + md.cast(aux, total.dtype)
            return x, total

        # a dim of its own, so that `layer:stages` makes a pipeline of the decoder: a step has one stack in stages
        blocks = self.blocks if causal else md.Dim("layer_encoder", self.blocks.size)
        keys = None if key is None else md.random.split(key, blocks)
        x, total = md.layers(block, (x, self.zero), over=blocks, xs=keys, remat=self.config.remat)
        return self.norm(x, "norm"), total

    def encoded(
        self, source: md.Tensor, key: md.Tensor | None = None
    ) -> tuple[md.Tensor, md.Tensor, md.Tensor, md.Tensor]:
        """Runs the encoder: its output, the mask of real positions, the embedding table and the auxiliary loss."""
        x, table = self.embedded(source)
        with md.scope("encoder"):
            x = md.nn.learned_positions(x, "source", precision=self.precision)
            x, aux = self.stack(x, "source", source != 0, key)
        return md.rename(x, source="memory"), md.rename(source != 0, source="memory"), table, aux


def transformer(config: Config, feed: Feed | None = None, every: int = 1) -> md.Model:
    """A model of a batch: (logits [batch, length, vocab], auxiliary loss). A key turns on dropout and the feed's noise.

    A block of the scan has `every` layers; the last layer of a block uses `feed` as its feed-forward layer, if given.
    """
    parts = Parts(config, feed, every)

    def encode_decode(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        keys = [None, None] if key is None else [md.random.fold_in(key, i) for i in range(2)]
        memory, real, table, aux = parts.encoded(batch["source"], keys[0])
        y = parts.looked_up(table, batch["inputs"])
        with md.scope("decoder"):
            y = md.nn.learned_positions(y, "length", precision=parts.precision)
            y, decoder_aux = parts.stack(y, "length", batch["inputs"] != 0, keys[1], causal=True, memory=(memory, real))
        return parts.logits(y, table), aux + decoder_aux

    return md.model(encode_decode)


def language_model(config: Config, feed: Feed | None = None, every: int = 1) -> md.Model:
    """A decoder-only model of a batch's `tokens`: (logits [batch, length, vocab], auxiliary loss).

    It has no padding tokens. The key, `feed` and `every` are as in `transformer`.
    """
    parts = Parts(config, feed, every)

    def lm(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        tokens = batch["tokens"]
        x, table = parts.embedded(tokens)
        with md.scope("decoder"):
            x = md.nn.learned_positions(x, precision=parts.precision)
            real = md.broadcast(md.cast(True, "bool"), tokens.dims)
            x, aux = parts.stack(x, "length", real, key, causal=True)
        return parts.logits(x, table), aux

    return md.model(lm)
