"""One writer: the kernel's lock on one machine, a heartbeat between machines; nothing blocks in silence."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.train.checkpoint import heartbeat, lock

from .holders import TREE, has_namespaces, held_in_another_namespace, holder


def other_machine(folder: Path, seconds_ago: float, **fields: Any) -> Path:
    """The lock of a writer on another machine, whose last heartbeat was so long ago."""
    path = folder / "lock"
    path.write_text(json.dumps({**heartbeat.own_record(), "boot": "another", "owner": "theirs", **fields}))
    os.utime(path, (time.time() - seconds_ago, time.time() - seconds_ago))
    return path


@contextlib.contextmanager
def fast(monkeypatch: pytest.MonkeyPatch, silent: float = 0.3, beat: float = 0.05) -> Any:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", silent)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", beat)
    yield


def test_lock_of_a_process_that_cannot_be_seen(tmp_path: Path):
    """A process id means nothing in another container; the kernel's lock does, until the process is killed."""
    with holder(tmp_path, "with a process id that does not exist here") as process:
        for take_over in (False, True):
            with pytest.raises(md.SaveError, match=r"is being written by process 4000000.* it is running") as caught:
                md.Checkpoints(tmp_path, take_over=take_over).save(1, TREE)
            assert str(tmp_path / "lock") in str(caught.value)
        process.kill()
        process.wait()
        with md.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, TREE)
    assert not (tmp_path / "lock").exists()


@pytest.mark.slow
def test_lock_of_another_process_namespace(tmp_path: Path):
    if not has_namespaces():
        pytest.skip("this machine lets us make no namespaces")
    held_in_another_namespace(tmp_path)


@pytest.mark.parametrize(
    ("fields", "seconds_ago", "free"),
    [
        ({}, 1e4, True),  # the machine has rebooted, or the pod of this name runs elsewhere now
        ({}, 1.0, False),
        ({"host": "elsewhere"}, 1e4, False),
        ({"host": "elsewhere"}, 1.0, False),
        ({"pid": "1; rm", "host": None}, 1e4, False),
    ],
)
def test_lock_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], seconds_ago: float, free: bool
):
    other_machine(tmp_path, seconds_ago, **fields)
    if free:
        with md.Checkpoints(tmp_path) as checkpoints:
            checkpoints.claim()
        return
    with pytest.raises(md.SaveError, match=r"is being written by .* its last heartbeat was \d+ s ago"):
        md.Checkpoints(tmp_path).claim()
    with fast(monkeypatch):
        said: list[str] = []
        with md.Checkpoints(tmp_path, take_over=True, report=said.append) as checkpoints:
            checkpoints.save(1, TREE)
        assert bool(said) == (seconds_ago < 0.3) and checkpoints.steps() == [1]


def test_lock_with_a_time_in_the_future_is_waited_for_as_long_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other_machine(tmp_path, -6.8e9, host="elsewhere")
    said: list[str] = []
    with fast(monkeypatch), md.Checkpoints(tmp_path, take_over=True, report=said.append) as checkpoints:
        checkpoints.claim()
    assert len(said) == 1 and said[0].startswith("waiting 0 s for a heartbeat"), said


def test_lock_take_over_refuses_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, ended = other_machine(tmp_path, 0, host="elsewhere"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    with fast(monkeypatch, silent=1.0):
        thread = threading.Thread(target=beat)
        thread.start()
        with pytest.raises(md.SaveError, match="its heartbeat is recent"):
            md.Checkpoints(tmp_path, take_over=True, report=lambda line: None).claim()
        ended.set()
        thread.join()


def test_lock_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = threading.active_count()
    with fast(monkeypatch), md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.claim()
        assert threading.active_count() == before + 1
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / "lock").stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / "lock").stat().st_mtime > 1
    assert threading.active_count() == before


@pytest.mark.parametrize("text", ["", "[" * 4000, "nonsense", "[]", '{"pid": 1'])
def test_lock_unparsable_is_respected(tmp_path: Path, text: str):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(md.SaveError, match="if that process has certainly ended, --take-over"):
        md.Checkpoints(tmp_path).save(1, TREE)


def test_lock_that_is_not_a_file(tmp_path: Path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(md.SaveError, match="lock is not a regular file\n  remove it"):
        md.Checkpoints(tmp_path).claim()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(md.SaveError, match="lock cannot be opened"):
        md.Checkpoints(tmp_path).claim()
    assert not (tmp_path / "elsewhere").exists()


def test_lock_is_taken_by_one(tmp_path: Path):
    for n in range(20):
        other_machine(tmp_path, 1e4)

        def take(i: int) -> lock.Held | None:
            try:
                return lock.acquire(tmp_path, f"{i}")
            except md.SaveError:
                return None

        with ThreadPoolExecutor(8) as pool:
            taken = [held for held in pool.map(take, range(8)) if held is not None]
        assert len(taken) == 1, n
        taken[0].release()
    assert os.listdir(tmp_path) == []


def test_writer_whose_lock_was_replaced_publishes_nothing(tmp_path: Path):
    with md.Checkpoints(tmp_path, keep=None) as checkpoints:
        checkpoints.save(1, TREE)
        checkpoints.wait()
        (tmp_path / "lock").unlink()
        with pytest.raises(md.SaveError, match="was taken over by a writer that its lock file does not name"):
            checkpoints.save(2, TREE)
        other_machine(tmp_path, 0, host="elsewhere")
        with pytest.raises(md.SaveError, match=r"was taken over by process \d+ on 'elsewhere'"):
            checkpoints.save(2, TREE)
    assert checkpoints.steps() == [1] and (tmp_path / "lock").exists()


def test_lock_never_waits_for_a_reader(tmp_path: Path):
    """A backup that locks the directory, or the lock file, is named at once or ignored; nothing blocks."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    began = time.monotonic()
    with md.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TREE)
    os.close(fd)
    assert time.monotonic() - began < 10 and checkpoints.steps() == [1]


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_lock_is_not_kept_by_a_forked_child(tmp_path: Path):
    """A data loader that outlives the run does not lock the directory."""
    read, write = os.pipe()
    held = lock.acquire(tmp_path, "parent")
    child = os.fork()
    if not child:
        os.write(write, b"+")
        signal.pause()
    assert os.read(read, 1) == b"+"
    try:
        os.close(held._fd)  # as if the parent had been killed
        lock.acquire(tmp_path, "next").release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_lock_without_kernel_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file system without flock: only the heartbeat decides."""

    def unsupported(*args: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first = md.Checkpoints(tmp_path)
    first.claim()
    with pytest.raises(md.SaveError, match="its last heartbeat was 0 s ago"):
        md.Checkpoints(tmp_path).claim()
    first.close()
    with md.Checkpoints(tmp_path) as second:
        second.claim()
