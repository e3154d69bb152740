"""A manifest that is wrong inside is refused although its hash is right; so are links and pipes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.train.checkpoint.files import remove_tree

from .links import content, outside, random_links

HUGE = 2**62
CHANGES: list[tuple[list[Any], Any, str]] = [
    (["header", "version"], 2, "it is ('meshdsl-checkpoint', 2); this meshdsl reads"),
    (["header", "step"], 2, "its step or the sizes of its part files differ"),
    (["header", "files"], [HUGE], "its step or the sizes of its part files differ"),
    (["header", "more"], 1, "unexpected keyword argument 'more'"),
    (["tensors", 0, "dtype"], "object", "KeyError: \"'object'\""),
    (["tensors", 0, "dims", 0, 1], 10**6, "the cuts of io=1000000 do not increase from 0 to its size"),
    (["tensors", 0, "dims", 0, 0], "__import__('os')", "a dim is named like a Python variable"),
    (["tensors", 0, "cuts", 0], [0, 5, 3], "the cuts of io=8 do not increase from 0 to its size"),
    (["tensors", 0, "chunks"], [], "zip() argument 2 is shorter"),
    (["tensors", 0, "chunks", 0, 0], 7, "IndexError"),
    (["tensors", 0, "chunks", 0, 1], HUGE, "chunk 0 of a lies outside its file"),
    (["tensors", 0, "chunks", 0, 2], "0" * 63, "ValueError"),
    (["tensors", 0, "chunks", 0, 2], "0" * 64, "part-00000.bin: chunk 0 of 'a', bytes 0 to"),
    (["tensors", 0], [], "TypeError"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    with md.Checkpoints(folder) as checkpoints:
        tree = {"a": md.tensor(np.ones((8, 4)), "io hidden"), "b/c": md.tensor(np.ones((8, 4)), "io hidden")}
        checkpoints.save(1, tree, config={"lr": 0.1})
    return folder


@pytest.mark.parametrize(("place", "value", "complaint"), CHANGES, ids=lambda v: str(v)[:40])
def test_manifest_with_a_wrong_field_is_refused(run: Path, place: list[Any], value: Any, complaint: str):
    file = run / "step-00000001" / "manifest.json"
    original = file.read_bytes()
    document = inner = json.loads(original)
    del document["sha256"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    body = (json.dumps(document)[:-1] + ",\n").encode("ascii")
    file.write_bytes(body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode("ascii"))
    try:
        with pytest.raises(md.CheckpointError) as caught:
            md.Checkpoints(run).restore(1)
    finally:
        file.write_bytes(original)
    text = caught.value.args[0]
    assert complaint in text and text.startswith(("step-00000001/manifest.json", "step-00000001/part")), text
    assert caught.value.exit_code == 4


def test_manifest_with_another_hash_is_refused(run: Path):
    file = run / "step-00000001" / "manifest.json"
    original = file.read_bytes()
    for damaged in (b"", original[:-1], original.replace(b"0.1", b"0.2"), b"[" * 10**5):
        file.write_bytes(damaged)
        with pytest.raises(md.CheckpointError, match="does not end with the SHA-256 of its content"):
            md.Checkpoints(run).restore(1)
    os.truncate(file, 10**11)  # a hole
    with pytest.raises(md.CheckpointError, match="it has 100000000000 bytes; the limit"):
        md.Checkpoints(run).restore(1)
    file.write_bytes(original)
    assert md.Checkpoints(run).restore().step == 1


def test_opened_refuses_links_and_pipes(run: Path, tmp_path: Path):
    """Links lead nowhere, and a pipe does not wait for a writer."""
    away, step = tmp_path / "away", run / "step-00000001"
    for name in ("manifest.json", "part-00000.bin", "."):
        for kind in ("link", "pipe", "directory"):
            place = step / name if name != "." else step
            os.rename(place, away)
            {"link": lambda p: os.symlink(away, p), "pipe": os.mkfifo, "directory": os.mkdir}[kind](place)
            try:
                with pytest.raises(md.CheckpointError, match=r"step-00000001"):
                    md.Checkpoints(run).restore(1)
            finally:
                place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
                os.rename(away, place)
    assert md.Checkpoints(run).restore().step == 1


def test_remove_tree_never_follows_links(tmp_path: Path):
    there, tree = outside(tmp_path / "outside"), tmp_path / "tree"
    tree.mkdir()
    (tree / "folder").symlink_to(there)
    (tree / "file").symlink_to(there / "part-00000.bin")
    (tmp_path / "link").symlink_to(there)
    remove_tree(tree)
    remove_tree(tmp_path / "link")
    assert not tree.exists() and not (tmp_path / "link").is_symlink() and len(content(there)) == 2


def test_nothing_outside_changes_whatever_is_a_link(tmp_path: Path):
    draw = random.Random(0)
    for case in range(10):
        random_links(tmp_path / str(case), draw)
