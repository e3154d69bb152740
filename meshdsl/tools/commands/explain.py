"""`meshdsl explain`: the program of a step, the reason for each collective, and the effect of layout changes."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import UsageError
from .common import OK, answer, command, integer, options_of, print_json, workload_options
from .costing import exit_code, machine_options, needs_machine, report_of, step_of
from .plans import knob_options, workload_and_plan


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    parser = command(
        commands, "explain", run, "print a step as a program; explain why a collective exists, and what would remove it"
    )
    workload_options(parser)
    machine_options(parser)
    knob_options(parser)
    view = parser.add_mutually_exclusive_group()
    option = options_of(view)
    option("--program", "print only the program")
    option("--graph", "print only the graph, before any layout is applied")
    option(
        "--collective WHICH",
        "explain one collective, given by its number in `analyze` or its source line, such as model.py:77",
        _nonempty,
    )
    option("--dim NAME", "explain the cost of one dim, and of mapping it to other axes", _nonempty)
    option("--window N", "explain one window of an overlap plan, by its number in `analyze`", integer)
    option("--moves", "rank every change that maps one dim to other axes")


def _nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def run(options: argparse.Namespace) -> int:
    """Print the requested view; returns 3 if the layout does not fit in memory."""
    workload, plan = workload_and_plan(options)
    _check(options, plan)
    compiled, arguments = step_of(options, workload, plan)
    if options.collective or options.dim or options.moves:
        return _explain(options, workload, compiled, arguments)
    from ...cost.report import explain

    if options.graph:
        text = str(compiled.graph(*arguments))
        answer(options, {"command": "explain", "graph": text}, text)
        return OK
    program = compiled.program(*arguments)
    if options.window is not None:
        return _window(options, compiled.overlap)
    if options.json:
        extra = {} if options.program else {"collectives": explain.collective_totals(program)}
        print_json({"command": "explain", "program": str(program), **extra})
        return OK
    print(program)
    if not options.program:
        print(f"\ncollectives of one step, per device, loop trips counted ({plan.mesh})\n")
        print(explain.totals_table(program))
        for schedule in compiled.pipelines(*arguments):
            print("\nmicro-batches by tick: F forward, B backward; a stage without one computes nothing of use\n")
            print(schedule)
    return OK


def _window(options: argparse.Namespace, plan: Any) -> int:
    """Print one window of the overlap plan: the collective, and the products that run at the same time."""
    if not 0 <= options.window < len(plan.windows):
        raise UsageError(
            f"no window {options.window}: the plan {plan.chosen!r} has {len(plan.windows)} windows, numbered from 0\n"
            "  `meshdsl analyze` with the same options lists them"
        )
    window = plan.windows[options.window]
    lines = [str(window), *(f"  {op}  # {where}" for op, where in window.inside)]
    answer(options, {"command": "explain", "window": window.to_dict()}, "\n".join(lines))
    return OK


def _check(options: argparse.Namespace, plan: Any) -> None:
    """Raises `UsageError` for options that have no effect on the requested view."""
    if options.collective or options.dim or options.moves:
        return
    if options.window is not None and plan.overlap.mode == "none":
        raise UsageError("--window needs an overlap plan; choose one with --overlap, for example --overlap auto")
    needed = needs_machine(options, plan) and not (options.graph and not plan.machine)
    machine = None if needed else options.machine
    unused = {"--machine": machine, "--memory": options.memory, "--place": options.place}
    reason = "the program is the same on every machine; use them with --collective, --dim or --moves"
    if options.graph:
        update = options.weight_update not in (None, "replicated")
        unused |= {"--layout": options.layout, "--mesh": options.mesh, "--weight-update": update}
        reason = "--graph shows the step before a layout is applied"
    if useless := [name for name, value in unused.items() if value not in (None, [], False)]:
        raise UsageError(f"{', '.join(useless)} has no effect here: {reason}")


def _explain(options: argparse.Namespace, workload: Any, compiled: Any, arguments: Any) -> int:
    """Explain one collective, one dim or all dims, with the cost of every layout that differs in one dim."""
    from ...cost.report import explain
    from ...train import Progress

    report = report_of(options, workload, compiled, arguments, rates=False)
    numbers = explain.find(report, options.collective) if options.collective else []
    changed_dims = [explain.check_dim(report, options.dim)] if options.dim else explain.dims_behind(report, numbers)

    def recost(layout: Any) -> Any:
        return report_of(options, workload, compiled.under(compiled.mesh, layout), arguments, rates=False)

    with Progress(0, "layouts") as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done)

        edits = explain.layout_edits(report, recost, changed_dims or None, progress)
    if options.json:
        print_json({"command": "explain", **explain.to_dict(report, numbers, edits)})
        return exit_code(report)
    if options.dim:
        texts = [explain.dim_text(report, options.dim, edits)]
    elif numbers:
        texts = [explain.collective_text(report, number, edits) for number in numbers]
    else:
        texts = [explain.edits_text(edits, top=40)]
    print("\n\n".join([explain.binding_text(report), *texts]))
    return exit_code(report)
