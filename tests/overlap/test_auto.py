"""Every mode changes a program and keeps its results, or says why it cannot; "auto" is never slower than "none"."""

from __future__ import annotations

from collections import Counter

import pytest

import meshdsl as md
from meshdsl.cost.network import place
from meshdsl.lowering.asynchrony import Start
from meshdsl.lowering.program import Program
from meshdsl.overlap.plan import plan_overlap
from meshdsl.overlap.values import MODES, Overlap
from tests.lowering.programs import draw, same_bits

MACHINES = [md.machine(name) for name in ("a100-p4de", "v100-p3dn", "tpu-v5e")]


def starts(program: Program) -> int:
    found = sum(isinstance(eqn.op, Start) for eqn in program.eqns)
    subs = (sub for eqn in program.eqns for sub in eqn.graphs().values())
    return found + sum(starts(sub) for sub in subs if isinstance(sub, Program))


def law(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        case, machine = draw(seed), MACHINES[seed % len(MACHINES)]
        compiled, arguments = case.compiled()
        try:
            program = compiled.program(*arguments)
        except md.LayoutError:
            continue
        placement = place(machine.network, program.mesh)
        wanted = md.simulate(program, *(x.numpy() for x in arguments))
        _, auto = plan_overlap(program, Overlap("auto"), machine, placement)
        assert auto.after.seconds == min(one.seconds for one in auto.attempts) <= auto.before.seconds, f"seed {seed}"
        counts["auto changes"] += auto.chosen != "none"
        for mode in MODES[2:]:
            try:
                made, plan = plan_overlap(program, Overlap(mode), machine, placement)
            except md.LayoutError as error:
                assert "has no effect: " in str(error) and "\n  " in str(error), f"{mode} of seed {seed}: {error}"
                counts[f"{mode} refused"] += 1
                continue
            assert starts(made) and plan.windows, f"{mode} of seed {seed} overlaps nothing"
            assert same_bits(md.simulate(made, *(x.numpy() for x in arguments)), wanted), f"{mode} of seed {seed}"
            counts[mode] += 1
    return counts


def test_auto_is_never_slower_and_every_mode_has_an_effect_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    counts = law(range(16))
    with capsys.disabled():
        print(f"modes on random programs: {dict(counts)}")
    assert counts["auto changes"] > 4 and counts["list"] > 4 and counts["list refused"]


@pytest.mark.slow
def test_auto_is_never_slower_on_many_random_programs() -> None:
    law(range(5_000, 5_600))


def test_auto_tries_all_rings_where_the_program_does_not_fit() -> None:
    """An operand of 69 GB over 32 devices (GShard, figure 4c): its gather does not fit, its blocks do."""

    def dot(a: md.Tensor, b: md.Tensor) -> md.Tensor:
        return md.prefer(md.einsum(a, b, out="n k"), "n")

    specs = md.spec("n:8192 m:65536"), md.spec("m:65536 k:262144")
    reports = {
        mode: md.compile(dot, "a:32", "n:a; k:a", **options).cost(*specs, machine="tpu-v4")
        for mode, options in [("none", {}), *((m, {"overlap": m, "machine": "tpu-v4"}) for m in ("auto", "ring"))]
    }
    assert [report.fits for report in reports.values()] == [False, True, True]
    assert reports["auto"].peak_bytes == reports["ring"].peak_bytes
