"""Encoder and decoder as layers: all places at once for training, and one place after the other for decoding.

`transformer` and `decoder` have the same parameters. Layers are one scan each. The feed-forward layer of every block's
last layer may come from outside: models/moe_transformer.py puts its experts there. A config is one like that of
models/seq2seq.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["Feed", "Search", "decoder", "transformer"]

# a second feed-forward layer: (x, the dim of its places, which of them are not padding, key) -> (y, auxiliary loss)
Feed = Callable[[md.Tensor, str, md.Tensor, "md.Tensor | None"], tuple[md.Tensor, md.Tensor]]
Search = Callable[..., Any]  # one of md.nn.decode, its options given


@dataclass(frozen=True)
class _Parts:
    """What encoder, decoder and one step of decoding have in common: sizes, and the layers by name."""

    config: Any
    feed: Feed | None
    every: int  # layers of one block of the scan; the last of them has `feed` for its feed-forward layer

    @property
    def precision(self) -> md.nn.Precision:
        return md.nn.Precision(self.config.param_dtype, self.config.compute_dtype, self.config.reduce_dtype)

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
        memory: tuple[md.Tensor, md.Tensor] | None = None,
    ) -> tuple[md.Tensor, md.Tensor]:
        """All layers of the encoder, or, with a memory and which of it is real, of the decoder; and the loss of `feed`.

        Of the places `at` some are real, the others padding.
        """
        heads, head = self.heads
        options = {"length": at, "precision": self.precision}

        def layer(x: md.Tensor, number: int, keys: list[md.Tensor | None]) -> tuple[md.Tensor, md.Tensor | None]:
            with md.scope(f"sub_{number}"):
                y = self.norm(x, "norm_self")
                if memory is None:
                    y = md.nn.multi_head_attention(y, heads, head, mask=md.rename(real, source="memory"), **options)
                    x = x + self.dropped(y, keys[0])
                else:
                    y = md.nn.multi_head_attention(y, heads, head, causal=True, **options)
                    x = x + self.dropped(y, keys[0])
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


def transformer(config: Any, feed: Feed | None = None, every: int = 1) -> md.Model:
    """(logits [batch, length, vocab], auxiliary loss) of a batch; with a key, under dropout and the feed's noise.

    A block of the scan is `every` layers; the last of them has `feed` for its feed-forward layer, where it is given.
    """
    parts = _Parts(config, feed, every)

    def encode_decode(batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
        keys = [None, None] if key is None else [md.random.fold_in(key, i) for i in range(2)]
        memory, real, table, aux = parts.encoded(batch["source"], keys[0])
        y = parts.looked_up(table, batch["inputs"])
        with md.scope("decoder"):
            y = md.nn.learned_positions(y, "length", precision=parts.precision)
            y, more = parts.stack(y, "length", batch["inputs"] != 0, keys[1], (memory, real))
        return parts.logits(y, table), aux + more

    return md.model(encode_decode)


def decoder(config: Any, search: Search, feed: Feed | None = None, every: int = 1) -> md.Model:
    """What a search finds for each source of a batch, with the parameters of `transformer`.

    >>> import functools
    >>> from models import seq2seq
    >>> config = seq2seq.Config(batch=2, length=8, layers=1)
    >>> search = functools.partial(md.nn.decode.beam_search, beam=md.Dim("beam", 4))
    >>> md.eval_shape(decoder(config, search).init, md.random.key(0), seq2seq.inputs(config))["embed"]
    float32[vocab=264 model=256]

    `search(step, empty, batch, length, ...)` is one of md.nn.decode; what the model is called with after the batch, a
    key for sampling, goes to it. A place computes its own keys and values and reads those kept before, and those of
    the source, which are computed once. It goes through `feed` with the other beams of its sequence.
    """
    parts = _Parts(config, feed, every)
    heads, head = parts.heads
    length = md.Dim("length", config.length)

    def crossed(memory: md.Tensor) -> list[dict[str, md.Tensor]]:
        """For each layer of a block, the keys and values of the source, stacked."""

        def block(carry: md.Tensor) -> Any:
            kept = []
            for number in range(every):
                with md.scope(f"sub_{number}"):
                    name = "cross_attention"
                    kept.append(md.nn.keys_and_values(memory, heads, head, name=name, precision=parts.precision))
            return carry, kept

        return md.layers(block, parts.zero, over=parts.blocks, collect=True)[1]

    def found(batch: dict[str, md.Tensor], *more: md.Tensor) -> Any:
        memory, source_real, table, _ = parts.encoded(batch["source"])
        rows = batch["source"].dims[0]
        with md.scope("decoder"):
            sources = crossed(memory)
            nothing = md.broadcast(md.cast(0, parts.precision.compute), [length, parts.wide])
            places = md.nn.learned_positions(nothing, "length", precision=parts.precision)

        def empty(dims: tuple[md.Dim, ...]) -> Any:
            zero = md.cast(0, parts.precision.compute)
            dims = (parts.blocks, *dims, heads, head)
            return [{kind: md.broadcast(zero, dims) for kind in ("k", "v")} for _ in range(every)]

        def step(tokens: md.Tensor, cache: Any, position: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, Any]:
            beams = [d for d in tokens.dims if d != rows] or [md.Dim("beam", 1)]
            ids = md.reshape(tokens, [rows, *beams])

            def block(x: md.Tensor, kept: Any) -> Any:
                caches = []
                for number, (cache, source) in enumerate(zip(*kept, strict=True)):
                    with md.scope(f"sub_{number}"):
                        y, cache = md.nn.cached_attention(
                            parts.norm(x, "norm_self"), cache, heads, head, position=position, mask=mask,
                            precision=parts.precision,
                        )  # fmt: skip
                        x = x + y
                        x = x + md.nn.attention_to(
                            parts.norm(x, "norm_cross"), source, heads, head, mask=source_real, name="cross_attention",
                            precision=parts.precision,
                        )  # fmt: skip
                        x, _ = parts.fed(x, beams[0].name, ids != 0, number, None, None)
                    caches.append(cache)
                return x, caches

            with md.scope("decoder"):
                y = parts.looked_up(table, ids) + md.take(places, position, "length")
                y, cache = md.layers(block, y, over=parts.blocks, xs=(cache, sources), collect=True)
                y = parts.norm(y, "norm")
            return md.reshape(parts.logits(y, table), [*tokens.dims, parts.vocab]), cache

        return search(step, empty, rows, length, *more)

    return md.model(found)
