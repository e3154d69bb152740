"""A save runs beside the computation, has one writer, removes only expired steps, and reports every failure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.train.checkpoint import store
from meshdsl.train.checkpoint.directory import unfinished


def x(value: float = 1.0) -> dict[str, Any]:
    return {"w": md.tensor(np.full(64, value), "io"), "v": md.tensor(np.full((2, 3), value), "a b")}


def value(found: md.Restored) -> float:
    return float(found.tree["w"].numpy()[0])


def test_save_keeps_the_newest_steps(tmp_path: Path):
    with md.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 5, 9):
            assert checkpoints.save(step, x(step))
        checkpoints.wait()
        assert checkpoints.steps() == [5, 9] and checkpoints.latest() == 9
    assert sorted(os.listdir(tmp_path)) == ["newest", "step-00000005", "step-00000009"]
    with md.Checkpoints(tmp_path / "all", keep=None) as checkpoints:
        for step in range(5):
            checkpoints.save(step, x())
    assert checkpoints.steps() == [0, 1, 2, 3, 4]


def test_save_returns_after_the_host_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is slow here; the step goes on, a second save waits or is refused, and says which."""
    go = threading.Event()
    publish = store.Save.publish

    def slow(*args: Any) -> None:
        assert go.wait(30)
        publish(*args)

    monkeypatch.setattr(store.Save, "publish", slow)
    with md.Checkpoints(tmp_path) as checkpoints:
        began = time.perf_counter()
        assert checkpoints.save(1, x(1))
        assert time.perf_counter() - began < 5
        assert checkpoints.steps() == []
        assert not checkpoints.save(2, x(2), wait=False), "refused: the first is being written"
        threading.Timer(0.2, go.set).start()
        assert checkpoints.save(3, x(3)), "waits"
        assert go.is_set() and checkpoints.steps()[0] == 1
    assert checkpoints.steps() == [1, 3]


def test_save_refuses_existing_and_earlier_steps(tmp_path: Path):
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, x(4))
        checkpoints.save(6, x(6))
        for step in (6, 5):
            with pytest.raises(md.SaveError, match="step-00000006 already exists") as caught:
                checkpoints.save(step, x(0))
            assert caught.value.exit_code == 1
        checkpoints.discard(after=4)
        assert checkpoints.steps() == [4]
        checkpoints.save(5, x(5))
        assert value(checkpoints.restore()) == 5


def test_save_renames_a_corrupt_step(tmp_path: Path):
    said: list[str] = []
    with md.Checkpoints(tmp_path, report=said.append) as checkpoints:
        checkpoints.save(1, x(1))
        checkpoints.save(2, x(2))
        checkpoints.wait()
        part = tmp_path / "step-00000002" / "part-00000.bin"
        part.write_bytes(b"?" * part.stat().st_size)
        found = checkpoints.restore()
        assert (found.step, value(found)) == (1, 1)
        assert len(said) == 1 and "step-00000002" in said[0] and "part-00000.bin" in said[0] and "'v'" in said[0]
        checkpoints.save(2, x(7))
        assert "is corrupt; renamed to step-00000002." in said[1] and said[1].endswith(".bad")
        assert value(checkpoints.restore()) == 7
    assert any(name.endswith(".bad") for name in os.listdir(tmp_path)), "what is corrupt is not thrown away"


def test_report_default_is_a_warning(tmp_path: Path):
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x())
    (tmp_path / "step-00000002.0123456789abcdef.unfinished").mkdir()
    with pytest.warns(RuntimeWarning, match="step-00000002.* is an unfinished save"):
        assert checkpoints.restore().step == 1
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, x())
    assert unfinished(tmp_path) == [], "the next writer clears it away"


def test_restore_reports_a_missing_newest_step(tmp_path: Path):
    said: list[str] = []
    with md.Checkpoints(tmp_path, report=said.append) as checkpoints:
        checkpoints.save(1, x(1))
        checkpoints.save(2, x(2))
        checkpoints.wait()
        os.rename(tmp_path / "step-00000002", tmp_path / "elsewhere")
        assert checkpoints.restore().step == 1
    assert said == [f"step-00000002 was saved in {tmp_path} and is missing now"]


