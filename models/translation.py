"""Translation of short messages from about fifty languages to English, by one model, with or without experts.

The text is `models.parallel_text`. With `experts=0` the model is dense and takes equal compute: an expert has half the
width of a dense layer, and each token uses two experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models import moe_transformer, parallel_text, seq2seq
from meshdsl.models.parallel_text import Batches, Pair, Text

__all__ = [
    "Config", "Score", "data", "decoder", "dense", "scores", "text_of", "translate", "translation",
]  # fmt: skip


@dataclass(frozen=True)
class Config(moe_transformer.Config):
    """A small Transformer over bytes; with `experts=0` it is dense."""

    batch: int = 32
    source: int = 64
    length: int = 40
    layers: int = 2
    d_model: int = 128
    heads: int = 4
    d_ff: int = 512
    expert_hidden: int = 256
    sequences: int = 4
    dropout: float = 0.0
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    warmup: int = 100  # warm-up steps; the learning rate then decreases as 1 / sqrt(step)
    split_by: str = "source"  # or "message": no English message is in both splits


def model(config: Config) -> md.Model:
    """A model of a batch: (logits [batch, length, vocab], auxiliary loss)."""
    return moe_transformer.model(config) if config.experts else seq2seq.transformer(config)


def decoder(config: Config, search: seq2seq.Search) -> md.Model:
    """A model that decodes each source of a batch with a search."""
    return moe_transformer.decoder(config, search) if config.experts else seq2seq.decoder(config, search)


def loss(config: Config) -> Callable[..., Any]:
    """The loss function: cross entropy plus auxiliary loss. Metrics are both, and the share of ids predicted right.

    Without a key, experts have the evaluation capacity.
    """
    training, evaluation = model(config), model(dataclasses.replace(config, train=False))

    def total(params: Any, batch: dict[str, md.Tensor], key: md.Tensor | None = None) -> Any:
        logits, aux = evaluation(params, batch) if key is None else training(params, batch, key)
        cross_entropy, balance = seq2seq.token_loss(config, logits, batch["targets"]), md.train.mean(aux)
        right = md.train.mean(md.argmax(logits, "vocab") == batch["targets"], batch["targets"] != 0)
        return cross_entropy + balance, {"cross_entropy": cross_entropy, "aux": balance, "right": right}

    return total


def optimizer(config: Config) -> md.optim.Optimizer:
    """Adam with warm-up, or Adafactor as in GShard."""
    if config.optimizer == "adam":
        return md.optim.adam(md.optim.rsqrt(config.learning_rate, config.warmup))
    return moe_transformer.optimizer(config)


def text_of(config: Config) -> Text:
    """The parallel text with the config's sizes."""
    return parallel_text.parallel_text(config.source, config.length, config.split_by)


def data(config: Config, seed: int) -> Batches:
    """The data function of the workload: `data(config, seed)(split, step)` returns a batch."""
    return Batches(text_of(config), config.batch, seed)


def translate(
    params: Mapping[str, md.Tensor],
    config: Config,
    pairs: Iterable[Pair],
    mesh: md.Mesh,
    layout: md.Layout,
    beam: int = 1,
    form: str = "flat",
) -> list[str]:
    """Translates each pair's source text to English, by beam search, or greedily if `beam` is 1."""
    search = md.nn.decode.greedy
    if beam > 1:
        search = functools.partial(md.nn.decode.beam_search, beam=md.Dim("beam", beam), form=form)
    run = _decoding(config, search, mesh, layout)
    text, pairs = text_of(config), list(pairs)
    translations: list[str] = []
    for part in _in_parts(pairs, config.batch):
        rows = text.rows([*part, *[part[-1]] * (config.batch - len(part))])["source"]
        ids = run(params, {"source": md.tensor(rows, "batch source")})
        best = (ids if beam == 1 else ids[0]).numpy().reshape(config.batch, -1, config.length)[:, 0]
        translations += [parallel_text.decode(row) for row in best[: len(part)]]
    return translations


def _decoding(config: Config, search: seq2seq.Search, mesh: md.Mesh, layout: md.Layout) -> md.Compiled:
    model = decoder(config, search)

    def decoding(params: Any, batch: Any) -> Any:
        return model(params, batch)

    return md.compile(decoding, mesh, layout)


def _in_parts(pairs: list[Pair], size: int) -> Iterator[list[Pair]]:
    for first in range(0, len(pairs), size):
        yield pairs[first : first + size]


@dataclass(frozen=True)
class Score:
    """The quality of translations: the percentage of exact matches, and chrF, both from 0 to 100."""

    pairs: int
    exact: float
    chrf: float


def scores(pairs: Iterable[Pair], outputs: Iterable[str]) -> dict[str, Score]:
    """The score of each language, and under "average" the unweighted mean over languages.

    >>> by_language = scores([Pair("de", "Suche", "Search"), Pair("fr", "Indice", "Index")], ["Search", "Tip"])
    >>> by_language["de"], by_language["average"]
    (Score(pairs=1, exact=100.0, chrf=100.0), Score(pairs=2, exact=50.0, chrf=50.0))
    """
    by_language: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair, text in zip(pairs, outputs, strict=True):
        by_language[pair.language].append((text, pair.english))
    score_by_language = {}
    for language, matched in sorted(by_language.items()):
        exact = 100 * sum(a == b for a, b in matched) / len(matched)
        texts, references = zip(*matched, strict=True)
        score_by_language[language] = Score(len(matched), exact, parallel_text.chrf(texts, references))
    n, every = max(1, len(score_by_language)), list(score_by_language.values())
    mean = Score(sum(s.pairs for s in every), sum(s.exact for s in every) / n, sum(s.chrf for s in every) / n)
    return {**score_by_language, "average": mean}


translation = md.Workload(
    "translation",
    Config(),
    model=model,
    inputs=seq2seq.inputs,
    loss=loss,
    optimizer=optimizer,
    layouts=moe_transformer.LAYOUTS,
    data=data,
    mean_over=moe_transformer.parts,
)
dense = translation.replace(experts=0)
