"""Forward time of GPT2-MoE by the range around each layer of experts that runs in parts, as JSON lines.

Lancet's figure 6 (Jiang et al., 2024, section 2.3): 16 A100, 32 experts. `range_ms` is the time of the operations
before and after a layer's all_to_alls and experts that its parts include; 0: these alone, as in Tutel. Each range runs
in the number of parts, 2 or 4, that makes the step fastest. Two cases: few layers and a large batch, many layers and a
small one.

    python -m tests.overlap.range_lengths
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import meshdsl as md
from meshdsl.cost.ledger import ledger
from meshdsl.cost.network import place
from meshdsl.cost.timeline import timeline
from meshdsl.ir import Eqn
from meshdsl.lowering import Program
from meshdsl.models.gpt_moe import gpt2_moe
from meshdsl.overlap.ranges import expert_ranges, pipelined
from meshdsl.overlap.split import cuts_along, split
from meshdsl.overlap.tasks import tasks_of

MACHINE = md.machine("a100-p4de")
CASES = {"few layers, large batch": (6, 24), "many layers, small batch": (24, 4)}
RANGES = (0.0, 0.5, 1.0, 2.0, 4.0)  # milliseconds


def forward(layers: int, batch: int) -> Program:
    """The loss of a model on 16 devices, its loops unrolled."""
    model = gpt2_moe.replace(
        layers=layers, batch=batch * 16, length=512, experts=32, capacity_factor=1.0, compute_dtype="bfloat16"
    )
    params, _, data = model.specs()
    loss = model.loss(model.config)
    step = md.compile(lambda params, data: loss(params, data)[0], "rows:16", "batch:rows; group:rows; expert:rows",
                      unroll=True)  # fmt: skip
    return step.program(params, data)


def extended(program: Program, inner: Sequence[Eqn], seconds: float, times: dict[Eqn, float]) -> list[Eqn]:
    """The equations of a range, and those before and after it that take this time on either side."""
    places = {eqn: i for i, eqn in enumerate(program.eqns)}
    first, last = places[inner[0]], places[inner[-1]]
    if not seconds:
        return list(inner)
    for step in (-1, 1):
        end, left = (first, seconds) if step < 0 else (last, seconds)
        while 0 < end < len(program.eqns) - 1 and left > 0:
            end += step
            left -= times.get(program.eqns[end], 0.0)
        first, last = (end, last) if step < 0 else (first, end)
    return list(program.eqns[first : last + 1])


def rows(case: str) -> Iterator[dict[str, Any]]:
    """The forward time without parts, and for each range."""
    program = forward(*CASES[case])
    placement = place(MACHINE.network, program.mesh)
    times = {task.eqn: task.seconds for task in tasks_of(program, MACHINE, placement).all}
    cuts = max((cuts_along(program, dim, 2) for dim in ("batch", "length", "slot")), key=len)

    def milliseconds(one: Program) -> float:
        return timeline(ledger(one), MACHINE, placement).seconds * 1e3

    whole = milliseconds(program)
    yield {"case": case, "range_ms": "none", "forward_ms": round(whole, 2), "relative": 1.0}
    for length in RANGES:
        best, parts = whole, 1
        for count in (2, 4):
            piped, taken = program, set[Eqn]()
            for inner in expert_ranges(program.eqns):
                among = [e for e in extended(program, inner, length / 1e3, times) if e not in taken]
                taken.update(among)
                values = {eqn.outs[0] for eqn in among}
                now = [eqn for eqn in piped.eqns if eqn.outs[0] in values]
                piped = pipelined(split(piped, "", count, cuts, now), [now], MACHINE, placement)
            best, parts = min((best, parts), (milliseconds(piped), count))
        yield {"case": case, "range_ms": length, "parts": parts, "forward_ms": round(best, 2),
               "relative": round(best / whole, 3)}  # fmt: skip


def main() -> int:
    for case in CASES:
        for row in rows(case):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
