"""Hostile manifests are refused by name; `python -m tests.checkpoint.fuzz` makes many more."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md

from . import hostile


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> hostile.Target:
    return hostile.Target(tmp_path_factory.mktemp("hostile"), megabytes=0.1)


def test_manifest_hostile_cases_are_refused(tmp_path: Path):
    results = hostile.many(tmp_path / "run", 120, seed=0, megabytes=0.25)
    assert results["refused"] > 60, results


Change = tuple[str, Any, str]
HUGE = 2**62
CHANGES: list[tuple[list[Any], Any, str]] = [
    (["header", "version"], 2, "header.version: it is 'meshdsl-checkpoint' version 2"),
    (["header", "step"], -1, "header.step: -1 is not from 0"),
    (["header", "step"], 2, "header.step: it is 2, and the directory is of step 1"),
    (["header", "files"], ["../../etc/passwd"], "header.files[0]: expected an integer, got '../../etc/passwd'"),
    (["header", "files"], [HUGE], "header.files[0]: it is 4611686018427387904 bytes, and part-00000.bin has"),
    (["header", "key"], [0, 2**32], "header.key: 4294967296 is not from 0"),
    (["header", "more"], 1, "header: the key 'more' is unknown"),
    (["tensors", 0, "path"], "z", "tensors[1].path: 'b/c' does not sort after 'z'"),
    (["tensors", 1, "path"], "a", "tensors[1].path: 'a' does not sort after 'a'"),
    (["tensors", 0, "dtype"], "object", "tensors[0].dtype: 'object' is unknown; known: bool, int8"),
    (["tensors", 0, "dtype"], "float64", "tensors[1].dims: the tensors up to this one have more than the"),
    (["tensors", 0, "dims", 0, 1], HUGE, "tensors[0].dims: the sizes"),
    (["tensors", 0, "dims", 0, 1], 10**6, "tensors[0].cuts: the cuts of dim 'io' do not increase from 0 to 1000000"),
    (["tensors", 0, "dims", 0, 0], "__import__('os')", "tensors[0].dims: a dim is named like a Python variable"),
    (["tensors", 0, "dims", 0, 0], "hidden", "tensors[0].dims: a tensor cannot have the dim 'hidden' twice"),
    (["tensors", 0, "cuts", 0], [0, 5, 3], "tensors[0].cuts: the cuts of dim 'io' do not increase"),
    (["tensors", 0, "chunks"], [], "tensors[0].chunks: expected 1 entries, got 0"),
    (["tensors", 0, "chunks", 0, 0], 7, "tensors[0].chunks[0]: 7 is not from 0 to 0"),
    (["tensors", 0, "chunks", 0, 1], -8, "tensors[0].chunks[0]: -8 is not from 0"),
    (["tensors", 0, "chunks", 0, 1], HUGE, "tensors[0].chunks[0]: it starts at byte 4611686018427387904"),
    (["tensors", 0, "chunks", 0, 1], 8, "tensors[0].chunks: the chunk at byte 8 of part-00000.bin leaves a gap"),
    (["tensors", 1, "chunks", 0, 1], 0, "tensors[1].chunks: the chunk at byte 0 of part-00000.bin overlaps"),
    (["tensors", 0, "chunks", 0, 2], "0" * 63, "tensors[0].chunks[0]: expected a SHA-256 of 64 hexadecimal digits"),
    (["tensors", 0, "chunks", 0, 2], "0" * 64, "part-00000.bin: chunk 0 of 'a', bytes 0 to"),
]


@pytest.mark.parametrize(("place", "value", "complaint"), CHANGES, ids=lambda v: str(v)[:40])
def test_manifest_errors_name_the_key(target: hostile.Target, place: list[Any], value: Any, complaint: str):
    document = json.loads(target.original)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    target.write(hostile.lay_out(document))
    with pytest.raises(md.CheckpointError) as caught:
        md.Checkpoints(target.folder).restore(1)
    text = str(caught.value)
    assert complaint in text and text.startswith(("step-00000001/manifest.json", "step-00000001/part")), text
    assert caught.value.exit_code == 4


TEXTS = [
    (b'"step": 1', b'"step": NaN', "header: NaN is not JSON"),
    (b'"step": 1', b'"step": 1e999', "header: the number '1e999' is not finite"),
    (b'"step": 1', b'"step": ' + b"9" * 5000, "invalid JSON"),
    (b'"step": 1', b'"step": 1, "step": 1', "header: the key 'step' is repeated"),
    (b'"lr": 0.1', b'"lr": ' + b"[" * 30_000, "it is nested too deeply"),
    (b'"lr": 0.1', b'"lr": ' + b"[" * 40 + b"]" * 40, "header.config.lr: it is nested deeper than 32"),
    (b'"lr": 0.1', b'"lr": "' + b"x" * 100_000 + b'"', "header: it is longer than"),
    (b'"lr": 0.1', b'"lr": "\xff"', "invalid JSON"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), TEXTS, ids=range(len(TEXTS)))
def test_manifest_invalid_json_is_refused(target: hostile.Target, old: bytes, new: bytes, complaint: str):
    body = hostile.lay_out(target.document)
    assert old in body
    target.write(body.replace(old, new, 1))
    with pytest.raises(md.CheckpointError) as caught:
        md.Checkpoints(target.folder).restore(1)
    assert complaint in str(caught.value)


def test_opened_refuses_links_and_pipes(target: hostile.Target, tmp_path: Path):
    """Links lead nowhere, and a pipe does not wait for a writer."""
    outside = tmp_path / "outside"
    for name in ("manifest.json", "part-00000.bin", "."):
        for kind in ("link", "pipe", "directory"):
            place = target.step / name if name != "." else target.step
            (target.step / "manifest.json").write_bytes(target.original)
            os.rename(place, outside)
            {"link": lambda p: os.symlink(outside, p), "pipe": os.mkfifo, "directory": os.mkdir}[kind](place)
            try:
                with pytest.raises(md.CheckpointError, match=r"step-00000001"):
                    md.Checkpoints(target.folder).restore(1)
            finally:
                place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
                os.rename(outside, place)
    assert target.restore() == "accepted"


def test_sparse_files_take_no_memory(tmp_path: Path):
    """Holes make files look large: 100 GB of manifest beside 10 TB of data, and a chunk of 256 MB."""
    target = hostile.Target(tmp_path, megabytes=0.1)
    manifest, part = target.step / "manifest.json", target.step / "part-00000.bin"
    honest = manifest.read_bytes()
    os.truncate(part, 10**13)
    tracemalloc.start()
    try:
        for prefix in (b"", honest[:-90], b'{"header": '):
            manifest.write_bytes(prefix)
            os.truncate(manifest, 10**11)
            with pytest.raises(md.CheckpointError, match=r"manifest.json: byte \d+ is zero"):
                md.Checkpoints(target.folder).restore(1)
        document = json.loads(target.original)
        entry, stored = document["tensors"][0], 256 << 20
        entry["dims"], entry["cuts"] = [["io", stored // 4]], [[0, stored // 4]]
        entry["chunks"] = [[0, 0, "0" * 64]]
        document["tensors"], document["header"]["files"] = [entry], [stored]
        os.truncate(part, stored)
        target.write(hostile.lay_out(document))
        with pytest.raises(md.CheckpointError, match="is corrupt: its SHA-256 differs"):
            md.Checkpoints(target.folder).verify(1)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
