"""Options and functions shared by the commands that estimate cost: machine, memory limit, step and report."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import meshdsl as md

from ...errors import ShapeError, UsageError
from ...errors.values import AboveZero
from .common import ILLEGAL_LAYOUT, OK, options_of, out_file, section, typed

DEFAULT_MACHINE = "tpu-v5e"
_AMOUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_UNITS = {"": 1.0, "b": 1.0}
_UNITS |= {f"{letter}{b}": 1e3**n for n, letter in enumerate("kmgt", 1) for b in ("b", "")}
_UNITS |= {f"{letter}i{b}": 1024.0**n for n, letter in enumerate("kmgt", 1) for b in ("b", "")}


def machine_options(parser: argparse.ArgumentParser, *, place: bool = True) -> None:
    """Add the options for the machine, its memory, the placement of mesh axes unless a search places them, the step."""
    group = section(parser, "machine and memory")
    option = options_of(group)
    option("--machine NAME", f"the name of a machine, or a machine file ending in .toml (default {DEFAULT_MACHINE})")
    option(
        "--profile FILE",
        "measured times of kernels, from `meshdsl doctor --profile`; preferred to the machine's figures",
    )
    option("--memory SIZE", "memory limit per device, such as 16GB (default: the machine's)", size)
    if place:
        option(
            "--place AXIS=WHERE",
            "hardware axes for a mesh axis, such as cols=x or rows=node:2,gpu:4; repeat for every mesh axis "
            "(default: the last mesh axis innermost)",
            action="append",
            default=[],
        )
    step_options(parser)


def cost_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a report: those of the machine, for rates and money, and for an HTML page."""
    machine_options(parser)
    option = options_of(parser)
    option("--tokens N", "also show the time to N tokens or samples, such as 300e9 or 300G", amount)
    option("--price MONEY", "price of one device for an hour, for the money to --tokens", typed(AboveZero))
    html_option(parser)


def html_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for an HTML page."""
    option = options_of(parser)
    option("--html FILE", "also write a self-contained HTML page with charts", out_file)


def amount(text: str) -> float:
    """Parse an option as a number above 0: 300e9, 300G, 1.4T."""
    return _scaled(text, _AMOUNTS, "a number as 300e9, 300G or 1.4T")


def _scaled(text: str, units: Mapping[str, float], form: str) -> float:
    """A finite number above 0, with one of these units."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    value = float(match[1]) * units[match[2]] if match and match[2] in units else 0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"write {form}, above 0; got {text[:60]!r}")
    return value