def test_restore_errors_without_steps(tmp_path: Path):
    checkpoints = md.Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    with pytest.raises(md.CheckpointError, match="there is no valid checkpoint in") as caught:
        checkpoints.restore()
    assert caught.value.exit_code == 4
    with pytest.raises(md.CheckpointError, match="none: the directory cannot be opened"):
        checkpoints.restore(3)
    (tmp_path / "none").mkdir()
    with pytest.raises(md.CheckpointError, match="step-00000003: the directory is missing"):
        checkpoints.restore(3)


def test_save_errors(tmp_path: Path):
    checkpoints = md.Checkpoints(tmp_path)
    cases = [
        ({"step": -1, "tree": x()}, "a step must be an integer"),
        ({"step": True, "tree": x()}, "a step must be an integer"),
        ({"step": 1, "tree": {"w": np.zeros(3)}}, "w: expected a tensor or a number"),
        ({"step": 1, "tree": {"w": md.spec("io:3")}}, "w is the spec"),
        ({"step": 1, "tree": {"a": {"b": 1}, "a/b": 2}}, "two tensors of the tree have the path 'a/b'"),
        ({"step": 1, "tree": x(), "config": {"lr": float("nan")}}, "config.lr is nan (float), and config and data"),
        ({"step": 1, "tree": x(), "config": {"f": print}}, "config.f is <built-in function print>"),
        ({"step": 1, "tree": x(), "data": {1: 2}}, "data is {1: 2} (dict), and config and data"),
        ({"step": 1, "tree": x(), "key": 7}, "must be a random key, as from md.random.key"),
        ({"step": 1, "tree": {1: 1.0, "1": 2.0}}, "this is not a tree of tensors: "),
        ({"step": 1, "tree": {"k": jax.random.key(0)}}, "k: got a JAX random key"),
    ]
    for asked, complaint in cases:
        with pytest.raises(md.ShapeError) as caught:
            checkpoints.save(**asked)
        assert complaint in str(caught.value), complaint
        assert str(caught.value).count("\n  at ") == 1, str(caught.value)
    with pytest.raises(md.TraceError, match="no values yet"):
        md.eval_shape(lambda w: checkpoints.save(1, w), md.spec("io:3"))
    assert os.listdir(tmp_path) == [], "nothing was written"


def test_save_error_for_donated_tensor(tmp_path: Path):
    step = md.compile(lambda w: w + 1, "rows:2", "io:rows", donate=0)
    w = md.compile(lambda w: w * 2, "rows:2", "io:rows")(md.tensor(np.ones(4), "io"))
    step(w)
    with pytest.raises(md.ShapeError, match="its memory was donated to a compiled function"):
        md.Checkpoints(tmp_path).save(1, {"w": w})


WRONG = [
    ({"keep": 0}, "keep must be an integer from 1"),
    ({"keep": 2.5}, "keep must be an integer from 1"),
    ({"keep": "3"}, "keep must be an integer from 1"),
    ({"chunk_bytes": 0}, "chunk_bytes must be an integer from 1"),
    ({"seconds": "long"}, "seconds must be a number above 0"),
    ({"report": 3}, "report must be a function of one text"),
    ({"directory": None}, "directory must be a path"),
    ({"directory": "a\0b"}, "directory must be a path"),
]


@pytest.mark.parametrize(("options", "complaint"), WRONG, ids=lambda v: str(v)[:30])
def test_checkpoints_errors_for_bad_options(tmp_path: Path, options: dict[str, Any], complaint: str):
    with pytest.raises(md.ShapeError, match=complaint):
        md.Checkpoints(**{"directory": tmp_path, **options})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 10**30])
def test_checkpoints_errors_for_bad_steps(tmp_path: Path, step: Any):
    checkpoints = md.Checkpoints(tmp_path)
    for method in (checkpoints.restore, checkpoints.verify, checkpoints.discard):
        with pytest.raises(md.ShapeError, match="a step must be an integer"):
            method(step)


