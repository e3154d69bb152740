"""`meshdsl explain`: the program of a step; why it sends what it sends; what one change of the layout would do."""

from __future__ import annotations

import argparse
from typing import Any

from .common import OK, command, placed, say, workload_options
from .costing import cost_options, exit_code, overlap_option, report_of, step_of, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(
        commands, "explain", run, "print a step as a program; say why a collective is there, and what would remove it"
    )
    workload_options(parser)
    cost_options(parser, html=False)
    overlap_option(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--program", action="store_true", help="the program and nothing else")
    what.add_argument("--graph", action="store_true", help="the graph before any layout, and nothing else")
    what.add_argument(
        "--collective",
        type=_named,
        metavar="WHICH",
        help="one collective, by its number in `analyze` or by the line that asks for it, such as model.py:77",
    )
    what.add_argument(
        "--dim", type=_named, metavar="NAME", help="one dim: what it costs, and every other place to map it to"
    )
    what.add_argument(
        "--window", type=int, metavar="N", help="one window of an overlap plan, by its number in `analyze`"
    )
    what.add_argument("--moves", action="store_true", help="every change of where one dim is mapped, ranked")


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a name is needed, got ''")
    return text


def run(options: argparse.Namespace) -> int:
    """Print what was asked for."""
    _check(options)
    workload, mesh, layout = placed(options)
    compiled, arguments = step_of(options, workload, mesh, layout)
    if options.collective or options.dim or options.moves:
        return _why(options, workload, compiled, arguments)
    from ..train import report

    if options.graph:
        text = str(compiled.graph(*arguments))
        if options.json:
            say({"command": "explain", "graph": text})
        else:
            print(text)
        return OK
    program = compiled.program(*arguments)
    if options.window is not None:
        return _window(options, compiled.overlap)
    if options.json:
        beside = {} if options.program else {"collectives": report.collectives(program)}
        say({"command": "explain", "program": str(program), **beside})
        return OK
    print(program)
    if not options.program:
        print(f"\ncollectives of one step, per device, loop trips counted ({mesh})\n")
        print(report.collective_table(program))
    return OK


def _window(options: argparse.Namespace, plan: Any) -> int:
    """One window of the plan: the collective, and the products that run meanwhile."""
    from ..train import UsageError

    if not 0 <= options.window < len(plan.windows):
        raise UsageError(
            f"there is no window {options.window}: the plan {plan.chosen!r} has {len(plan.windows)}, numbered from 0\n"
            "  `meshdsl analyze` with the same options lists them"
        )
    window = plan.windows[options.window]
    if options.json:
        say({"command": "explain", "window": window.to_dict()})
    else:
        print(window, *(f"  {op}  # {where}" for op, where in window.inside), sep="\n")
    return OK


def _check(options: argparse.Namespace) -> None:
    """An option that does nothing for what is asked is a mistake."""
    from ..train import UsageError

    if options.collective or options.dim or options.moves:
        return
    if options.window is not None and options.overlap == "none":
        raise UsageError(
            "--window is a window of an overlap plan; choose one with --overlap, for example --overlap auto"
        )
    decides = options.weight_update == "auto" or options.overlap != "none"
    machine = options.machine if not decides or options.graph else None
    idle = {"--machine": machine, "--memory": options.memory, "--place": options.place}
    why = "a program is the same on every machine; they go with --collective, --dim or --moves"
    if options.graph:
        update = options.weight_update != "replicated"
        idle |= {"--layout": options.layout, "--mesh": options.mesh, "--weight-update": update}
        why = "--graph is the step before any of it"
    if named := [name for name, value in idle.items() if value not in (None, [], False)]:
        raise UsageError(f"{', '.join(named)} would change nothing here: {why}")


def _why(options: argparse.Namespace, workload: Any, compiled: Any, arguments: Any) -> int:
    """One collective, one dim, or all dims: each with the layouts that are one change away."""
    from ..cost.moves import moves, moves_text
    from ..report import explain
    from ..train import Progress

    title = step_title(options, workload)
    report = report_of(options, compiled, arguments, title)
    numbers = explain.find(report, options.collective) if options.collective else []
    among = [explain.check_dim(report, options.dim)] if options.dim else explain.dims_behind(report, numbers)

    def recost(layout: Any) -> Any:
        return report_of(options, compiled.under(compiled.mesh, layout), arguments, title)

    with Progress(0, "layouts") as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done)

        found = moves(report, recost, among or None, progress)
    if options.json:
        say({"command": "explain", **explain.to_dict(report, numbers, found)})
        return exit_code(report)
    if options.dim:
        texts = [explain.dim_text(report, options.dim, found)]
    elif numbers:
        texts = [explain.collective_text(report, number, found) for number in numbers]
    else:
        texts = [moves_text(found, top=40)]
    print("\n\n".join([explain.binding_text(report), *texts]))
    return exit_code(report)
