"""Other formats: what goes out comes back bit for bit, and a changed bit is noticed. Both are extras."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md

from . import trees

TREE = {
    "params": {"w": ("io:3 hidden:5", "float32"), "b": ("hidden:5", "bfloat16"), "mask": ("io:3", "bool")},
    "state": [("", "int64"), ("io:3 hidden:5", "complex64")],
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[md.Checkpoints, dict[str, np.ndarray]]:
    specs = {
        "params": {name: md.spec(*spec) for name, spec in TREE["params"].items()},
        "state": [md.spec(*spec) for spec in TREE["state"]],
    }
    tree = trees.tensors(specs, trees.values_for(specs, 0), md.Mesh("a:2 b:2"), md.Layout("hidden:a io:b"))
    checkpoints = md.Checkpoints(tmp_path / "run", chunk_bytes=16)
    checkpoints.save(3, tree, config={"lr": 0.1}, key=md.random.key(0))
    checkpoints.close()
    return checkpoints, {path: x.numpy() for path, x in checkpoints.restore().tree.items()}


def check(found: dict[str, md.Tensor], values: dict[str, np.ndarray]) -> None:
    assert found.keys() == values.keys()
    for path, x in found.items():
        assert x.dtype == values[path].dtype and np.array_equal(trees.bits(x.numpy()), trees.bits(values[path])), path
    assert [d.name for d in found["params/w"].dims] == ["io", "hidden"]


def test_safetensors_round_trip(saved: Any, tmp_path: Path):
    library = pytest.importorskip("safetensors.numpy")
    checkpoints, values = saved
    file = tmp_path / "w.safetensors"
    md.export_safetensors(checkpoints, 3, file)
    check(md.import_safetensors(file), values)
    assert np.array_equal(library.load_file(file)["params/w"], values["params/w"]), "others read it too"

    raw = file.read_bytes()
    place = raw.index(values["params/w"].tobytes())
    file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    with pytest.raises(md.CheckpointError, match="'params/w': the tensor is corrupt: its SHA-256"):
        md.import_safetensors(file)
    file.write_bytes(raw[:-1])
    with pytest.raises(md.CheckpointError, match=r"w.safetensors cannot be read: SafetensorError"):
        md.import_safetensors(file)

    library.save_file({"w": np.zeros((2, 3))}, file)
    assert md.import_safetensors(file, dims={"w": "io hidden"})["w"].shape == (2, 3)
    with pytest.raises(md.ShapeError, match=r"does not store the dims of 'w', an array of shape \(2, 3\)"):
        md.import_safetensors(file)
    library.save_file({"w" * 10_000: np.zeros((2, 3))}, file)
    with pytest.raises(md.ShapeError) as caught:
        md.import_safetensors(file)
    assert len(str(caught.value)) < 600, "a long name is cut"
    whole = {"step": 1, "config": None, "data": None, "key": None, "tensors": 1}
    for note in ("[]", "{}", '{"step": 1}', json.dumps(whole), "[" * 10_000):
        library.save_file({"w": np.zeros((2, 3))}, file, metadata={"meshdsl": note})
        with pytest.raises(md.CheckpointError, match="metadata"):
            md.import_safetensors(file)


def test_safetensors_unsupported_dtypes(tmp_path: Path):
    pytest.importorskip("safetensors")
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": md.tensor(trees.any_bits((3,), "float8_e4m3fn", 0), "io")})
        with pytest.raises(md.ShapeError, match=r"safetensors does not support w \(float8_e4m3fn\)"):
            md.export_safetensors(checkpoints, 0, tmp_path / "w")


@pytest.mark.filterwarnings("ignore")  # of orbax about itself
def test_orbax_round_trip(saved: Any, tmp_path: Path):
    pytest.importorskip("orbax.checkpoint")
    checkpoints, values = saved
    md.export_orbax(checkpoints, 3, tmp_path / "orbax")
    check(md.import_orbax(tmp_path / "orbax"), values)
    with pytest.raises(md.CheckpointError, match="none cannot be read"):
        md.import_orbax(tmp_path / "none")


def test_convert_error_names_the_extra(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("safetensors", "safetensors.numpy", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, module, None)
    for call, extra in (
        (lambda: md.export_safetensors(saved[0], 3, tmp_path / "x"), "safetensors"),
        (lambda: md.import_safetensors(tmp_path / "x"), "safetensors"),
        (lambda: md.export_orbax(saved[0], 3, tmp_path / "x"), "orbax"),
        (lambda: md.import_orbax(tmp_path / "x"), "orbax"),
    ):
        with pytest.raises(
            md.MeshdslError, match=rf"cannot be imported: .*\n  pip install '{extra}.*', or use meshdsl's own format"
        ):
            call()


@pytest.mark.filterwarnings("ignore")  # of orbax about itself
def test_export_errors(saved: Any, tmp_path: Path):
    pytest.importorskip("safetensors")
    pytest.importorskip("orbax.checkpoint")
    checkpoints, _ = saved
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").mkdir()
    for export, place, complaint in (
        (md.export_safetensors, tmp_path / "none" / "w", "cannot be written: SafetensorError"),
        (md.export_safetensors, tmp_path / "there", "exists and is not a regular file"),
        (md.export_safetensors, tmp_path / "pipe", "exists and is not a regular file"),
        (md.export_orbax, tmp_path / "there", "already exists"),
        (md.export_orbax, tmp_path / "none" / "w", "cannot be created: there is no folder"),
    ):
        with pytest.raises(md.SaveError, match=complaint):
            export(checkpoints, 3, place)
        with pytest.raises(md.ShapeError, match="a step must be an integer"):
            export(checkpoints, "3", place)  # type: ignore[arg-type]  # the mistake that is tested
        with pytest.raises(md.ShapeError, match=r"must be md.Checkpoints\(directory\), got str"):
            export(str(tmp_path), 3, place)  # type: ignore[arg-type]  # the mistake that is tested
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "run", "there"], "nothing is left behind"


def test_import_error_for_unknown_dims(saved: Any, tmp_path: Path):
    pytest.importorskip("safetensors")
    md.export_safetensors(saved[0], 3, tmp_path / "w")
    with pytest.raises(md.ShapeError, match=r"dims= names 'params/v', which .* lacks; did you mean 'params/w'\?"):
        md.import_safetensors(tmp_path / "w", dims={"params/v": "io hidden"})
