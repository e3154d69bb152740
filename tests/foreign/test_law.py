"""Faults in sharded JAX programs are found, at their lines, and right programs have none; at length: `law.py`."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

import meshdsl as md
from tests.foreign.law import every_fault, law, right, sampled
from tests.foreign.programs import PROGRAMS
from tests.foreign.right import reports

SLOW = ("gpipe", "language_model.grad", "megatron", "moe_layer")


@pytest.fixture
def float32() -> Iterator[None]:
    """Programs written by hand are in JAX's own dtypes."""
    with jax.enable_x64(False):
        yield


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SLOW])
def test_right_programs_have_no_finding(name: str) -> None:
    built = right(PROGRAMS[name])
    report = md.verify_jax(built.step, *built.args, reference=built.reference)
    assert report.ok, report
    assert not md.verify_jax(built.step, *built.args, simulate=False).findings


@pytest.mark.usefixtures("float32")
def test_faults_are_found_within_a_line() -> None:
    few = [(name, fault) for name, fault in every_fault() if name not in (*SLOW, "language_model")]
    found = [stages for _, stages in law(sampled(few, 45), show=False)]
    assert len(found) >= 25
    assert sum(bool(stages & {"simulated", "reference"}) for stages in found) >= 0.97 * len(found)
    assert sum("near" in stages for stages in found) >= 0.9 * len(found)


def test_steps_that_meshdsl_emits_are_right() -> None:
    for case, report in reports(1, 1):
        assert report.ok, (case, report)
