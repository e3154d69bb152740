"""The corpus: the same bytes and batches each time, and no document in both splits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import meshdsl as md
from meshdsl.train import Corpus, Document, corpus
from meshdsl.train.data import KINDS, SPLITS

FIRST = [b"t 6; \0docu", b"ment 13; d"]


def small(count: int = 40) -> Corpus:
    return Corpus(Document(f"prose/{i}", "prose", f"document {i}; ".encode() * 20) for i in range(count))


def test_corpus_has_all_parts_and_no_zero_bytes():
    whole = corpus()
    assert sum(len(d.text) for d in whole.documents) > 4_000_000
    for split in SPLITS:
        for kind in KINDS:
            assert sum(len(d.text) for d in whole.of(split, kind)) > 20_000, (split, kind)
    assert not any(b"\0" in d.text for d in whole.documents)


def test_corpus_splits_are_disjoint():
    train, held_out = ({d.name for kind in KINDS for d in corpus().of(split, kind)} for split in SPLITS)
    assert train.isdisjoint(held_out)
    assert train | held_out == {d.name for d in corpus().documents}


def test_corpus_split_of_a_document_is_stable():
    before = {d.name: d.split for d in small(20).documents}
    after = {d.name: d.split for d in small(40).documents}
    assert before.items() <= after.items()
    assert set(after.values()) == set(SPLITS)


def test_corpus_batch_is_equal_in_another_process():
    script = (
        "import hashlib; from meshdsl.train import corpus\n"
        "batch = corpus().batch('train', 3, 7, 4, 64)\n"
        "print(corpus().sha256, hashlib.sha256(batch['tokens'].tobytes() + batch['targets'].tobytes()).hexdigest())"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in "ab"]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.split()[0] == corpus().sha256


def test_corpus_batch_depends_on_split_seed_and_step():
    def draw(split: str, seed: int, step: int) -> bytes:
        return small().batch(split, seed, step, 4, 16)["tokens"].tobytes()

    assert draw("train", 1, 2) == draw("train", 1, 2)
    different = {draw("train", 1, 2), draw("train", 1, 3), draw("train", 2, 2), draw("held_out", 1, 2)}
    assert len(different) == 4


def test_corpus_batch_targets_are_the_next_tokens():
    whole = small()
    text = {split: b"".join(d.text + b"\0" for d in whole.of(split, "prose")) for split in SPLITS}
    for split in SPLITS:
        batch = whole.batch(split, 0, 0, 8, 16)
        assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
        assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        for row, targets in zip(batch["tokens"], batch["targets"], strict=True):
            assert bytes(row.tolist()) + bytes(targets[-1:].tolist()) in text[split]


def test_corpus_first_batch_is_pinned():
    """Raw Philox words, whose values NumPy promises to keep."""
    batch = small().batch("train", 0, 0, 2, 10)
    assert [bytes(row.tolist()) for row in batch["tokens"]] == FIRST


@pytest.mark.parametrize("length", [1, 5, 199])
def test_corpus_batch_draws_every_window(length: int):
    one = Corpus([Document("b", "prose", bytes(range(1, 200)))])
    starts = {int(row[0]) for step in range(60) for row in one.batch("train", 0, step, 32, length)["tokens"]}
    assert starts == set(range(1, 201 - length)), "the text and its end make 200 bytes"


def test_corpus_errors():
    with pytest.raises(md.MeshdslError, match="has no text of 1000 bytes; its longest has 200"):
        Corpus([Document("b", "prose", b"x" * 199)]).batch("train", 0, 0, 1, 999)
    with pytest.raises(md.MeshdslError, match="must be one of train, held_out, got 'test'"):
        small().batch("test", 0, 0, 1, 4)
    with pytest.raises(md.MeshdslError, match="two documents called 'a'"):
        Corpus([Document("a", "prose", b"x"), Document("a", "source", b"y")])
