"""The text is read in place and split without leaks; a model's translations are those of its decoder, scored."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import struct
import types
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import decoding, parallel_text, translation
from meshdsl.models.parallel_text import Pair, Text, catalogue, chrf, decode, encode

PAIRS = [
    Pair(language, f"{language}{i} {'x' * i}", f"message {i}") for language in ("de", "fr", "ja") for i in range(40)
]


def compiled(messages: dict[str, str], order: str) -> bytes:
    """A catalogue as msgfmt writes it."""
    sides = [[text.encode() for text in side] for side in (messages.keys(), messages.values())]
    start, tables, strings = 28 + 16 * len(messages), [], b""
    for side in sides:
        for text in side:
            tables += [len(text), start + len(strings)]
            strings += text + b"\0"
    header = (0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0)
    return struct.pack(f"{order}{7 + len(tables)}I", *header, *tables) + strings


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogue_is_parsed(order: str):
    messages = {"": "Language: de", "Search": "Suche", "no": "", "page\0pages": "Seite\0Seiten"}
    assert catalogue(compiled(messages, order)) == {"Search": "Suche", "page": "Seite"}


@pytest.mark.parametrize("data", [b"", b"nothing", compiled({"a": "b"}, "<")[:-3], compiled({"a": "b"}, "<")[:20]])
def test_catalogue_errors(data: bytes):
    with pytest.raises(md.MeshdslError, match="not a compiled message catalogue"):
        catalogue(data)


def test_parallel_text_error_without_sphinx(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parallel_text._messages.cache_clear()
    with pytest.raises(md.MeshdslError, match="pip install sphinx"):
        parallel_text._messages()


@pytest.mark.parametrize("key", parallel_text.KEYS)
def test_parallel_text_splits_are_disjoint(key: str):
    text = Text(PAIRS, 32, 16, key)
    sides = [{pair.text if key == "source" else pair.english for pair in pairs} for pairs in text.pairs.values()]
    assert all(sides) and not sides[0] & sides[1]
    assert sorted(text.pairs["train"] + text.pairs["held_out"]) == sorted(p for p in PAIRS if len(p.text) + 4 <= 32)
    assert text.left_out == len(PAIRS) - sum(map(len, text.pairs.values())) > 0


def test_parallel_text_batch_depends_on_its_arguments():
    text = Text(PAIRS, 32, 16)
    first = text.batch("train", 3, 1, 4)
    for again, same in ((text.batch("train", 3, 1, 4), True), (text.batch("train", 3, 2, 4), False)):
        assert np.array_equal(first["source"], again["source"]) == same
    np.testing.assert_array_equal(first["inputs"][:, 0], 1)
    for row in range(4):
        assert decode(first["inputs"][row, 1:]) == decode(first["targets"][row])
        assert (first["inputs"][row] != 0).sum() == (first["targets"][row] != 0).sum()
    held_out = text.pairs["held_out"]
    rows = text.batch("held_out", 0, 1, 2)["targets"]
    assert [decode(row) for row in rows] == [held_out[i % len(held_out)].english for i in (2, 3)]


@pytest.mark.parametrize("module", [parallel_text, translation, decoding])
def test_translation_docstring_examples(module: types.ModuleType):
    with jax.enable_x64(False):
        assert doctest.testmod(module, extraglobs={"md": md}).failed == 0


def test_parallel_text_encode_decode_round_trip():
    for text in ("", "a", "日本語 %s", "\x00\xff"):
        assert decode(encode(text) + [0, 7]) == text


def test_chrf_counts_character_ngrams():
    assert chrf(["ab"], ["cd"]) == 0.0 and chrf([""], [""]) == 0.0
    # n = 1: 2 of 3 made, 2 of 2 wanted; n = 2: 1 of 2 made, 1 of 1 wanted
    precision, recall = (2 / 3 + 1 / 2) / 2, 1.0
    assert chrf(["a bc"], ["ab"]) == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))


def test_translate_returns_one_text_per_pair(monkeypatch: pytest.MonkeyPatch):
    text = Text(PAIRS, 32, 16)
    monkeypatch.setattr(translation, "text_of", lambda config: text)
    seen = []

    def decoding(*_: Any) -> Any:
        def run(params: Any, batch: dict[str, md.Tensor]) -> md.Tensor:
            source = batch["source"].numpy()
            seen.append(source.shape)
            return md.tensor(source[:, 3:19], "batch length")  # behind the language's code

        return run

    monkeypatch.setattr(translation, "_decoding", decoding)
    config = translation.translation.replace(batch=8, source=32, length=16).config
    pairs = text.pairs["train"][:19]
    made = translation.translate({}, config, pairs, md.Mesh("rows:1"), md.Layout(""))
    assert made == [pair.text[:16] for pair in pairs] and seen == [(8, 32)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 2])
def test_translate_after_training(experts: int, monkeypatch: pytest.MonkeyPatch):
    pairs = [Pair("de", "S", "Search"), Pair("fr", "I", "Index")]
    text = Text(pairs, 8, 8)
    text.pairs["train"] = text.pairs["held_out"] = pairs
    monkeypatch.setattr(translation, "text_of", lambda config: text)
    workload = translation.translation.replace(
        experts=experts, batch=4, source=8, length=8, d_model=32, heads=2, d_head=16, d_ff=32, expert_hidden=16,
        warmup=10, learning_rate=1e-2, sequences=1, label_smoothing=0.0,
    )  # fmt: skip
    mesh, layout = md.Mesh("rows:1"), md.Layout("")
    params, state = workload.init(md.random.key(0))
    step = md.compile(workload.train_step(), mesh, layout)
    batches = workload.data(workload.config, 0) if workload.data else None
    assert batches is not None
    for i in range(40):
        batch = {
            name: md.tensor(x, f"batch {'source' if name == 'source' else 'length'}")
            for name, x in batches("train", i).items()
        }
        params, state, _ = step(params, state, batch, md.random.key(i))
    made = translation.translate(params, workload.config, pairs, mesh, layout)
    assert made == ["Search", "Index"]
    assert dataclasses.astuple(translation.scores(pairs, made)["average"]) == (2, 100.0, 100.0)
