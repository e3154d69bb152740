"""Faults in sharded JAX programs, and right programs: `python -m tests.foreign.law [--cases N] [--right N]`.

Each fault is one collective of a program, written wrongly at a known line (`faults.py`, `programs.py`). Prints JSON
lines by kind of fault: how many are found by the simulation beside one device, with a reference where that needs one,
by following shardings, and by JAX's own `check_vma`; and for how many a finding is within a line of the fault. Faults
that change no result are left out. Right programs are those that the faults are made of, and `--right` training steps
that meshdsl emits under random layouts; a finding in one is a false alarm. Ends with 1 for a false alarm.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl.jax_functions.foreign import JaxReport, verify_jax
from meshdsl.jax_functions.foreign.explain import close
from meshdsl.jax_functions.foreign.simulate import Run
from meshdsl.jax_functions.foreign.trace import trace
from tests.foreign.faults import Fault, faults, module_of
from tests.foreign.programs import PROGRAMS, Built, Program

STAGES = ("simulated", "reference", "followed", "check_vma", "near")


def right(program: Program) -> Built:
    return program.build(module_of(ast.parse(program.path.read_text()), program.path))


def every_fault() -> list[tuple[str, Fault]]:
    return [
        (name, fault)
        for name, program in PROGRAMS.items()
        for fault in faults(name, program.path, program.axes, program.functions, program.leaves)
    ]


def sampled(cases: list[Any], count: int | None) -> list[Any]:
    return cases if count is None or count >= len(cases) else [cases[i * len(cases) // count] for i in range(count)]


def judged(name: str, fault: Fault, built: Built) -> tuple[str | None, JaxReport | None]:
    """The first stage that finds a fault, "" for none, None for a fault that is none; and the report."""
    try:
        case = PROGRAMS[name].build(fault.module)
        report = verify_jax(case.step, *case.args)
    except Exception:  # JAX does not trace it, so nobody can run it
        return None, None
    if report.findings:
        return "simulated", report
    if _results(case, built) == "equal":
        return None, None
    report = verify_jax(case.step, *case.args, reference=case.reference or built.step)
    return ("reference" if report.findings else ""), report


def _results(case: Built, built: Built) -> str:
    own, other = (
        Run().program((t := trace(b.step, b.args, check_vma=False)).jaxpr, t.arguments) for b in (case, built)
    )
    same = all(close(a.array[0], b.array[0], 1e-9) for a, b in zip(own, other, strict=True))
    return "equal" if same else "differ"


def near(report: JaxReport, name: str, fault: Fault) -> bool:
    """True if a finding names a line at most one away from the fault."""
    first, last, path = fault.lines[0] - 1, fault.lines[1] + 1, str(PROGRAMS[name].path)
    lines = [at for f in report.findings for at in (*f.lines, *f.since_lines) if at.file == path]
    return any(first <= at.line <= last for at in lines)


def law(cases: list[tuple[str, Fault]], show: bool = True) -> Iterator[tuple[Fault, set[str]]]:
    """Each fault that changes a result, and the stages that find it."""
    known = {name: right(PROGRAMS[name]) for name in dict.fromkeys(name for name, _ in cases)}
    for name, fault in cases:
        stage, report = judged(name, fault, known[name])
        if stage is None or report is None:
            continue
        stages = {stage} - {""}
        stages |= {"near"} if near(report, name, fault) else set()
        stages |= {"check_vma"} if any(note.startswith("JAX refuses") for note in report.notes) else set()
        case = PROGRAMS[name].build(fault.module)
        stages |= {"followed"} if verify_jax(case.step, *case.args, simulate=False).findings else set()
        if show and not {"near"} <= stages:
            print(f"{fault}: {'missed' if not stage else 'found elsewhere'}", file=sys.stderr, flush=True)
        yield fault, stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="faults, evenly spaced (default: all)")
    parser.add_argument("--right", type=int, default=100, help="training steps of meshdsl that are verified")
    options = parser.parse_args()
    with jax.enable_x64(False):
        alarms = by_hand(options.cases)
    from tests.foreign.right import reports

    wrong = [case for case, report in reports(1, options.right) if report.findings]
    print(json.dumps({"steps of meshdsl": options.right, "false alarms": len(wrong)}), *wrong)
    return 1 if alarms or wrong else 0


def by_hand(count: int | None) -> int:
    """Print what is found in programs written by hand, right and with faults; returns the number of false alarms."""
    start, alarms = time.perf_counter(), 0
    for program in PROGRAMS.values():
        built = right(program)
        for reference in {None, built.reference}:
            for simulate in (True, False) if reference is None else (True,):
                report = verify_jax(built.step, *built.args, reference=reference, simulate=simulate)
                alarms += bool(report.findings)
    print(json.dumps({"right programs by hand": len(PROGRAMS), "false alarms": alarms}), flush=True)
    counts: dict[str, Counter[str]] = {}
    for fault, stages in law(sampled(every_fault(), count)):
        own = counts.setdefault(fault.kind.split()[0], Counter())
        own.update({"faults": 1, **dict.fromkeys(stages, 1)})
    for kind, own in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        found = own["simulated"] + own["reference"]
        print(json.dumps({"fault": kind, "faults": own["faults"], "found": found, **{s: own[s] for s in STAGES}}))
    print(json.dumps({"seconds": round(time.perf_counter() - start)}), flush=True)
    return alarms


if __name__ == "__main__":
    sys.exit(main())
