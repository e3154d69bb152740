"""Colours appear in terminals only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.tools.commands import colours

ROOT = Path(__file__).parent.parent.parent


def in_terminal(*arguments: str, **environment: str) -> str:
    """The output of the command in a terminal."""
    main, terminal = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm", **environment}
    command = [sys.executable, "-m", "meshdsl", *arguments]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, cwd=ROOT) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    assert process.returncode in (0, 4)
    return shown.decode()


def test_colours_in_a_terminal_only() -> None:
    assert "\033[1mexamples:\033[0m" in in_terminal("--help")
    assert "\033" not in in_terminal("--help", NO_COLOR="1")
    assert "\033" not in in_terminal("--help", TERM="dumb")


def test_colours_of_axes_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "batch=2/rows over cols rows"
    assert colours.painted(text, ["rows", "cols"]) == text
    monkeypatch.setattr(colours, "has_colours", lambda stream=None: True)
    assert colours.painted(text, ["rows", "cols"]) == "batch=2/\033[34mrows\033[0m over \033[33mcols\033[0m rows"
    assert colours.of_error("ShapeError") == "\033[1;31mShapeError\033[0m"
