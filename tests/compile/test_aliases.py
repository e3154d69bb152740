"""Tensors that share memory, in one call."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import meshdsl as md


def test_aliases_of_a_call_are_refused_or_harmless() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile.aliases", "--cases", "60", "--optimizers", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["refused"] > 10 and counts["equal"] > 10 and counts["trained"] == 2


def test_a_donated_argument_that_no_result_can_replace_is_named():
    """JAX warns of a shape; ours names the argument, at the user's line, and the others are donated all the same."""
    state = {"m": md.tensor(np.ones(8, np.float32), "io"), "n": md.tensor(np.ones(6, np.float32), "hidden")}
    step = md.compile(lambda state: (md.sum(state["m"], "io"), state["n"] * 2.0), "a:2", "io:a hidden:a", donate=0)
    with pytest.warns(UserWarning, match="no result is left with the shape and dtype of state/m: nothing") as found:
        step(state)
    assert found[0].filename == __file__ and len(found) == 1
