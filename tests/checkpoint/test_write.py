"""Disk operations of a save: any of them may fail, and their order survives a crash between two of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.train.checkpoint import store
from tests.checkpoint.test_saving import value, x

CALLS = ("write", "fsync", "rename", "mkdir", "open", "unlink", "link", "rmdir", "close")


class Failing:
    """The n-th call that could meet a full or read-only disk fails, and all later ones while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int):
        self.count, self.number, self.code, self.on = 0, number, code, True
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            writes = name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if self.on and writes and name != "close":
                self.count += 1
                if self.count >= self.number:
                    raise OSError(self.code, os.strerror(self.code), str(args[0]))
            return real(*args, **named)

        return call


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(errno.ENOSPC, id="full"),
        pytest.param(errno.EROFS, id="read-only", marks=pytest.mark.slow),
        pytest.param(errno.EIO, id="broken", marks=pytest.mark.slow),
    ],
)
def test_save_with_failing_disk_operations(tmp_path: Path, code: int):
    """Whichever call is the first to fail, the step before it is whole, and the failure is said."""
    points = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        with md.Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(1, x(1))
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, number, code)
            checkpoints = md.Checkpoints(folder, keep=1, report=lambda line: None)
            said: list[str] = []
            try:
                checkpoints.save(2, x(2))
                checkpoints.wait()
            except md.SaveError as error:
                said.append(str(error))
            failing.on = False
            reached = failing.count >= number
            assert bool(said) == reached, (number, said)
            found = checkpoints.restore()
            assert value(found) == found.step
            assert found.step == 2 or (said and "step-00000002" in said[0]), (number, said)
            if checkpoints.steps()[-1] < 3:
                checkpoints.save(3, x(3))
            checkpoints.close()
        assert value(md.Checkpoints(folder).restore()) == 3, "it goes on when the disk is well again"
        points += reached
        if not reached:
            break
    assert points > 15, points


def test_save_order_of_disk_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files before the directory they are in, that before its name, the name before an older step goes."""
    with md.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, x())
        checkpoints.wait()
        events: list[str] = []

        def log(name: str) -> None:
            real = getattr(os, name)

            def call(what: Any, *rest: Any, **named: Any) -> Any:
                path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
                kind = os.path.basename(path)
                events.append(f"{name} {kind.partition('.')[0] if kind.startswith('step') else kind}")
                return real(what, *rest, **named)

            monkeypatch.setattr(os, name, call)

        log("fsync")
        log("rename")
        checkpoints.save(2, x())
    step = "step-00000002"
    assert events[:7] == [
        "fsync part-00000.bin",
        "fsync note-00000.json.draft",
        "rename note-00000.json.draft",
        "fsync manifest.json",
        f"fsync {step}",
        f"rename {step}",
        f"fsync {tmp_path.name}",
    ]
    assert "rename step-00000001" in events[7:]


def test_close_raises_the_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.Save, "publish", broken)
    checkpoints = md.Checkpoints(tmp_path)
    checkpoints.save(1, x())
    with pytest.raises(md.SaveError, match=r"step-00000001 was not saved in .*No space left on device"):
        checkpoints.close()
    assert os.listdir(tmp_path) == [], "nothing half written, and no lock"
