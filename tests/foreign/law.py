"""Faults in programs written by hand, found by `md.verify_jax`: `python -m tests.foreign.law [--programs NAME ...]`."""

from __future__ import annotations

import argparse
import ast
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from meshdsl.foreign.explain import close
from meshdsl.foreign.simulate import Run
from meshdsl.foreign.trace import trace
from meshdsl.foreign.verify import verify_jax
from tests.foreign.faults import Fault, _module, faults
from tests.foreign.programs import PROGRAMS, Program


def right(program: Program) -> Any:
    return program.build(_module(ast.parse(program.path.read_text()), program.path))


def same(built: Any, case: Any) -> bool:
    """True for a fault that changes no result: the program is still right."""
    one, other = (
        Run().program(
            trace(c.step, c.args, check_vma=False).jaxpr,
            built.args_flat if False else trace(c.step, c.args, check_vma=False).arguments,
        )
        for c in (built, case)
    )
    return all(close(a.array[0], b.array[0], 1e-9) for a, b in zip(one, other, strict=True))


def near(report: Any, fault: Fault, path: Path) -> bool:
    first, last = fault.lines[0] - 1, fault.lines[1] + 1
    lines = [at for f in report.findings for at in (*f.lines, *f.since_lines) if at.file == str(path)]
    return any(first <= at.line <= last for at in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    total, found, located, vma = Counter(), Counter(), Counter(), Counter()
    for name in options.programs:
        program = PROGRAMS[name]
        built = right(program)
        for reference in {None, built.reference}:
            start = time.perf_counter()
            report = verify_jax(built.step, *built.args, reference=reference)
            print(
                name,
                "with reference" if reference else "",
                "right" if report.ok else report,
                round(time.perf_counter() - start, 2),
                flush=True,
            )
        for fault in faults(name, program.path, program.axes, program.functions, program.leaves):
            if options.only and options.only not in str(fault):
                continue
            try:
                case = program.build(fault.module)
                start = time.perf_counter()
                report = verify_jax(case.step, *case.args)
            except IndexError as error:
                continue
            except Exception as error:
                print(
                    "   ", fault, "not traced:", type(error).__name__, str(error)[:150].replace("\n", " "), flush=True
                )
                continue
            seconds = time.perf_counter() - start
            reference = ""
            if report.ok or report.undecided:
                report = verify_jax(case.step, *case.args, reference=case.reference or built.step)
                reference = " (reference)"
            if report.ok and same(built, case):
                continue
            total[fault.kind] += 1
            found[fault.kind] += not report.ok
            hit = not report.ok and near(report, fault, program.path)
            located[fault.kind] += hit
            vma[fault.kind] += any("shard_map" in n or "vary" in n for n in report.notes)
            if not hit or options.verbose:
                print("   ", fault, reference, "MISSED" if report.ok else "FAR" if not hit else "ok", round(seconds, 2))
                for f in report.findings[:6]:
                    print("        ", str(f)[:260])
    for kind in total:
        print(
            json.dumps(
                {
                    "fault": kind,
                    "cases": total[kind],
                    "found": found[kind],
                    "within a line": located[kind],
                    "check_vma": vma[kind],
                }
            )
        )
    print(
        json.dumps(
            {"cases": total.total(), "found": found.total(), "within a line": located.total(), "check_vma": vma.total()}
        )
    )


if __name__ == "__main__":
    main()
