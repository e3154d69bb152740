"""Token files: every window once an epoch, by any number of processes, and the same batch for the same step."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import transformer
from meshdsl.train import TokenFiles, load_tokenizer, train, write_tokens
from meshdsl.train.tokens import shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 257, 1000])
def test_shuffled_is_a_permutation(count: int):
    orders = {tuple(shuffled(n, count, seed, epoch) for n in range(count)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == [*range(count)] for order in orders)
    assert count < 16 or len(orders) == 4


def files(folder: Path, draw: random.Random, length: int) -> list[Path]:
    """Files whose tokens are unique, so that a window is known by its first token."""
    paths, first = [], 0
    for n in range(draw.randrange(1, 4)):
        tokens = draw.randrange(length + 1, 20 * length)
        np.arange(first, first + tokens, dtype=np.uint16).tofile(folder / f"{n}.bin")
        paths.append(folder / f"{n}.bin")
        first += tokens
    return paths


@pytest.mark.parametrize("seed", range(6))
def test_token_files_read_every_window_once_an_epoch(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    length, processes = draw.randrange(1, 9), draw.choice([1, 2, 3])
    batch, paths = processes * draw.randrange(1, 5), files(tmp_path, draw, length)
    options: dict[str, Any] = {"seed": seed, "batch": batch, "length": length}
    whole = TokenFiles(paths, paths[:1], **options)
    parts = [TokenFiles(paths, **options, process=i, processes=processes) for i in range(processes)]
    seen: list[int] = []
    for step in range(1, 3 * whole.windows // batch + 2):
        found = whole("train", step)
        joined = np.concatenate([part("train", step)["tokens"] for part in parts])
        assert np.array_equal(found["tokens"], joined), "the processes have the rows of the batch"
        assert np.array_equal(found["tokens"][:, 1:], found["targets"][:, :-1])
        assert (found["targets"] == found["tokens"] + 1).all(), "no window crosses files"
        seen += found["tokens"][:, 0].tolist()
    epochs = [seen[n : n + whole.windows] for n in range(0, len(seen) - whole.windows + 1, whole.windows)]
    assert all(len(set(epoch)) == whole.windows for epoch in epochs) and len(epochs) >= 2
    assert whole.windows < 8 or epochs[0] != epochs[1]
    assert np.array_equal(whole("held_out", 0)["tokens"][0], np.arange(length))
    assert TokenFiles(paths, **options).describe() != TokenFiles(paths[::-1], **options).describe() or len(paths) == 1


def test_token_files_errors(tmp_path: Path):
    good, odd = tmp_path / "good.bin", tmp_path / "odd.bin"
    np.arange(9, dtype=np.uint16).tofile(good)
    odd.write_bytes(b"abc")
    options: dict[str, Any] = {"seed": 0, "batch": 2, "length": 4}
    for paths, changes, message in [
        ([tmp_path / "none.bin"], {}, "none.bin cannot be read: No such file"),
        ([odd], {}, "odd.bin has 3 bytes, which are not two or more tokens of uint16"),
        ([good], {"length": 9}, "have no window of 10 tokens"),
        ([good], {"dtype": "float32"}, "the dtype of a token file is one of"),
        ([good], {"processes": 3}, "a multiple of the 3 processes"),
        ([good], {"process": 1}, "process 1 must be from 0 to 0"),
    ]:
        with pytest.raises(md.MeshdslError, match=message):
            TokenFiles(paths, **{**options, **changes})
    with pytest.raises(md.MeshdslError, match="there are no held_out files with a window of 5 tokens"):
        TokenFiles([good], **options)("held_out", 0)


@pytest.mark.parametrize(
    ("written", "read", "ids", "message"),
    [
        ("uint16", "uint16", 60_000, "has the token id 59999, read as uint16, and the vocabulary has the ids 0 to 99"),
        ("int32", "int32", 101, "has the token id 100, read as int32"),
        (
            "int32",
            "uint16",
            90,
            "looks like a wider integer: every second token is at most 0, and the others are up to 89",
        ),
        ("uint32", "uint16", 130_000, "looks like a wider integer: every second token is at most 1,"),
        ("uint16", "uint8", 90, "looks like a wider integer"),
        ("uint16", "int32", 90, "has the token id 5832792, read as int32"),
        ("int32", "int32", -1, "has the token id -1, read as int32"),
    ],
)
def test_token_files_ids_and_dtype_are_checked_once(tmp_path: Path, written: str, read: str, ids: int, message: str):
    tokens = np.arange(max(ids, 90)) if ids > 0 else np.full(90, ids)
    tokens.astype(written).tofile(tmp_path / "t.bin")
    files = TokenFiles([tmp_path / "t.bin"], seed=0, batch=2, length=4, dtype=read)
    with pytest.raises(md.MeshdslError, match=message):
        files.check(100)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_token_files_accept_their_own_dtype(tmp_path: Path, dtype: str):
    (np.arange(4000) % 100).astype(dtype).tofile(tmp_path / "t.bin")
    TokenFiles([tmp_path / "t.bin"], seed=0, batch=2, length=4, dtype=dtype).check(100)


def test_token_files_that_change_are_noticed(tmp_path: Path):
    path = tmp_path / "t.bin"
    data = bytearray(np.arange(200_000, dtype=np.uint16).tobytes())
    path.write_bytes(data)
    options: dict[str, Any] = {"seed": 0, "batch": 2, "length": 4}
    files = TokenFiles([path], **options)
    before = files.describe()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert TokenFiles([path], **options).describe() != before, "one bit in the middle"
    other = tmp_path / "other.bin"
    for content in (data, data[:4]):  # the same size, and shorter
        other.write_bytes(content)
        os.replace(other, path)
        with pytest.raises(md.MeshdslError, match=r"was written to or replaced: it had 400000 bytes .* and has \d+"):
            files("train", 1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(md.MeshdslError, match=r"t\.bin is not a regular file"):
        files("train", 1)
    path.unlink()
    with pytest.raises(md.MeshdslError, match=r"t\.bin cannot be read: No such file"):
        files("train", 1)


def test_targets_without_a_class_are_refused():
    small = transformer.lm.replace(batch=2, length=4, layers=1, d_model=4, heads=2, d_head=2, d_ff=4)
    targets = np.zeros((2, 4), np.int32)
    targets[1, 2] = small.config.vocab

    def batches(split: str, step: int) -> dict[str, np.ndarray]:
        late = targets if step == 2 else np.zeros_like(targets) - 100  # ignored
        return {"tokens": np.zeros_like(targets), "targets": late}

    run = train(small, md.Plan("all:1"), steps=3, eval_batches=0, batches=batches)
    message = f"'targets' of the batch has the target {small.config.vocab}, and vocab has the classes 0 to"
    with pytest.raises(md.MeshdslError, match=message):
        list(run)


def test_written_tokens_are_the_data(tmp_path: Path):
    library = pytest.importorskip("tokenizers", reason="it is in the extra `dev`")
    words = library.Tokenizer(
        library.models.WordLevel({"?": 0, "a": 1, "b": 2, "far": 70_000, "</s>": 3}, unk_token="?")
    )
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "t.bin"
    assert write_tokens((text for text in ["a b", "b"] * 600), out, tmp_path, end="</s>") == 3000
    assert np.fromfile(out, "<u2").tolist() == [1, 2, 3, 2, 3] * 600
    assert TokenFiles([out], seed=0, batch=1, length=2)("train", 1)["tokens"].shape == (1, 2)
    assert write_tokens("far a", out, tmp_path, dtype="uint32") == 2
    assert np.fromfile(out, "<u4").tolist() == [70_000, 1]
    with pytest.raises(md.MeshdslError, match="has the id 70000, and uint16 holds at most 65535"):
        write_tokens(["a", "far"], out, tmp_path)
    assert not out.exists(), "a part of the texts is not left"
    with pytest.raises(md.MeshdslError, match="has no token '<s>'; its special tokens: none"):
        write_tokens(["a"], out, tmp_path, end="<s>")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(md.MeshdslError, match=r"pip install 'tokenizers>=.*', or use token ids"):
        load_tokenizer("tokenizer.json")
