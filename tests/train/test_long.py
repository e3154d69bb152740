"""The short form of the long run; the long form is `python -m tests.train.long`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_long_run_with_kills_and_other_layouts():
    command = [sys.executable, "-m", "tests.train.long", "--steps", "60", "--kills", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    whole, killed, moved = map(json.loads, run.stdout.splitlines())
    assert whole["kills"] == 0 and killed["kills"] == moved["kills"] == 2
    assert killed["losses_compared"] >= 60 and killed["different"] == 0 and moved["layouts"] > 1
