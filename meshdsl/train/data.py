"""The built-in text data: the Python standard library's own text, as bytes.

It consists of prose (`pydoc_data.topics`) and source files. A hash of a document's name decides its split, so the
splits share no document, and adding a document does not change the split of others. A batch is a pure function of
(split, seed, step, batch, length), so any step's batch can be created again. On average half of the windows start in
prose and half in source.
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

VOCABULARY = 256  # byte values; a larger vocabulary works too, its other entries never occur
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
    """A text. Its name decides its split; its kind decides how often it is sampled."""

    name: str
    kind: str
    text: bytes

    @property
    def split(self) -> str:
        """`held_out` for one name in ten, by hash, else `train`.

        >>> Document("source/ast.py", "source", b"").split
        'train'
        """
        number = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")
        return "held_out" if number % _HELD_OUT_ONE_IN == 0 else "train"


class Corpus:
    """A set of documents; `batch` samples windows of their bytes.

    >>> small = Corpus([Document("chomsky", "prose", b"Colourless green ideas sleep furiously. " * 9)])
    >>> small.batch("train", seed=0, step=0, batch=2, length=5)["tokens"].shape
    (2, 5)
    """

    def __init__(self, documents: Iterable[Document]):
        self.documents = tuple(sorted(documents, key=lambda document: document.name))
        repeated = [a.name for a, b in zip(self.documents, self.documents[1:], strict=False) if a.name == b.name]
        if repeated:
            raise md.MeshdslError(f"the corpus has two documents called {repeated[0]!r}; names must be unique")

    @cached_property
    def _text(self) -> Mapping[tuple[str, str], np.ndarray]:
        # Each document ends with a zero byte, which no text contains: it marks where a window enters the next document.
        return {
            (split, kind): np.frombuffer(b"".join(d.text + b"\0" for d in self.of(split, kind)), np.uint8)
            for split in SPLITS
            for kind in KINDS
        }

    def of(self, split: str, kind: str) -> list[Document]:
        """The documents of one split and kind, sorted by name."""
        return [d for d in self.documents if d.split == split and d.kind == kind]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all names and texts, sorted by name."""
        total = hashlib.sha256()
        for document in self.documents:
            total.update(f"{document.name}\0{len(document.text)}\0".encode() + document.text)
        return total.hexdigest()

    def describe(self) -> dict[str, object]:
        """The number of bytes and documents per split and kind, and the hash."""
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
        """`tokens` and `targets` (the bytes that follow them), both int32 of shape [batch, length].

        Raises `MeshdslError` if no text of the split is longer than `length`.
        """
        if split not in SPLITS:
            raise md.MeshdslError(f"the split must be one of {', '.join(SPLITS)}, got {split!r}")
        texts = [text for kind in KINDS if len(text := self._text[split, kind]) > length]
        if not texts:
            longest = max(len(self._text[split, kind]) for kind in KINDS)
            raise md.MeshdslError(
                f"the {split} split has no text of {length + 1} bytes; its longest has {longest}\n  reduce the length"
            )
        # random_raw, because NumPy guarantees its stream across releases, and not that of Generator methods.
        words = np.random.Philox(key=seed % 2**128, counter=[0, 0, SPLITS.index(split), step]).random_raw(2 * batch)
        windows = np.empty((batch, length + 1), np.int32)
        for row, (text_index, offset) in enumerate(words.reshape(batch, 2).tolist()):
            text = texts[text_index % len(texts)]
            start = offset % (len(text) - length)
            windows[row] = text[start : start + length + 1]
        return {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """The corpus of this Python's standard library; equal for equal Python releases. Missing modules are skipped."""
    result = Corpus([*_prose(), *_sources(Path(sysconfig.get_path("stdlib")))])
    if not result.documents:
        raise md.MeshdslError(
            "this Python has neither pydoc_data.topics nor the sources of its standard library\n"
            "  searched in " + sysconfig.get_path("stdlib")
        )
    return result


def _prose() -> Iterable[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return []
    return [Document(f"prose/{name}", "prose", text.encode()) for name, text in topics.items()]


def _sources(library: Path) -> Iterable[Document]:
    # `_sysconfigdata...` differs between builds of one Python release; the other modules do not.
    top = [p for p in library.glob("*.py") if p.stem in sys.stdlib_module_names and not p.stem.startswith("_sysconfig")]
    inner = [path for package in _PACKAGES for path in (library / package).glob("*.py")]
    for path in sorted([*top, *inner]):
        try:
            text = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\0", b"")
        except OSError:
            continue
        yield Document(f"source/{path.relative_to(library).as_posix()}", "source", text)
