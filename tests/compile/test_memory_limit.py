"""`md.compile(..., memory_limit=)` recomputes as little as fits."""

from __future__ import annotations

import re

import pytest

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.models.transformer import lm

SMALL = lm.replace(batch=16, length=64, layers=2, d_model=64, heads=4, d_head=16, d_ff=256, vocab=64)
STEP, SPECS, ON = SMALL.train_step(), SMALL.specs(), ("rows:4", "batch:rows")


def test_as_little_is_recomputed_as_fits():
    with pytest.raises(md.LayoutError, match=r"does not fit memory_limit=1.00 kB .*: none .* MB, .*full .*B") as error:
        md.compile(STEP, *ON, memory_limit=1000).program(*SPECS)
    listed = {name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+) MB", str(error.value))}
    assert list(listed) == ["none", "collectives", "products", "full"]
    free, tight = (md.compile(STEP, *ON, memory_limit=listed["none"] * 1e6 + slack) for slack in (1e4, -1e5))
    programs = [each.program(*SPECS) for each in (free, tight)]
    assert free.plan.remat == "none" != tight.plan.remat
    assert md.memory(programs[1]).peak < listed["none"] * 1e6 - 1e5 < md.memory(programs[0]).peak
    assert ledger(programs[1]).flops > ledger(programs[0]).flops
    assert len(md.compile(STEP, plan=tight.plan).program(*SPECS).eqns) == len(programs[1].eqns)


def test_what_cannot_be_limited():
    with pytest.raises(md.NoEffectError, match=r"memory_limit=1000 has no effect: .* does not take remat"):
        md.compile(lambda x: x, "rows:2", memory_limit=1000)
    with pytest.raises(md.LayoutError, match="the plan has remat='full'; drop one"):
        md.compile(STEP, plan=md.Plan(*ON, remat="full"), memory_limit=1e9)
    with pytest.raises(md.LayoutError, match="a number of bytes above 0"):
        md.compile(STEP, *ON, memory_limit=-1)


def test_a_plan_fills_in_knobs_of_calls_with_keywords_and_static_arguments():
    def step(x: md.Tensor, squared: bool, *, scale: float = 1.0, remat: str = "none", microbatches: int = 1):
        seen.append((remat, microbatches))
        return md.accumulate(lambda x: md.sum(x * x if squared else x) * scale, x, microbatches)

    seen: list[tuple[str, int]] = []
    x = md.tensor([1.0, 2.0], "batch")
    for limit in (None, 1e9):
        compiled = md.compile(step, "rows:1", "", static="squared", microbatches=2, memory_limit=limit)
        assert float(compiled(x, True).numpy()) == 5
        assert float(compiled(x, False, scale=md.tensor(2.0)).numpy()) == 6
        assert (compiled.plan.microbatches, compiled.plan.remat) == (2, "none" if limit else "model")
    assert set(seen) == {("none", 2)}
    with pytest.raises(md.ShapeError, match="unexpected keyword argument 'microbatches'"):
        compiled(x, True, microbatches=1)
