"""Searches find what counting everything finds; both forms of beam search and every layout find the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import moe_transformer, seq2seq
from meshdsl.nn.decode.single import filter_logits
from tests.nn.moe_reference import simulated

DOUBLE = md.nn.Precision("float64", "float64", "float64")
BATCH, WIDE, HEADS, HEAD = md.dims("batch:2 model:6 heads:2 head:3")
ONE = "rows:1", ""
SPLIT = [
    ("rows:2", "batch:rows"),
    ("rows:2 cols:2", "batch:rows; heads:cols; vocab:cols"),
    ("rows:2 cols:2", "batch:cols; memory:rows"),
]
Params = dict[str, md.Tensor]


def toy(search: Any, vocab: int, length: int) -> md.Model:
    """One attention layer that reads all it has written: nothing else remembers."""
    words, places = md.Dim("vocab", vocab), md.Dim("length", length)

    def found(*key: md.Tensor) -> Any:
        table = md.param("table", [words, WIDE], dtype="float64")
        position = md.param("position", [places, WIDE], dtype="float64")

        def step(tokens: md.Tensor, cache: Any, at: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, Any]:
            x = md.take(table, tokens, words) + md.take(position, at, places)
            y, cache = md.nn.cached_attention(x, cache, HEADS, HEAD, position=at, mask=mask, precision=DOUBLE)
            return md.einsum(x + y, table, out=[*tokens.dims, words]), cache

        def empty(dims: tuple[md.Dim, ...]) -> Any:
            zeros = md.broadcast(md.cast(0, "float64"), [*dims, HEADS, HEAD])
            return {"k": zeros, "v": zeros}

        return search(step, empty, BATCH, places, *key)

    return md.model(found)


def drawn(model: md.Model, seed: int, *key: Any, scale: float = 1.0) -> Params:
    rng = np.random.default_rng(seed)
    return {
        name: md.tensor(scale * rng.standard_normal([d.size for d in kind.dims]), kind.dims)
        for name, kind in model.specs(*key).items()
    }


def beam_search(beam: int, form: str, alpha: float = 0.6) -> Any:
    return functools.partial(
        md.nn.decode.beam_search, beam=md.Dim("beam", beam), form=form, alpha=alpha, dtype="float64"
    )


def log_p(w: dict[str, np.ndarray], history: tuple[int, ...]) -> np.ndarray:
    """The toy's log-probabilities [vocab] after a history, on whole arrays."""
    x = w["table"][list(history)] + w["position"][: len(history)]
    q, k, v = (np.einsum("lm,mhd->lhd", x, w[f"attention/w{kind}"]) for kind in "qkv")
    scores = np.exp(np.einsum("hd,lhd->hl", q[-1], k) / math.sqrt(HEAD.size))
    mixed = np.einsum("hl,lhd->hd", scores / scores.sum(1, keepdims=True), v)
    logits = w["table"] @ (x[-1] + np.einsum("hd,hdm->m", mixed, w["attention/wo"]))
    return logits - np.log(np.exp(logits).sum())


