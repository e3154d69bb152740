"""A program that is killed while it saves loses nothing it was promised; `python -m tests.checkpoint.fuzz crash`."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.together import ROOT


def test_save_survives_kills():
    run = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crash", "3", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["kills"] == 3
