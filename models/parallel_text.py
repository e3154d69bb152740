r"""Parallel text in 70 languages, read from the message catalogues of the installed Sphinx.

A catalogue contains the English messages of Sphinx and their translations into one language. Here the translation is
the source, and the English message is the target. Nothing is downloaded or copied.

Equal Sphinx releases have equal text. A batch is a pure function of (split, seed, step).
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

import meshdsl as md

__all__ = [
    "Batches",
    "END",
    "PADDING",
    "START",
    "Pair",
    "Text",
    "catalogue",
    "chrf",
    "decode",
    "encode",
    "parallel_text",
]

PADDING, START, END = 0, 1, 2
FIRST_BYTE = 3  # byte b is the id b + 3
VOCABULARY = 256 + FIRST_BYTE
SPLITS = ("train", "held_out")
KEYS = ("source", "message")
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, order=True)
class Pair:
    """A translated text, its language, and the English message."""

    language: str
    text: str
    english: str


def encode(text: str) -> list[int]:
    """The ids of a text's bytes, followed by END.

    >>> encode("né")
    [113, 198, 172, 2]
    """
    return [byte + FIRST_BYTE for byte in text.encode()] + [END]


def decode(ids: Iterable[int]) -> str:
    """The text of the ids before END; invalid UTF-8 becomes the replacement character.

    >>> decode([113, 198, 172, 2, 0, 0])
    'né'
    """
    raw = bytearray()
    for i in ids:
        if i == END:
            break
        if FIRST_BYTE <= i < VOCABULARY:
            raw.append(i - FIRST_BYTE)
    return raw.decode(errors="replace")


def catalogue(data: bytes) -> dict[str, str]:
    """Parses a compiled catalogue (GNU gettext's .mo file): English message -> translation. Uses first plural forms.

    >>> header = struct.pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 0)
    >>> catalogue(header + struct.pack("<4I", 5, 44, 6, 50) + b"Index\\0Indice\\0")
    {'Index': 'Indice'}

    Raises `MeshdslError` if the data is not a catalogue.
    """
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    try:
        if order is None:
            raise ValueError("it does not start with the magic number of a catalogue")
        count, messages, translations = struct.unpack_from(f"{order}3I", data, 8)
        result = {}
        for i in range(count):
            english, text = (_string(data, order, table + 8 * i) for table in (messages, translations))
            if english and text:
                result[english] = text
        return result
    except (ValueError, struct.error) as error:
        raise md.MeshdslError(f"this is not a compiled message catalogue: {error}") from None


def _string(data: bytes, order: str, indices: int) -> str:
    size, start = struct.unpack_from(f"{order}2I", data, indices)
    if start + size > len(data):
        raise ValueError(f"a message of {size} bytes at byte {start} exceeds the file's {len(data)} bytes")
    return data[start : start + size].split(b"\0")[0].decode()


class Text:
    """Pairs of at most `source` and `length` ids, split into train and held-out pairs by a hash of the text.

    >>> text = Text([Pair("fr", "Indice", "Index"), Pair("de", "Suche", "Search")], source=16, length=8)
    >>> rows = text.rows([Pair("de", "Suche", "Search")])
    >>> decode(rows["source"][0]), rows["inputs"][0].tolist()
    ('de Suche', [1, 86, 104, 100, 117, 102, 107, 0])

    A source is the language's code, a blank, the text, and END. With `key="source"`, all pairs of one source text are
    in one split, in all languages; its English message may also occur in the other split, from another language. With
    `key="message"`, no English message is in both splits. Raises `MeshdslError` for an unknown key; `batch` raises it
    for an empty split.
    """

    def __init__(self, pairs: Iterable[Pair], source: int, length: int, key: str = "source"):
        if key not in KEYS:
            raise md.MeshdslError(f"key must be one of {', '.join(KEYS)}, got {key!r}")
        unique_pairs = sorted(set(pairs))
        fits = [
            pair
            for pair in unique_pairs
            if len(self.source_ids(pair)) <= source and len(encode(pair.english)) <= length
        ]
        self.left_out = len(unique_pairs) - len(fits)
        self.sizes, self.key = (source, length), key
        held_out = [_held_out(pair.text if key == "source" else pair.english) for pair in fits]
        self.pairs = {
            "train": [pair for pair, held in zip(fits, held_out, strict=True) if not held],
            "held_out": sorted((pair for pair, held in zip(fits, held_out, strict=True) if held), key=_shuffled),
        }

    @staticmethod
    def source_ids(pair: Pair) -> list[int]:
        """The ids of the source: the language's code, a blank and the text."""
        return encode(f"{pair.language} {pair.text}")

    def describe(self) -> dict[str, object]:
        """The sizes of the data, as a dict."""
        return {
            "kind": "messages of Sphinx, many languages to English",
            "languages": len({pair.language for pairs in self.pairs.values() for pair in pairs}),
            "split_by": self.key,
            "pairs": len(self.pairs["train"]),
            "held_out": len(self.pairs["held_out"]),
            "too_long": self.left_out,
        }

    def rows(self, pairs: Iterable[Pair]) -> dict[str, np.ndarray]:
        """The arrays `source` [pairs, source], `inputs` and `targets` [pairs, length] of these pairs: int32, padded."""
        pairs = list(pairs)
        arrays = {
            name: np.zeros((len(pairs), size), np.int32)
            for name, size in zip(("source", "targets"), self.sizes, strict=True)
        }
        for i, pair in enumerate(pairs):
            for name, ids in (("source", self.source_ids(pair)), ("targets", encode(pair.english))):
                arrays[name][i, : len(ids)] = ids
        shifted = np.roll(arrays["targets"], 1, axis=1)
        shifted[:, 0] = START
        shifted[shifted == END] = PADDING
        return {**arrays, "inputs": shifted}

    def batch(self, split: str, seed: int, step: int, batch: int) -> dict[str, np.ndarray]:
        """A batch of random pairs of the training split, or of held-out pairs in a fixed order, repeated cyclically.

        Raises `MeshdslError` for an unknown or empty split.
        """
        if split not in SPLITS or not self.pairs[split]:
            raise md.MeshdslError(
                f"the split must be one of {', '.join(s for s in SPLITS if self.pairs[s])}, got {split!r}"
            )
        pairs = self.pairs[split]
        indices = np.arange(step * batch, (step + 1) * batch)
        if split == "train":
            indices = np.random.Philox(key=seed % 2**128, counter=[0, 0, 0, step]).random_raw(batch)
        return self.rows(pairs[int(i)] for i in indices % len(pairs))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _held_out(text: str) -> bool:
    return int.from_bytes(_hash(text)[:8], "big") % _HELD_OUT_ONE_IN == 0