def test_restore_accepts_mesh_and_layout_as_text(tmp_path: Path):
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x())
        assert checkpoints.restore(mesh="rows:4", layout="io:rows").tree["w"].stored.sharding.num_devices == 4
        compiled = md.compile(lambda w, v: (w, v), "rows:2", "io:rows")
        with pytest.raises(md.ShapeError, match=r"program= must be the result of .*, got Compiled"):
            checkpoints.restore(program=compiled)  # type: ignore[arg-type]  # the mistake that is tested
        with pytest.raises(md.LayoutError, match="a program already has a mesh and a layout"):
            checkpoints.restore(program=compiled.program(*x().values()), mesh=md.Mesh("rows:4"))


def test_restore_finds_a_step_saved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with md.Checkpoints(tmp_path, keep=1) as writer:
        writer.save(1, x(1))
        writer.wait()
        really, done = store.DirectoryStore.open, list[int]()

        def slow(where: Any, step: int) -> Any:
            if not done:
                done.append(step)
                writer.save(2, x(2))
                writer.wait()  # step 1 is removed now
            return really(where, step)

        monkeypatch.setattr(store.DirectoryStore, "open", slow)
        assert value(md.Checkpoints(tmp_path, report=lambda line: None).restore()) == 2


def test_clean_removes_only_own_files(tmp_path: Path):
    mine = ["lock.notes", "newest.txt", "step-00000001.unfinished", "notes"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    for name in ("lock.0123456789abcdef", "newest.draft"):
        (tmp_path / name).write_text("left behind")
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x())
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, "newest", "step-00000001"])


def test_claim_locks_before_the_first_save(tmp_path: Path):
    first, second = md.Checkpoints(tmp_path / "run"), md.Checkpoints(tmp_path / "run")
    first.claim()
    first.claim()
    with pytest.raises(md.SaveError, match="is being written by process"):
        second.claim()
    first.close()
    second.claim()
    second.close()
    assert os.listdir(tmp_path / "run") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(md.SaveError, match="directory is the file"):
        md.Checkpoints(tmp_path / "file").claim()


def test_restore_errors_list_every_mismatch(tmp_path: Path):
    like = {"w": md.spec("io:65", "float64"), "v": md.spec("a:2 b:3"), "u": md.spec("io:1")}
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x())
        with pytest.raises(md.ShapeError) as caught:
            checkpoints.restore(like=like)
        with pytest.raises(md.LayoutError, match="needs a mesh"):
            checkpoints.restore(layout=md.Layout("io:rows"))
        with pytest.raises(md.LayoutError, match=r"shards two dims of v, .a=2 b=3., over the axis 'r': a and b"):
            checkpoints.restore(mesh=md.Mesh("r:2"), layout=md.Layout("a:r b:r"))
        with pytest.raises(md.LayoutError, match="no axis 's'"):
            checkpoints.restore(mesh=md.Mesh("r:2"), layout=md.Layout("a:s"))
    text = str(caught.value)
    assert "w: is float64[io=64] in the checkpoint and float64[io=65] in like=" in text
    assert "v: is float64[a=2 b=3] in the checkpoint and float32[a=2 b=3] in like=" in text
    assert "u: is missing" in text


def test_restore_error_for_64_bit_types(tmp_path: Path):
    import jax

    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, x())
        with jax.enable_x64(False), pytest.raises(md.ShapeError, match="64-bit types only with jax_enable_x64"):
            checkpoints.restore()


def test_lock_refuses_a_second_writer(tmp_path: Path):
    first, second = md.Checkpoints(tmp_path), md.Checkpoints(tmp_path, take_over=False)
    first.save(1, x(1))
    first.wait()
    with pytest.raises(md.SaveError, match=f"is being written by process {os.getpid()} on") as caught:
        second.save(2, x(2))
    assert str(tmp_path / "lock") in str(caught.value)
    assert second.restore().step == 1, "reading is free"
    first.close()
    second.save(2, x(2))
    second.close()
    assert not (tmp_path / "lock").exists()
