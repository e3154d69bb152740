"""Documents of text for training: plain, completions and chats, encoded, packed into rows, and split.

A document is pieces of text, of which some are learned: of a completion, its answer; of a chat, what the assistant
says. A row holds whole documents, one after the other; a document longer than a row goes on in further rows. Targets of
what is not learned, and of padding, are -100. `segments` numbers the documents of a row from 1; padding has 0. All rows
are in memory: for more text than that, `write_tokens` and `TokenFiles`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md

from ..errors import nearest_path
from ..errors.installed import optional
from .data import SPLITS
from .tokenizer import load_tokenizer
from .tokens import places

Pieces = Sequence[tuple[str, bool]]  # text, and whether it is learned
IGNORED = -100
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<end_of_turn>")


def pieces_of(row: Mapping[str, Any], template: Callable[..., str] | None = None) -> Pieces:
    """The pieces of a row with `text`, with `prompt` and `completion`, or with `messages` of `role` and `content`.

    >>> pieces_of({"prompt": "2+2=", "completion": "4"})
    [('2+2=', False), ('4', True)]
    >>> pieces_of({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})[-1]
    ('Hello<|im_end|>\\n', True)

    `template` renders messages; without one, they are written as ChatML. Raises `MeshdslError` for other rows.
    """
    if isinstance(row.get("text"), str):
        return [(row["text"], True)]
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return [(row["prompt"], False), (row["completion"], True)]
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and {"role", "content"} <= {*m} for m in messages
    ):
        raise md.MeshdslError(
            f"a document has text, prompt and completion, or messages of role and content; this has {', '.join(row)}"
        )
    render, pieces, shown = template or _chat_ml, list[tuple[str, bool]](), ""
    whole = render(messages=messages, add_generation_prompt=False)
    for n in [n for n, message in enumerate(messages) if message["role"] == "assistant"]:
        after = render(messages=messages[: n + 1], add_generation_prompt=False)
        # a template may begin an answer with more than it keeps, such as an open <think>
        begun = render(messages=messages[:n], add_generation_prompt=True)
        before = os.path.commonprefix([begun, after])  # noqa: RUF071 - of texts
        if not (before.startswith(shown) and whole.startswith(after)):
            raise md.MeshdslError(
                "the chat template writes earlier messages differently once later ones follow, so what is learned is "
                f"not a part of the text\n  write this row as prompt and completion: {str(messages[n])[:60]}"
            )
        pieces += [(before[len(shown) :], False), (after[len(before) :], True)]
        shown = after
    return [(text, learned) for text, learned in [*pieces, (whole[len(shown) :], False)] if text]


def _chat_ml(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" * add_generation_prompt


def _template_of(folder: Path) -> Callable[..., str] | None:
    """The chat template of a Hugging Face directory; None without one."""
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    jinja = folder / "chat_template.jinja"
    text = jinja.read_text(encoding="utf-8") if jinja.is_file() else values.get("chat_template")
    if not isinstance(text, str):
        return None
    library, errors = (
        optional(f"jinja2.{name}", "chat", "prompt and completion") for name in ("sandbox", "exceptions")
    )
    tokens = {key: values.get(key) for key in ("bos_token", "eos_token")}
    special = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    environment = library.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(reason: str) -> None:
        raise errors.TemplateError(reason)

    def rendered(**given: Any) -> str:
        try:
            return template.render(**{key: token or "" for key, token in special.items()}, **given)
        except errors.TemplateError as error:
            raise md.MeshdslError(f"the chat template of {folder} does not take a chat: {error.message}") from None

    environment.globals["raise_exception"] = refuse
    template = environment.from_string(text)
    return rendered


def read_rows(source: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a file (.jsonl, or text whose documents are apart by an empty line), or of `hf:NAME`.

    NAME is a data set of `datasets`, a folder or a name of the hub, whose split `train` is read. Raises `MeshdslError`
    for what cannot be read.
    """
    if source.startswith("hf:"):
        yield from _data_set(source.removeprefix("hf:"))
        return
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                yield from (_row(line, f"{path}:{n}") for n, line in enumerate(file, 1) if line.strip())
            else:
                yield from ({"text": text} for text in file.read().split("\n\n") if text.strip())
    except FileNotFoundError:
        raise md.MeshdslError(f"there is no file {str(path)!r}; {nearest_path(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise md.MeshdslError(f"the data {path} cannot be read: {error}") from None


def _data_set(name: str) -> Iterable[Mapping[str, Any]]:
    """The split `train` of a data set: a name of the hub, a folder of files, or one that `save_to_disk` wrote."""
    library = optional("datasets", "datasets", "a .jsonl file")
    try:
        if not any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            return library.load_dataset(name, split="train")
        saved = library.load_from_disk(name)
        return saved["train"] if isinstance(saved, dict) else saved
    except Exception as error:  # the library has no error of its own
        raise md.MeshdslError(f"the data set hf:{name} cannot be read: {error}") from None


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise md.MeshdslError(f"{where} is no JSON object, as each line of a .jsonl file is: {line[:60]!r}")
    return row


class Documents:
    """Batches of `tokens`, `targets` and `segments`, int32 of shape [batch, length], of packed documents.

    >>> rows = [{"prompt": "ab", "completion": "cd"}, {"text": "efg"}]
    >>> data = Documents(rows, seed=0, batch=1, length=8, held_out=0.0)
    >>> {name: x[0].tolist() for name, x in data("train", 1).items()}["targets"]
    [-100, 99, 100, 0, 102, 103, 0, -100]

    `tokenizer` is a file or a directory with `tokenizer.json`; without one, documents are bytes that end with 0. The
    share `held_out` of the documents, by a hash of their text, is for evaluation. A batch depends on split, seed and
    step alone. Raises `MeshdslError` without documents, and for a tokenizer that cannot be read.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        seed: int,
        batch: int,
        length: int,
        tokenizer: str | Path | None = None,
        held_out: float = 0.05,
    ):
        self.seed, self.batch, self.length = seed, batch, length
        folder = None if tokenizer is None else Path(tokenizer)
        self._encoder = None if folder is None else load_tokenizer(folder)
        template = _template_of(folder if folder.is_dir() else folder.parent) if folder is not None else None
        found = [_Encoded(*self._encode(pieces_of(row, template))) for row in rows]
        self._splits = {
            SPLITS[0]: [d for d in found if not d.share < held_out],
            SPLITS[1]: [d for d in found if d.share < held_out],
        }
        if not self._splits[SPLITS[0]]:
            raise md.MeshdslError("the data has no documents to train on")

    def _encode(self, pieces: Pieces) -> tuple[list[int], list[bool], int]:
        """The ids of a document, which of them are learned, and the bytes of what is learned."""
        ids, learned, size = list[int](), list[bool](), 0
        for text, is_learned in pieces:
            new = self._ids(text)
            ids, learned = ids + new, learned + [is_learned] * len(new)
            size += is_learned * len(text.encode())
        first, last = self._ends
        if ids[: len(first)] != first:  # a chat template may have written them
            ids, learned = first + ids, [False] * len(first) + learned
        if ids[len(ids) - len(last) :] != last:
            ids, learned = ids + last, learned + [True] * len(last)
        return ids, learned, size

    def _ids(self, text: str, special: bool = False) -> list[int]:
        if self._encoder is None:
            return list(text.encode())
        return self._encoder.encode(text, add_special_tokens=special).ids

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a document; those of the tokenizer, which else ends with one of `ENDS`."""
        if self._encoder is None:
            return [], [0]
        alone, around = self._ids("a"), self._ids("a", special=True)
        at = next(n for n in range(len(around)) if around[n : n + len(alone)] == alone)
        end = next(([n] for name in ENDS if (n := self._encoder.token_to_id(name)) is not None), [])
        return around[:at], around[at + len(alone) :] or end

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of text for each token that is learned, in the held-out documents; None without any."""
        documents = self._splits[SPLITS[1]]
        tokens = sum(sum(d.learned[1:]) for d in documents)
        return sum(d.bytes for d in documents) / tokens if tokens else None

    @cached_property
    def _packed(self) -> dict[str, np.ndarray]:
        return {split: _pack(documents, self.length) for split, documents in self._splits.items()}

    def describe(self) -> dict[str, Any]:
        """The description of the data that checkpoints store; it is compared when a run resumes."""
        sums = {split: hashlib.sha256(rows.tobytes()).hexdigest() for split, rows in self._packed.items()}
        counts = {split: len(documents) for split, documents in self._splits.items()}
        return {"kind": "documents", "batch": self.batch, "length": self.length, "documents": counts, "sha256": sums}

    def check(self, classes: int) -> None:
        """Raises `MeshdslError` if a document has an id from `classes`."""
        largest = max(max(d.ids, default=0) for documents in self._splits.values() for d in documents)
        if largest >= classes:
            raise md.MeshdslError(
                f"the tokenizer has the id {largest}, and the vocabulary has the ids 0 to {classes - 1}\n"
                "  give the tokenizer of the model with --tokenizer, or set vocab"
            )

    def __call__(self, split: str, step: int) -> Mapping[str, np.ndarray]:
        rows = self._packed[split]
        if not len(rows):
            raise md.MeshdslError(f"no document is in the split {split}; raise the held-out share")
        tokens, targets, segments = np.moveaxis(rows[places(split, step, self.batch, len(rows), self.seed)], 1, 0)
        return {"tokens": tokens, "targets": targets, "segments": segments}


class _Encoded:
    """The ids of a document, which of them are learned, their bytes, and a number from 0 to 1 by the ids' hash."""

    def __init__(self, ids: list[int], learned: list[bool], size: int):
        self.ids, self.learned, self.bytes = ids, learned, size
        digest = hashlib.sha256(np.asarray(ids, np.int64).tobytes()).digest()
        self.share = int.from_bytes(digest[:8], "big") / 2**64


def _pack(documents: Sequence[_Encoded], length: int) -> np.ndarray:
    """Rows of tokens, targets and segments, [rows, 3, length]; each token of a document is followed by its target."""
    rows: list[np.ndarray] = []
    used, segment = length, 0
    for document in documents:
        ids = np.asarray(document.ids, np.int32)
        targets = np.where(document.learned, ids, IGNORED)[1:]
        for start in range(0, len(targets), length):
            part = targets[start : start + length]
            if used + len(part) > length:
                rows.append(np.stack([np.zeros(length), np.full(length, IGNORED), np.zeros(length)]).astype(np.int32))
                used, segment = 0, 0
            segment += 1
            place = slice(used, used + len(part))
            rows[-1][0, place], rows[-1][1, place], rows[-1][2, place] = ids[start : start + len(part)], part, segment
            used += len(part)
    return np.stack(rows) if rows else np.zeros((0, 3, length), np.int32)
