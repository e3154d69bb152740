"""Encoder and decoder as layers, one scan each; `language_model` is a decoder alone.

All places are computed at once, as training does; models/decoding.py goes one place after the other, with the same
parameters. The feed-forward layer of every block's last layer may come from outside: models/moe_transformer.py puts
its experts there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["Config", "Feed", "Parts", "language_model", "transformer"]

# a second feed-forward layer: (x, the dim of its places, which of them are not padding, key) -> (y, auxiliary loss)
Feed = Callable[[md.Tensor, str, md.Tensor, "md.Tensor | None"], tuple[md.Tensor, md.Tensor]]


@dataclass(frozen=True)
class Config:
    """Sizes and choices that all these models have; a vocabulary of 259 reads bytes, with padding, start and end."""

    batch: int = 16
    length: int = 64  # places of the text that is made
    vocab: int = 264
    layers: int = 4  # of the encoder, and of the decoder
    d_model: int = 256
    heads: int = 8
    d_head: int = 32
    d_ff: int = 1024
    tied: bool = True  # the output layer is the embedding table, which source and target share
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
    """What encoder, decoder and one step of decoding have in common: sizes, and the layers by name.

    Raises `ShapeError` where the layers are no whole blocks.
    """

    config: Config
    feed: Feed | None
    every: int  # layers of one block of the scan; the last of them has `feed` for its feed-forward layer

    def __post_init__(self) -> None:
        if self.config.layers % self.every:
            raise md.ShapeError(
                f"layers come in blocks of {self.every}, the last of which has experts; {self.config.layers} are no "
                f"whole blocks\n  take {self.config.layers + self.every - self.config.layers % self.every} layers"
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
        """x after the feed-forward layer of the block's layer of this number, and that layer's auxiliary loss."""
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
        """The logits of the decoder's last layer, by the embedding table or a table of their own."""
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
        """All layers of the encoder or, causal, of the decoder, which reads a memory where there is one; and the loss
        of `feed`.

        Of the places `at` some are real, the others padding; the memory comes with which of it is real.
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
                mine = None if key is None else md.random.fold_in(key, number)
                x, aux = layer(x, number, [None if mine is None else md.random.fold_in(mine, i) for i in range(4)])
                total = total if aux is None else total + md.cast(aux, total.dtype)
            return x, total

        keys = None if key is None else md.random.split(key, self.blocks)
        x, total = md.layers(block, (x, self.zero), over=self.blocks, xs=keys, remat=self.config.remat)
        return self.norm(x, "norm"), total

    def encoded(
        self, source: md.Tensor, key: md.Tensor | None = None
    ) -> tuple[md.Tensor, md.Tensor, md.Tensor, md.Tensor]:
        """The memory that the decoder reads, which of it is real, the embedding table, and the auxiliary loss."""
        x, table = self.embedded(source)
        with md.scope("encoder"):
            x = md.nn.learned_positions(x, "source", precision=self.precision)
            x, aux = self.stack(x, "source", source != 0, key)
        return md.rename(x, source="memory"), md.rename(source != 0, source="memory"), table, aux


def transformer(config: Config, feed: Feed | None = None, every: int = 1) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch; with a key, under dropout and the feed's noise.

    A block of the scan is `every` layers; the last of them has `feed` for its feed-forward layer, where it is given.
    """
    parts = Parts(config, feed, every)

    def encode_decode(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        keys = [None, None] if key is None else [md.random.fold_in(key, i) for i in range(2)]
        memory, real, table, aux = parts.encoded(batch["source"], keys[0])
        y = parts.looked_up(table, batch["inputs"])
        with md.scope("decoder"):
            y = md.nn.learned_positions(y, "length", precision=parts.precision)
            y, more = parts.stack(y, "length", batch["inputs"] != 0, keys[1], causal=True, memory=(memory, real))
        return parts.logits(y, table), aux + more

    return md.model(encode_decode)


def language_model(config: Config, feed: Feed | None = None, every: int = 1) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch's `tokens`: the decoder without a source.

    No token is padding. A key, `feed` and `every` are as in `transformer`.
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