def _shuffled(pair: Pair) -> bytes:
    return _hash(f"{pair.language} {pair.text} {pair.english}")


@lru_cache(maxsize=4)
def parallel_text(source: int, length: int, key: str = "source") -> Text:
    """The text of the installed Sphinx, in all languages except English. Raises `MeshdslError` without Sphinx."""
    return Text(_messages(), source, length, key)


@lru_cache(maxsize=1)
def _messages() -> tuple[Pair, ...]:
    spec = importlib.util.find_spec("sphinx")
    folders = [] if spec is None else [Path(place) / "locale" for place in spec.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("*/LC_MESSAGES/sphinx.mo"))
    if not files:
        raise md.MeshdslError(
            "parallel text is read from the message catalogues of Sphinx, which is not installed\n  pip install sphinx"
        )
    pairs = []
    for path in files:
        language = path.parts[-3]
        if not language.startswith("en"):
            known = catalogue(path.read_bytes()).items()
            pairs += [Pair(language, text, english) for english, text in known if text != english]
    return tuple(pairs)


def chrf(texts: Iterable[str], references: Iterable[str], order: int = 6, beta: float = 2.0) -> float:
    """The character n-gram F-score over all texts, from 0 to 100 (chrF, Popović, 2015).

    >>> chrf(["a table of contents"], ["a table of contents"]), round(chrf(["a table"], ["a table of contents"]), 1)
    (100.0, 29.1)

    Uses n-grams of up to `order` characters, without blanks. Precision and recall are averaged over n; recall has
    weight `beta`. An n for which no reference text has an n-gram is skipped.
    """
    matches, text_counts, reference_counts = Counter[int](), Counter[int](), Counter[int]()
    for a, b in zip(texts, references, strict=True):
        a, b = "".join(a.split()), "".join(b.split())
        for n in range(1, order + 1):
            text_ngrams, reference_ngrams = (Counter(x[i : i + n] for i in range(len(x) - n + 1)) for x in (a, b))
            matches[n] += (text_ngrams & reference_ngrams).total()
            text_counts[n] += text_ngrams.total()
            reference_counts[n] += reference_ngrams.total()
    orders = [n for n in reference_counts if reference_counts[n]]
    if not orders:
        return 0.0
    precision = sum(matches[n] / max(1, text_counts[n]) for n in orders) / len(orders)
    recall = sum(matches[n] / reference_counts[n] for n in orders) / len(orders)
    total = beta**2 * precision + recall
    return 100 * (1 + beta**2) * precision * recall / total if total else 0.0


@dataclass(frozen=True)
class Batches:
    """Batches of the parallel text."""

    text: Text
    batch_size: int
    seed: int

    def describe(self) -> dict[str, object]:
        """The sizes of the data, as a dict."""
        return self.text.describe()

    def __call__(self, split: str, step: int) -> dict[str, np.ndarray]:
        return self.text.batch(split, self.seed, step, self.batch_size)
