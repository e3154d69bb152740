"""Text to token ids and back, by the file `tokenizer.json` of a Hugging Face directory (extra `tokenizers`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import meshdsl as md

from ..errors.installed import optional
from .tokens import DTYPES

_AT_ONCE = 1024  # texts that are encoded together


def load_tokenizer(path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a file, or of the `tokenizer.json` in a directory.

    >>> import tempfile
    >>> from tokenizers import Tokenizer, models
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Tokenizer(models.WordLevel({"be": 0, "to": 1}, unk_token="be")).save(f"{folder}/tokenizer.json")
    ...     load_tokenizer(folder).encode("to").ids
    [1]

    Raises `MeshdslError` if the file cannot be read, or if the package `tokenizers` is not installed.
    """
    library = optional("tokenizers", "tokenizers", "use token ids")
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise md.MeshdslError(f"the tokenizer file {file} cannot be read: {error}") from None


def write_tokens(
    texts: Iterable[str], out: str | Path, tokenizer: str | Path, *, end: str | None = None, dtype: str = "uint16"
) -> int:
    """Write texts as a file of token ids for `TokenFiles`; returns the number of tokens.

    `tokenizer` is a tokenizer file, or a directory with `tokenizer.json`. Each text is a document: the tokenizer adds
    its special tokens, and `end`, one of its tokens such as `</s>`, follows. `dtype` is that of the file and has to be
    passed to `TokenFiles` too; a vocabulary above 65,536 needs `uint32`. Texts are read one by one, so they may be a
    generator over files that do not fit in memory.

    >>> import tempfile
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"?": 0, "to": 1, "be": 2, "or": 3, "not": 4, "</s>": 5}, unk_token="?"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     words.save(f"{folder}/tokenizer.json")
    ...     count = write_tokens(["to be or not to be"], f"{folder}/train.bin", folder, end="</s>")
    ...     count, np.fromfile(f"{folder}/train.bin", np.uint16).tolist()
    (7, [1, 2, 3, 4, 1, 2, 5])

    Raises `MeshdslError` for a tokenizer that cannot be read, an unknown token `end` and ids that `dtype` does not
    hold, and `OSError` if the file cannot be written; no file is left then.
    """
    if dtype not in DTYPES:
        raise md.MeshdslError(f"the dtype of a token file is one of {', '.join(DTYPES)}, got {dtype!r}")
    encoder, most, written = load_tokenizer(tokenizer), np.iinfo(dtype).max, 0
    last = [] if end is None else [token_id(encoder, end)]
    try:
        with open(out, "wb") as file:
            for part in _parts(texts):
                ids = [n for encoding in encoder.encode_batch(part) for n in (*encoding.ids, *last)]
                if max(ids, default=0) > most:
                    raise md.MeshdslError(
                        f"the tokenizer {tokenizer} has the id {max(ids)}, and {dtype} holds at most {most}\n"
                        "  pass dtype='uint32', here and to TokenFiles"
                    )
                file.write(np.asarray(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
                written += len(ids)
    except BaseException:  # also of the caller's generator: a file of some of the texts would pass for all of them
        Path(out).unlink(missing_ok=True)
        raise
    return written


def _parts(texts: Iterable[str]) -> Iterable[list[str]]:
    rest = iter([texts] if isinstance(texts, str) else texts)
    while part := list(itertools.islice(rest, _AT_ONCE)):
        yield part


def token_id(tokenizer: Any, token: str) -> int:
    """The id of one token; raises `MeshdslError` if the tokenizer does not have it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        raise md.MeshdslError(
            f"the tokenizer has no token {token!r}; its special tokens: {', '.join(special) or 'none'}"
        )
    return number
