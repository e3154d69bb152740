"""Parts of models with an encoder and a decoder: their batch, their loss, and decoding with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models import causal

__all__ = ["Cache", "Network", "inputs", "workload"]

Cache = dict[str, md.Tensor]


@dataclass(frozen=True)
class Network:
    """The functions of a model.

    Without a cache, `decode` computes the logits of every position, and attends to `encoded`. With one, `ids` are those
    of one position of each sequence; the cache has their keys and values "k" and "v" [layer, batch, memory, heads,
    head], and those of the source, "cross_k" and "cross_v".
    """

    table: Callable[[], md.Tensor]  # of the embedding, which encoder and decoder share
    encode: Callable[[md.Tensor, md.Tensor], md.Tensor]  # (table, ids) -> encoded [batch, source, model]
    keys: Callable[[md.Tensor], Cache]  # encoded -> "k" and "v" for each layer of the decoder
    decode: Callable[..., Any]  # (table, ids, encoded, cache, position) -> (logits, cache)


def inputs(config: Any) -> dict[str, object]:
    """The specs of a batch: source [batch, source], tokens and the tokens that follow them [batch, length]."""
    source = md.spec([md.Dim("batch", config.batch), md.Dim("source", config.source)], "int32")
    return {"source": source, **causal.inputs(config)}


def workload(name: str, config: Any, network: Callable[[Any], Network], **more: Any) -> md.Workload:
    """The workload of a network: logits, loss, Adam, and decoding with a cache."""

    def model(config: Any) -> md.Model:
        run = network(config)

        def logits(batch: dict[str, md.Tensor]) -> md.Tensor:
            table = run.table()
            return run.decode(table, batch["tokens"], run.encode(table, batch["source"]))[0]

        return md.model(logits)

    def decoder(config: Any, search: Callable[..., Any]) -> Callable[..., md.Tensor]:
        """The function `(params, prompt[, key])`: the decoder's tokens for prompts [batch, length] of the encoder."""
        run = network(config)
        once = md.model(lambda ids: run.keys(run.encode(run.table(), ids)))
        step = md.model(lambda ids, cache, position: run.decode(run.table(), ids, None, cache, position))

        def decode(params: dict[str, md.Tensor], prompt: md.Tensor, *key: md.Tensor) -> md.Tensor:
            early = [p for p in params if p.startswith("encoder/") or p.endswith(("cross/wk", "cross/wv"))]
            cross = once({p: params[p] for p in ["embed", *early]}, md.rename(prompt, length="source"))
            late = {p: x for p, x in params.items() if p not in early}

            def empty(dims: tuple[md.Dim, ...]) -> Cache:
                zeros = {kind: md.zeros([x.dims[0], *dims, *x.dims[-2:]], x.dtype) for kind, x in cross.items()}
                return zeros | {f"cross_{kind}": x for kind, x in cross.items()}

            start = md.zeros([prompt.dims[0], md.Dim("length", 1)], "int32")  # the padding token comes first
            return search(functools.partial(step, late), empty, start, *key)

        return decode

    return md.Workload(
        name, config, model=model, inputs=inputs, loss=lambda config: causal.loss(model(config)), decoder=decoder,
        optimizer=lambda config: md.optim.adam(config.learning_rate), **more,
    )  # fmt: skip
