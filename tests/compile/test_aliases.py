"""Tensors that share memory, in one call."""

from __future__ import annotations

import json
import subprocess
import sys


def test_aliases_of_a_call_are_refused_or_harmless() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile.aliases", "--cases", "60", "--optimizers", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["refused"] > 10 and counts["equal"] > 10 and counts["trained"] == 2
