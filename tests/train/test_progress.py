"""Progress: a bar where there is a terminal, plain lines now and then where there is none."""

from __future__ import annotations

import io
import itertools

import pytest

from meshdsl.errors.tables import chart
from meshdsl.train import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, **options: float) -> str:
    clock = itertools.count(0, 4).__next__  # four seconds pass between looks at it
    with Progress(10, "train", stream=stream, clock=clock, **options) as progress:
        for step in range(1, 11):
            progress.update(step, f"loss {1 / step:.2f}")
    return stream.getvalue()


def test_progress_prints_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = run(io.StringIO(), interval=10.0)
    assert text == "train 3/10  loss 0.33\ntrain 6/10  loss 0.17\ntrain 9/10  loss 0.11\n"


def test_progress_redraws_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    text = run(Terminal())
    assert text.count("\n") == 0
    frames = text.split("\r\x1b[K")
    assert frames[0] == "" and frames[-1] == ""
    assert frames[5] == "train ━━━━━━━━━━━━━━━─────────────── 5/10  loss 0.20  0:20 left"
    assert "\x1b[3" not in text, "no colours"


def test_progress_prints_plain_lines_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\r" not in run(Terminal(), interval=10.0)


def test_progress_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setenv("COLUMNS", "24")
    assert all(len(frame) < 24 for frame in run(Terminal()).split("\r\x1b[K"))


def test_chart_shows_where_curves_meet():
    text = chart({"data": [4.0, 3.0, 2.0], "model": [4.0, 3.0, 2.0]}, width=3, height=3)
    assert text == " 4.00 │2\n 3.00 │ 2\n 2.00 │  2\n      └───"


def test_chart_of_constant_curves():
    assert chart({"data": [1.0, 1.0]}, height=2).splitlines()[0] == " 1.00 │dd"