def step_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the evaluation step."""
    option = options_of(parser)
    option("--forward", "use the evaluation step instead of the training step")


def size(text: str) -> float:
    """Parse an option as a number of bytes: 16GB, 16.9e9, 512MiB."""
    value = _scaled(text, _UNITS, "a memory size as 16GB, 512MiB or 16e9")
    if text.strip().isdigit() and value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} has no unit: write {text.strip()}GB, 512MiB or 16e9")
    return value


def needs_machine(options: argparse.Namespace, plan: Any) -> bool:
    """True if the step depends on the machine: by its plan, or as `--collective-steps auto` asks for it."""
    return plan.needs_machine or getattr(options, "collective_steps", None) == "auto"


def step_of(options: argparse.Namespace, workload: Any, plan: Any) -> tuple[Any, Any]:
    """The compiled step under a plan, or with --forward the evaluation step, and the specs of its arguments.

    Raises `UsageError` for a workload without inputs, and for settings that give a dim an illegal size.
    """
    from ...train import stages

    settings = " ".join(options.settings) or "its config"
    machine = machine_of(options) if needs_machine(options, plan) else None
    try:
        if not workload.inputs(workload.config):
            raise UsageError(
                f"the workload {workload.name} has no inputs, so there is no step to cost\n"
                "  its inputs(config) returns an empty dict; return the spec of every tensor of a batch"
            )
        compiled, arguments = stages(workload, plan, forward=options.forward, machine=machine)
    except (ShapeError, ArithmeticError) as error:
        if not options.settings:
            raise
        raise UsageError(f"{workload.name} does not work with {settings}: {error}") from None
    empty = [f"{name} {spec}" for name, spec in _leaves(arguments) if any(dim.size == 0 for dim in spec.dims)]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise UsageError(
            f"{workload.name} has tensors of size 0: {', '.join(empty[:3])}{more}\n"
            "  every size must be at least 1; check the settings"
        )
    return compiled, arguments


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "dims"))
    return [(jax.tree_util.keystr(path[1:], simple=True, separator="/"), leaf) for path, leaf in flat]


def machine_of(options: argparse.Namespace) -> Any:
    """The machine named by the options, with their profile."""
    return machine_named(options.machine, getattr(options, "profile", None))


def machine_named(name: str | None, profile: str | None = None) -> Any:
    """A machine (default: `DEFAULT_MACHINE`); raises `UsageError` if it is unknown, or its file malformed."""
    from ...cost.machine import MachineError, machine

    try:
        return machine(DEFAULT_MACHINE if name is None else name, profile=profile)
    except MachineError as error:
        raise UsageError(str(error)) from None


def assignment_of(options: argparse.Namespace) -> dict[str, list[str]] | None:
    """The hardware axes of each mesh axis, from --place; None for the default."""
    assignment: dict[str, list[str]] = {}
    for word in options.place:
        axis, equals, hardware = word.partition("=")
        if not equals or not axis or not hardware:
            raise UsageError(f"write --place as axis=hardware, such as cols=x or rows=node:2,gpu:4; got {word!r}")
        if axis in assignment:
            raise UsageError(f"--place is given twice for the mesh axis {axis!r}")
        assignment[axis] = hardware.split(",")
    return assignment or None


def report_of(options: argparse.Namespace, workload: Any, compiled: Any, arguments: Any, rates: bool = True) -> Any:
    """The cost report of a compiled step of a workload under the options, with its rates, and time and money."""
    from ...cost.machine import MachineError

    try:
        report = compiled.cost(
            *arguments, machine=machine_of(options), limit=options.memory, assignment=assignment_of(options)
        )
    except MachineError as error:  # the machine's file has no peak for a dtype
        raise UsageError(str(error)) from None
    report = dataclasses.replace(report, title=step_title(options, workload))
    if not rates:
        return report
    if options.price and not options.tokens:
        raise UsageError("--price has no effect without --tokens, the amount to pay for")
    report = dataclasses.replace(report, work=work(workload, compiled, arguments, options.forward))
    if options.tokens is None or report.rates is None:
        return report
    return dataclasses.replace(report, budget=report.rates.budget(options.tokens, options.price))


def work(workload: Any, compiled: Any, arguments: Any, forward: bool = False) -> Any:
    """The work of one step of the workload: the products of its graph without rematerialisation."""
    from ...cost.report.rates import work_of
    from ...train import stages

    has_remat = hasattr(workload.config, "remat") and (workload.config.remat or compiled.plan.remat != "model")
    plain = not has_remat and compiled.plan.microbatches == 1
    if not plain and not forward:
        plan = md.Plan("all:1", remat="none" if has_remat else "model")
        compiled, arguments = stages(workload, plan)
    return work_of(compiled.graph(*arguments), workload.inputs(workload.config))


def report_for(options: argparse.Namespace, workload: Any, plan: Any) -> tuple[Any, Any]:
    """The compiled step of a workload under a plan, and its cost report."""
    compiled, arguments = step_of(options, workload, plan)
    return compiled, report_of(options, workload, compiled, arguments)


def step_title(options: argparse.Namespace, workload: Any) -> str:
    """A report title, such as "lm, training step"."""
    return f"{workload.name}, {'evaluation' if options.forward else 'training'} step"


def exit_code(*reports: Any) -> int:
    """0, or 3 if a layout does not fit in memory; prints the reasons on stderr."""
    problems = [problem for report in reports for problem in report.problems()]
    for problem in problems:
        print(f"over memory: {problem}", file=sys.stderr)
    return ILLEGAL_LAYOUT if problems else OK


def pictures_of(reports: Mapping[str, Any]) -> dict[str, str]:
    """The picture of each report's program, for the HTML page."""
    from ..pictures.programs import MOST, program_picture

    return {name: program_picture(report.program, MOST).svg for name, report in reports.items()}
