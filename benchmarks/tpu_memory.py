"""Predicted memory per device compared with the TPU compiler's: python -m benchmarks.tpu_memory [options] [NAME ...]

Needs the extra `aot`, but no TPU. Prints a JSON line for each train step and topology, then the errors of
each part of `tpu_memory_points`; the errors are also printed if the script is interrupted.

`theirs` is the compiler's peak memory. `sum` is its argument + output + temp - alias, which is larger for programs with
loops, and can exceed the device's memory for programs that do compile. `--full` runs the compiler with full effort,
which takes several times as long. `--part tested` selects a part, `--predict` only predicts, and `--cache DIRECTORY`
keeps the compiler's figures by program.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import meshdsl as md
from benchmarks.tpu_memory_points import PARTS, Point
from meshdsl.tools.compilers.aot import tpu_program

Line = dict[str, Any]


def predicted(name: str, part: str, point: Point) -> tuple[Line, md.Program, list[Any]]:
    """The predicted memory of one train step, its program and the donated inputs."""
    step = md.compile(point.workload.train_step(), plan=point.plan, donate=(0, 1))
    specs = point.workload.specs()
    program, donated = tpu_program(step.program(*specs)), list(step.donated(*specs))
    start = time.perf_counter()
    ours = md.memory(program, donated=donated)
    line = {
        "figure": "tpu_memory",
        "point": name,
        "topology": point.topology,
        "part": part,
        "ours": ours.peak,
        "at": f"{ours.at.op} {ours.at.where}",
        "our_seconds": round(time.perf_counter() - start, 3),
    }
    return line, program, donated


def compiled(program: md.Program, donated: list[Any], topology: str, effort: str, cache: Path | None) -> Line:
    """The compiler's figures of a program; from the cache if it has them."""
    key = hashlib.sha256(f"{topology} {effort} {[v in donated for v in program.ins]} {program}".encode()).hexdigest()
    at = None if cache is None else cache / f"{key[:20]}.json"
    if at is not None and at.exists():
        return json.loads(at.read_text(encoding="utf-8"))
    compilation = md.compile_for(topology, program, donated=donated, effort=effort, timeout=3600)
    memory = compilation.memory
    assert memory is not None, str(compilation)
    figures = {"theirs": memory.peak, "sum": memory.total, "their_seconds": round(compilation.seconds, 1)}
    if at is not None:
        at.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def summary(lines: list[Line], label: str) -> Line:
    """The median and the largest error."""
    errors = [abs(line["error"]) for line in lines]
    return {
        "figure": "tpu_memory_summary",
        "points": label,
        "count": len(lines),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "above_5_percent": sum(error > 0.05 for error in errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated; default: all")
    parser.add_argument("--full", action="store_true", help="full effort of the compiler")
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    parser.add_argument("--cache", type=Path, metavar="DIRECTORY", help="an existing folder")
    args = parser.parse_args()
    points = {name: (part, point) for part in args.part or PARTS for name, point in PARTS[part].items()}
    if unknown := set(args.names) - set(points):
        raise SystemExit(f"there is no point {sorted(unknown)}; there are: {', '.join(points)}")
    lines: list[Line] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in args.names or points:
            part, point = points[name]
            line, program, donated = predicted(name, part, point)
            if not args.predict:
                line |= compiled(program, donated, point.topology, "" if args.full else "O1", args.cache)
                line["error"] = round(line["ours"] / line["theirs"] - 1, 4)
                lines.append(line)
            print(json.dumps(line), flush=True)
    finally:  # also if the script is interrupted or a compilation fails
        for part in PARTS:
            if selected := [line for line in lines if line["part"] == part]:
                print(json.dumps(summary(selected, part)), flush=True)
        if lines:
            print(json.dumps(summary(lines, "all")), flush=True)


if __name__ == "__main__":
    main()
