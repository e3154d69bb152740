"""The decoder of an encoder-decoder model: one position at a time, by a search of md.nn.decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md
from meshdsl.models.encoder_decoder import Config, Feed, Parts

__all__ = ["Search", "decoder"]

Search = Callable[..., Any]  # a function of md.nn.decode with its options bound


def decoder(
    config: Config, search: Search, feed: Feed | None = None, every: int = 1, feed_place: Feed | None = None
) -> md.Model:
    """A model that decodes each source of a batch with a search; its parameters are those of `transformer`.

    >>> import functools
    >>> from meshdsl.models import seq2seq
    >>> config = seq2seq.Config(batch=2, length=8, layers=1)
    >>> search = functools.partial(md.nn.decode.beam_search, beam=md.Dim("beam", 4))
    >>> md.eval_shape(decoder(config, search).init, md.random.key(0), seq2seq.inputs(config))["embed"]
    float32[vocab=264 model=256]

    `search(step, empty, batch, length, ...)` is a function of md.nn.decode; it also receives further arguments of the
    model, such as a key for sampling. The keys and values of the source are computed once; those of earlier positions
    are cached. Each position uses the feed-forward layer `feed_place` (default: `feed`, which the encoder uses), with
    all beams of its sequence.
    """
    parts, decoder_parts = Parts(config, feed, every), Parts(config, feed_place or feed, every)
    heads, head = parts.heads
    length = md.Dim("length", config.length)

    def source_keys_and_values(memory: md.Tensor) -> list[dict[str, md.Tensor]]:
        """The keys and values of the source for each layer of a block, stacked over blocks."""

        def block(carry: md.Tensor) -> Any:
            source_caches = []
            for number in range(every):
                with md.scope(f"sub_{number}"):
                    name = "cross_attention"
                    source_caches.append(
                        md.nn.keys_and_values(memory, heads, head, name=name, precision=parts.precision)
                    )
            return carry, source_caches

        return md.layers(block, parts.zero, over=parts.blocks, collect=True)[1]

    def decode(batch: dict[str, md.Tensor], *more: md.Tensor) -> Any:
        memory, source_real, table, _ = parts.encoded(batch["source"])
        rows = batch["source"].dims[0]
        with md.scope("decoder"):
            sources = source_keys_and_values(memory)
            zeros = md.broadcast(md.cast(0, parts.precision.compute), [length, parts.wide])
            positions = md.nn.learned_positions(zeros, "length", precision=parts.precision)

        def empty(dims: tuple[md.Dim, ...]) -> Any:
            zero = md.cast(0, parts.precision.compute)
            dims = (parts.blocks, *dims, heads, head)
            return [{kind: md.broadcast(zero, dims) for kind in ("k", "v")} for _ in range(every)]

        def step(tokens: md.Tensor, cache: Any, position: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, Any]:
            beams = [d for d in tokens.dims if d != rows] or [md.Dim("beam", 1)]
            ids = md.reshape(tokens, [rows, *beams])

            def block(x: md.Tensor, layer_caches: Any) -> Any:
                caches = []
                for number, (cache, source) in enumerate(zip(*layer_caches, strict=True)):
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
                        x, _ = decoder_parts.fed(x, beams[0].name, ids != 0, number, None, None)
                    caches.append(cache)
                return x, caches

            with md.scope("decoder"):
                y = parts.looked_up(table, ids) + md.take(positions, position, "length")
                y, cache = md.layers(block, y, over=parts.blocks, xs=(cache, sources), collect=True)
                y = parts.norm(y, "norm")
            return md.reshape(parts.logits(y, table), [*tokens.dims, parts.vocab]), cache

        return search(step, empty, rows, length, *more)

    return md.model(decode)
