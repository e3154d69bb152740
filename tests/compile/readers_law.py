"""Readers never fail on a program that runs: `python -m tests.compile.readers_law --cases 2000 --seed 1`.

The programs are the operations of `tests/laws` with their gradients, random programs and random training steps, under
random layouts with uneven sizes. The readers are cost, memory, show, explain, history, prints and HTML; and every
overlap mode, which may be refused with a reason. The last line is JSON; the exit status is 1 on any failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl.cost.report import explain
from meshdsl.overlap.values import MODES
from tests.compile.steps import arguments, draw_model
from tests.compile.steps_law import Case, compiled, draw_plan, failure, refusal
from tests.laws import Row, rows
from tests.lowering.maker import Draw
from tests.lowering.programs import MESHES, draw, draw_layout, tensors
from tests.lowering.test_layout_law import NAMES, weighted

MACHINES = ("tpu-v5e", "tpu-v4", "a100-p4de", "h100")


def _report(step: md.Compiled, args: Any, rng: Draw) -> None:
    report = step.cost(*args, machine=rng.choice(MACHINES))
    text = [str(report), repr(report), report._repr_html_(), report.constraint]  # pyright: ignore[reportPrivateUsage]
    assert all(text) and json.dumps(report.to_dict()) and report.peak_bytes >= 0 and report.seconds >= 0
    assert report.interval[0] <= report.seconds <= report.interval[1]
    numbers = range(len(step.program(*args).collectives))
    assert explain.binding_text(report)
    for number in numbers[:3]:
        assert explain.collective_text(report, number, ())


def _memory(step: md.Compiled, args: Any, rng: Draw) -> None:
    memory = md.memory(step.program(*args), donated=step.donated(*args))
    assert memory.peak >= 0 and str(memory)


def _show(step: md.Compiled, args: Any, rng: Draw) -> None:
    assert md.show(step.program(*args)).svg


def _history(step: md.Compiled, args: Any, rng: Draw) -> None:
    program = step.program(*args)
    assert str(step.history(*args)) and str(program) and program._repr_html_() and step.plan.to_toml()  # pyright: ignore[reportPrivateUsage]
    assert all(str(record) for record in program.collectives)
    assert str(step.weight_update) and str(step.overlap) and json.dumps([step.weight_update.to_dict()])


READERS: dict[str, Callable[[md.Compiled, Any, Draw], None]] = {
    "cost": _report, "history": _history, "memory": _memory, "show": _show,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A function under a mesh and a layout; `compile` takes options of `md.compile`."""

    text: str
    compile: Callable[..., md.Compiled]
    args: Sequence[Any]


def of_row(row: Row, rng: Draw) -> Drawn:
    """An operation with its gradient, of random sizes."""
    f = weighted(row)
    while True:
        sizes = {name: rng.choice([1, 2, 3, 4, 5, 6, 8]) for name in NAMES}
        try:
            types = row.types(sizes, row.dtypes[0])
            known = tensors(md.compile(f, "", "").graph(*types))
        except md.ShapeError:
            continue
        mesh = rng.choice(MESHES)
        rules = dict(draw_layout(rng, mesh, known))
        return Drawn(f"{row.name} {sizes} on {mesh} under {rules}", partial(md.compile, f, mesh, rules), types)


def of_program(seed: int) -> Drawn:
    case = draw(seed)
    f, args = case.program()
    return Drawn(repr(case), partial(md.compile, f, case.mesh, case.layout), args)


def of_step(seed: int) -> Drawn:
    model = draw_model(seed)
    params, state, batches = arguments(model)
    plan = draw_plan(model, 0)

    def make(overlap: str = "none", machine: str | None = None) -> md.Compiled:
        options = {"mode": overlap} if overlap != "none" else {}
        machine = machine or (plan.machine if plan.update.get("mode") == "auto" else None)
        return compiled(Case(model, dataclasses.replace(plan, overlap=options, machine=machine)))

    return Drawn(f"step {model} {plan}", make, (params, state, batches[0]))


def judge(one: Drawn, rng: Draw, counts: Counter[str]) -> list[str]:
    """The failures of every reader and of one overlap mode on one function; none if its layout is illegal."""
    failures: list[str] = []

    def tried(name: str, run: Callable[[], Any]) -> Any:
        try:
            result = run()
        except md.InternalError as error:
            verdict = failure(error)
        except md.MeshdslError as error:
            verdict = refusal(str(error))
        except Exception as error:  # any other exception is a finding
            verdict = failure(error)
        else:
            counts[name] += 1
            return result
        counts[f"{name} {verdict}"] += verdict.startswith("refused")
        if not verdict.startswith("refused"):
            failures.append(f"{name}: {verdict}\n  {one.text}")
        return None

    def plain() -> md.Compiled:
        step = one.compile()
        step.program(*one.args)
        return step

    step = tried("programs", plain)
    if step is None:
        return failures
    for name, reader in READERS.items():
        tried(name, partial(reader, step, one.args, rng))
    mode, machine = rng.choice(MODES[1:]), rng.choice(MACHINES)
    planned = tried(f"overlap {mode}", lambda: _planned(one, mode, machine))
    if planned is not None:
        tried("planned cost", lambda: planned.cost(*one.args, machine=machine).to_dict())
        tried("planned show", lambda: (str(planned.overlap), _show(planned, one.args, rng)))
    return failures


def _planned(one: Drawn, mode: str, machine: str) -> md.Compiled:
    step = one.compile(overlap=mode, machine=machine)
    step.program(*one.args)
    return step


def law(cases: int, seed: int, show: bool = True) -> tuple[Counter[str], list[str]]:
    """The counts of what was read and refused, and the failures. Every operation has its turn."""
    table, counts, failures = rows(), Counter[str](), list[str]()
    for number in range(cases):
        rng = Draw(f"{seed} readers {number}")
        kind = number % 4
        one = (
            of_step(seed + number)
            if kind == 3
            else of_program(seed + number)
            if kind == 2
            else of_row(table[(seed + number // 4 * 2 + kind) % len(table)], rng)
        )
        found = judge(one, rng, counts)
        failures += found
        if show and found:
            print("\n".join(found), flush=True)
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    counts, failures = law(options.cases, options.seed)
    took = {"seconds": round(time.monotonic() - start), "processor_seconds": round(time.process_time())}
    print(json.dumps({**vars(options), "wrong": len(failures), "read": dict(sorted(counts.items())), **took}))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
