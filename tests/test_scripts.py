"""Errors that a script does not catch: its own lines and the message; tests/test_notebooks.py has notebooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import meshdsl as md
def layer(x):
    return {line}
layer(md.tensor([1.0, 2.0], "batch"))
"""


@pytest.mark.parametrize(("line", "ours"), [('md.sum(x, over="bach")', True), ("md.map(1 / 0, x)", False)])
def test_an_error_in_a_script_shows_its_lines_and_the_message(line: str, ours: bool, tmp_path: Path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(line=line))
    run = subprocess.run([sys.executable, file], capture_output=True, text=True)
    text = run.stderr
    assert run.returncode == 1 and line in text and ("no dim 'bach'" in text or "ZeroDivisionError" in text)
    assert ("reductions.py" in text) == ours and "Traceback" in text