def counted(w: dict[str, np.ndarray], vocab: int, length: int, alpha: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every sequence that ends (2) within `length`, with its score, best first; a sequence starts from 1."""
    found = []
    others = [i for i in range(vocab) if i != 2]
    for size in range(length):
        for words in itertools.product(others, repeat=size):
            whole = (*words, 2)
            total = sum(log_p(w, (1, *whole[:i]))[whole[i]] for i in range(len(whole)))
            found.append((total / ((5 + len(whole)) / 6) ** alpha, whole + (0,) * (length - len(whole))))
    return sorted(found, reverse=True)


@pytest.mark.parametrize(("vocab", "beam"), [(3, 12), (4, 54)])  # so many that nothing is left out
def test_beam_search_equals_exhaustive_search(vocab: int, beam: int):
    for form in md.nn.decode.FORMS:
        model = toy(beam_search(beam, form), vocab, 4)
        params = drawn(model, vocab)
        ids, scores = simulated(model, params)
        want = counted({name: p.numpy() for name, p in params.items()}, vocab, 4, 0.6)
        n = min(beam, len(want))
        assert n > 10
        for row in range(BATCH.size):
            np.testing.assert_allclose(scores[row, :n], [score for score, _ in want[:n]], rtol=1e-12)
            assert [tuple(words) for words in ids[row, :n]] == [words for _, words in want[:n]]


def disagreements(seeds: range, beam: int = 3, vocab: int = 7, length: int = 6) -> list[int]:
    """The seeds whose parameters make the two forms of beam search differ."""
    models = [toy(beam_search(beam, form), vocab, length) for form in md.nn.decode.FORMS]
    run = md.compile(lambda params: [model(params) for model in models], *ONE)
    differ = []
    for seed in seeds:
        (ids, scores), (ids_too, scores_too) = run(drawn(models[0], seed, scale=0.3 + seed % 7 / 4))
        same = np.array_equal(ids.numpy(), ids_too.numpy())
        if not same or not np.allclose(scores.numpy(), scores_too.numpy(), rtol=1e-12, atol=0):
            differ.append(seed)
    return differ


def test_beam_search_forms_agree():
    assert disagreements(range(40)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("beam", "vocab", "length"), [(2, 5, 8), (4, 9, 6), (5, 3, 7), (8, 17, 5)])
def test_beam_search_forms_agree_on_long_sequences(beam: int, vocab: int, length: int):
    assert disagreements(range(1000, 1250), beam, vocab, length) == []


def test_greedy_takes_the_most_likely_token():
    model = toy(md.nn.decode.greedy, 6, 5)
    for seed in range(3):
        params = drawn(model, seed)
        w = {name: p.numpy() for name, p in params.items()}
        words = (1,)
        while len(words) < 6 and words[-1] != 2:
            words = (*words, int(log_p(w, words).argmax()))
        assert [tuple(row) for row in simulated(model, params)] == [(*words[1:], *[0] * (6 - len(words)))] * 2


def test_decode_is_equal_under_every_layout():
    key = md.random.key(5)
    beams = [("rows:2 cols:2", "beam:cols; memory:rows")]
    searches = [
        (md.nn.decode.greedy, (), []),
        (functools.partial(md.nn.decode.sample, top_k=3, top_p=0.9, temperature=0.7), (key,), []),
        (beam_search(2, "flat"), (), beams),
        (beam_search(2, "reorder"), (), beams),
    ]
    for search, more, also in searches:
        model = toy(search, 6, 4)
        params = drawn(model, 1, *more)
        want = simulated(model, params, *more)
        for mesh, layout in SPLIT + also:
            got = simulated(model, params, *more, mesh=mesh, layout=layout)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=f"{search} under {layout}")


def test_sample_equals_jax_categorical():
    logits = np.random.default_rng(0).standard_normal((2, 7)).astype(np.float32)
    key = md.random.key(3)

    def step(tokens: md.Tensor, cache: Any, position: md.Tensor, mask: md.Tensor) -> tuple[md.Tensor, Any]:
        return md.tensor(logits, "batch vocab"), cache

    ids = md.nn.decode.sample(step, lambda dims: (), BATCH, md.Dim("length", 5), key, temperature=0.5, end=9).numpy()
    for t in range(5):
        want = jax.random.categorical(jax.random.fold_in(jax.random.key(3), t), logits / 0.5)
        np.testing.assert_array_equal(ids[:, t], want)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (1, 1.0), (3, 1.0), (None, 0.6), (4, 0.5), (None, 1e-6)])
def test_filter_logits_keeps_top_k_and_top_p(top_k: int | None, top_p: float):
    logits = np.random.default_rng(1).standard_normal((2, 7)).astype(np.float32)
    left = filter_logits(md.tensor(logits, "batch vocab"), md.Dim("vocab", 7), top_k, top_p).numpy() > -1e29
    for row, kept in zip(logits, left, strict=True):
        order = np.argsort(-row)[: top_k or 7]
        p = np.exp(row[order]) / np.exp(row[order]).sum()
        want = order[: 1 + np.searchsorted(np.cumsum(p), top_p)]
        assert set(np.flatnonzero(kept)) == set(want)


TINY = {
    "batch": 2, "source": 5, "length": 4, "vocab": 7, "layers": 2, "d_model": 8, "heads": 2, "d_head": 4, "d_ff": 12,
    "param_dtype": "float64", "compute_dtype": "float64", "reduce_dtype": "float64",
}  # fmt: skip
DENSE = seq2seq.seq2seq.replace(**TINY)
# every expert has a place for every token: what a group drops depends on the group, which decoding makes another one
MOE = moe_transformer.moe.replace(**TINY, experts=4, expert_hidden=6, train=False, eval_capacity_factor=2.0)
CROWDED = MOE.replace(batch=4, sequences=4)  # four tokens go to experts at each place


def tiny_batch(rows: int) -> dict[str, md.Tensor]:
    rng = np.random.default_rng(2)
    source, ids = rng.integers(1, 7, (rows, 5)).astype(np.int32), rng.integers(1, 7, (rows, 4)).astype(np.int32)
    source[1, 3:] = 0
    return {"source": md.tensor(source, "batch source"), "inputs": md.tensor(ids, "batch length")}


def forced(step: Any, empty: Any, rows: md.Dim, length: md.Dim, inputs: md.Tensor) -> md.Tensor:
    """A search that takes the given ids; returns the logits of every place."""
    places = md.Dim("memory", length.size)

    def place(cache: Any, x: tuple[md.Tensor, md.Tensor]) -> Any:
        logits, cache = step(x[1], cache, x[0], md.iota(places) <= x[0])
        return cache, logits

    xs = md.iota(length), inputs
    return md.scan(place, empty((rows, places)), xs, over=length)[1]


@pytest.mark.parametrize(
    ("decoder", "workload", "split"),
    [
        (seq2seq.decoder, DENSE, ("rows:2 cols:2", seq2seq.LAYOUTS["data_model"][1])),
        (moe_transformer.decoder, MOE, ("rows:2 cols:2", moe_transformer.LAYOUTS["experts_model"][1])),
        (moe_transformer.decoder, CROWDED, ("rows:1", "")),
    ],
    ids=["seq2seq", "moe", "crowded"],
)
def test_cached_attention_equals_full_attention(decoder: Any, workload: md.Workload, split: tuple[str, str]):
    batch = tiny_batch(workload.config.batch)
    whole, model = workload.model(workload.config), decoder(workload.config, forced)
    params = drawn(whole, 0, batch, scale=0.5)
    assert model.specs(batch, batch["inputs"]) == whole.specs(batch)
    want, _ = simulated(whole, params, batch)
    for mesh, layout in (ONE, split):
        got = simulated(model, params, batch, batch["inputs"], mesh=mesh, layout=layout)
        np.testing.assert_allclose(np.moveaxis(got, 0, 1), want, rtol=1e-11, atol=1e-13, err_msg=layout)


def test_decoder_capacity_drops_tokens_only_below_full():
    batch, config = tiny_batch(4), CROWDED.config
    params = drawn(moe_transformer.model(config), 0, batch, scale=0.5)

    def logits(**changes: Any) -> np.ndarray:
        changed = dataclasses.replace(config, **changes)
        return simulated(moe_transformer.decoder(changed, forced), params, batch, batch["inputs"])

    whole = logits()
    np.testing.assert_array_equal(logits(decode_capacity_factor=2.0), whole)  # 2 * 2 * 4 / 4: a slot for every token
    assert np.abs(logits(decode_capacity_factor=0.5) - whole).max() > 1e-3


def test_decode_errors_name_the_alternatives():
    search = functools.partial(md.nn.decode.beam_search, beam=md.Dim("beam", 2))
    with pytest.raises(md.ShapeError, match="unknown form of beam search 'sorted'; known: flat, reorder"):
        toy(functools.partial(search, form="sorted"), 4, 3).specs()
    with pytest.raises(md.ShapeError, match="at least two tokens"):
        toy(search, 1, 3).specs()
    for options, message in (
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": md.Dim("k", 2)}, "top_k must be an integer"),
    ):
        with pytest.raises(md.ShapeError, match=message):
            toy(functools.partial(md.nn.decode.sample, **options), 4, 3).specs(md.random.key(0))
    wrong: Any
    for wrong, message in (
        ((md.tensor(1.0),), "must return \\(logits, cache\\), .* got tuple of Tensor"),
        (md.tensor(1.0), "got Tensor"),
        ((np.ones((2, 4)), ()), "got tuple of ndarray, tuple"),
    ):
        with pytest.raises(md.ShapeError, match=message):
            md.nn.decode.greedy(lambda *_, results=wrong: results, lambda dims: (), BATCH, md.Dim("length", 3))
    wrong = 2
    with pytest.raises(md.ShapeError, match=r"the beam must have a size, .* got 2"):
        toy(functools.partial(search, beam=wrong), 4, 3).specs()
    x, cache = md.spec("batch:2 beam:2 lane:2 model:6"), {"k": md.spec("batch:2 memory:4 heads:2 head:3")}
    with pytest.raises(md.ShapeError, match="at most one of them can be interleaved in the memory"):
        options: dict[str, Any] = {"heads": HEADS, "head": HEAD, "position": None, "mask": None}
        attend = functools.partial(md.nn.cached_attention, **options)
        md.model(lambda x, cache: attend(x, cache)).specs(x, cache)
