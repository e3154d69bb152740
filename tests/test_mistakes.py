"""Mistakes that people make: none is accepted, and the error is meshdsl's, at the user's line, with the right words.

The tables are in `tests/mistakes/`: a call and a part of its message.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.errors import is_ours
from tests.cli.running import here
from tests.mistakes import commands


def rows() -> list[Any]:
    found: list[Any] = []
    for family in ("tensors", "operations", "layouts", "models", "runs"):
        table = importlib.import_module(f"tests.mistakes.{family}").ROWS
        found += [pytest.param(*row, id=f"{family}:{row[0].__code__.co_firstlineno}") for row in table]
    return found


@pytest.mark.parametrize(("call", "part"), rows())
def test_mistake_is_an_error_at_the_users_line(call: Callable[[], Any], part: str) -> None:
    with pytest.raises(md.MeshdslError) as caught:
        call()
    where = caught.value.where
    assert part and part in caught.value.args[0]  # the text ends with the line of the row, which has the part too
    assert where is not None and where.line and not is_ours(where.file), caught.value


@pytest.mark.parametrize(("line", "code", "part"), commands.ROWS, ids=[row[0] for row in commands.ROWS])
def test_mistake_on_the_command_line_is_one_message(
    line: str, code: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    run = here(*line.split())
    assert run.code == code and part and part in run.err, run
    assert "Traceback" not in run.err and "InternalError" not in run.err
