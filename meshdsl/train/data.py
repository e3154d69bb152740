"""Text that every Python carries, as bytes: prose (`pydoc_data.topics`) and the sources of the standard library.

A document is held out or not by a hash of its name, so the splits share no document and adding one moves no other.
A batch is a pure function of (split, seed, step, batch, length): nothing is shuffled, nothing is remembered, and any
step can be drawn again. Half the windows of a batch start in prose and half in source, in expectation.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

import meshdsl as md

__all__ = ["KINDS", "SPLITS", "VOCABULARY", "Corpus", "Document", "corpus"]

VOCABULARY = 256  # bytes; a model may have more entries, which then never occur
KINDS = ("prose", "source")
SPLITS = ("train", "held_out")

_HELD_OUT_ONE_IN = 10
_PACKAGES = (
    *("asyncio", "collections", "concurrent/futures", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml/dom", "xml/etree"),
    *("xml/sax", "zoneinfo"),
)


@dataclass(frozen=True)
class Document:
    """One text: its name decides its split, its kind how often it is drawn."""

    name: str
    kind: str
    text: bytes

    @property
    def split(self) -> str:
        """`held_out` for one name in ten, by hash.

        >>> Document("source/ast.py", "source", b"").split
        'train'
        """
        number = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")
        return "held_out" if number % _HELD_OUT_ONE_IN == 0 else "train"


class Corpus:
    """Documents as bytes, and batches of windows into them.

    >>> small = Corpus([Document("chomsky", "prose", b"Colourless green ideas sleep furiously. " * 9)])
    >>> small.batch("train", seed=0, step=0, batch=2, length=5)["tokens"].shape
    (2, 5)
    """

    def __init__(self, documents: Iterable[Document]):
        self.documents = tuple(sorted(documents, key=lambda document: document.name))
        repeated = [a.name for a, b in zip(self.documents, self.documents[1:], strict=False) if a.name == b.name]
        if repeated:
            raise md.MeshdslError(f"a corpus has two documents called {repeated[0]!r}")

    @cached_property
    def _text(self) -> Mapping[tuple[str, str], np.ndarray]:
        # Documents end in a zero byte, which no text contains: a window may run into the next document, and says so.
        return {
            (split, kind): np.frombuffer(b"".join(d.text + b"\0" for d in self.of(split, kind)), np.uint8)
            for split in SPLITS
            for kind in KINDS
        }

    def of(self, split: str, kind: str) -> list[Document]:
        """The documents of one split and kind, by name."""
        return [d for d in self.documents if d.split == split and d.kind == kind]

    @cached_property
    def sha256(self) -> str:
        """The hash of every name and text, in order of name: the same corpus has the same hash."""
        total = hashlib.sha256()
        for document in self.documents:
            total.update(f"{document.name}\0{len(document.text)}\0".encode() + document.text)
        return total.hexdigest()

    def describe(self) -> dict[str, object]:
        """Bytes and documents of every split and kind, and the hash."""
        sizes = {
            split: {
                kind: {
                    "documents": len(self.of(split, kind)),
                    "bytes": sum(len(d.text) for d in self.of(split, kind)),
                }
                for kind in KINDS
            }
            for split in SPLITS
        }
        return {"bytes": sum(len(d.text) for d in self.documents), **sizes, "sha256": self.sha256}

    def batch(self, split: str, seed: int, step: int, batch: int, length: int) -> dict[str, np.ndarray]:
        """`tokens` and `targets` (the next bytes), int32 of shape [batch, length].

        Requires that some text of the split is longer than `length`; raises `MeshdslError` when none is.
        """
        if split not in SPLITS:
            raise md.MeshdslError(f"a split is one of {', '.join(SPLITS)}, got {split!r}")
        texts = [text for kind in KINDS if len(text := self._text[split, kind]) > length]
        if not texts:
            longest = max(len(self._text[split, kind]) for kind in KINDS)
            raise md.MeshdslError(
                f"the {split} split has no text of {length + 1} bytes; its longest has {longest}\n"
                "  ask for shorter windows"
            )
        # Raw words, not a Generator's methods: NumPy promises that these never change between releases.
        words = np.random.Philox(key=seed % 2**128, counter=[0, 0, SPLITS.index(split), step]).random_raw(2 * batch)
        windows = np.empty((batch, length + 1), np.int32)
        for row, (which, where) in enumerate(words.reshape(batch, 2).tolist()):
            text = texts[which % len(texts)]
            start = where % (len(text) - length)
            windows[row] = text[start : start + length + 1]
        return {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """The corpus of this Python. The same release of Python has the same one; modules it lacks are left out."""
    found = Corpus([*_prose(), *_sources(Path(sysconfig.get_path("stdlib")))])
    if not found.documents:
        raise md.MeshdslError(
            "this Python carries neither pydoc_data.topics nor the sources of its standard library\n"
            "  its standard library is at " + sysconfig.get_path("stdlib")
        )
    return found


def _prose() -> Iterable[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return []
    return [Document(f"prose/{name}", "prose", text.encode()) for name, text in topics.items()]


def _sources(library: Path) -> Iterable[Document]:
    # `_sysconfigdata...` says how this Python was built; other names are those of every Python of the release.
    top = [p for p in library.glob("*.py") if p.stem in sys.stdlib_module_names and not p.stem.startswith("_sysconfig")]
    inner = [path for package in _PACKAGES for path in (library / package).glob("*.py")]
    for path in sorted([*top, *inner]):
        try:
            text = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\0", b"")
        except OSError:
            continue
        yield Document(f"source/{path.relative_to(library).as_posix()}", "source", text)
