"""Every process compiles the same program: devices of several processes could not exchange data otherwise.

The order of a Python set depends on the hashes of strings and on addresses, which differ by process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from tests.test_imports import ROOT

PRINT = """
import hashlib, sys
import meshdsl as md
from meshdsl.models.transformer import lm
waste = [object() for _ in range(int(sys.argv[1]))]  # other addresses
small = lm.replace(batch=8, length=16, layers=2, vocab=64, d_model=16, heads=4, d_head=4, d_ff=32)
layout = "batch:rows; vocab:cols; d_ff:cols; heads:cols"
for options in ({}, {"weight_update": "sharded"}, {"overlap": "list"}, {"overlap": "halves"}):
    machine = {"machine": "h100"} if "overlap" in options else {}
    step = md.compile(small.train_step(), "rows:2 cols:4", layout, **options, **machine)
    print(options, hashlib.sha256(str(step.program(*small.specs())).encode()).hexdigest())
"""


@cache
def printed(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRINT, seed]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("seed", ["7"])
def test_programs_do_not_depend_on_the_process(seed: str) -> None:
    assert printed(seed) == printed("0")
