"""Training steps under random plans equal the plain steps; at length: `python -m tests.compile.steps_law`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.compile.steps import Model
from tests.compile.steps_law import Case, Plan, judge, law

STEPS, BLOCKS = 30, 3


@pytest.mark.parametrize("block", range(BLOCKS))
def test_steps_under_random_plans_equal_the_plain_steps(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts, verdicts, failures = law(1 + 4 * block, STEPS // BLOCKS, every=20, show=False)
    with capsys.disabled():
        print(f"steps law: {dict(counts)}, {dict(verdicts)}")
    assert not failures, "\n".join(failures)
    least = {"simulated": 7, "padded": 4, "sends": 6, "sharded weights": 4}
    assert all(counts[name] >= n for name, n in least.items()), counts


def test_fences_leave_values_in_the_memory_of_the_host() -> None:
    model = Model(30013, ("multi_head",), "project", "entropy", "sgd", False, "float32", "step", "")
    rules, update, overlap = {"batch": "y", "vocab": "z"}, {"mode": "sharded"}, {"mode": "halves"}
    plan = Plan("x:1 y:2 z:4", rules, update, overlap, "tpu-v6e", "offload", 1, False, ())
    assert judge(Case(model, plan, False), Counter()) == "ok"
