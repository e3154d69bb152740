"""What the commands about cost share: the machine, the memory limit, the step, and the report of each layout."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from ..errors import ShapeError
from .common import ILLEGAL_LAYOUT, OK, out_file

__all__ = [
    "DEFAULT_MACHINE",
    "assignment_of",
    "cost_options",
    "exit_code",
    "machine_of",
    "measured",
    "overlap_option",
    "report_of",
    "size",
    "step_of",
    "step_options",
    "step_title",
]

DEFAULT_MACHINE = "tpu-v5e"
_UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def cost_options(parser: argparse.ArgumentParser, *, html: bool = True) -> None:
    """The machine, its memory, and which step."""
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help=f"a machine's name, or a machine file that ends in .toml (default {DEFAULT_MACHINE})",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="what one device may hold, such as 16GB (default: what it has)"
    )
    parser.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="AXIS=WHERE",
        help="the hardware axes of one mesh axis, such as cols=x or rows=node:2,gpu:4; give every axis (default: the "
        "last mesh axis innermost)",
    )
    step_options(parser)
    if html:
        parser.add_argument(
            "--html", type=out_file, metavar="FILE", help="write one self-contained page with charts as well"
        )


def step_options(parser: argparse.ArgumentParser) -> None:
    """Which step: training, and how it updates, or evaluation."""
    parser.add_argument(
        "--weight-update",
        choices=["replicated", "sharded", "auto"],
        default="replicated",
        help="how the training step updates weights (default replicated)",
    )
    parser.set_defaults(overlap="none")  # `overlap_option` lets the user choose
    parser.add_argument("--forward", action="store_true", help="the evaluation step instead of the training step")


def overlap_option(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """How the step overlaps communication with computation."""
    parser.add_argument(
        "--overlap",
        choices=["none", "auto", "dw", "lancet", "list", "halves"],
        help="how communication overlaps with computation (default none)" + "; give it several times" * several,
        **({"action": "append", "default": []} if several else {"default": "none"}),
    )


def size(text: str) -> float:
    """Bytes of an option: 16GB, 16.9e9, 512MiB."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2].removesuffix("b") + "b" * bool(match[2]) not in _UNITS or not float(match[1]):
        raise argparse.ArgumentTypeError(f"a memory size is written 16GB, 512MiB or 16e9, above 0; got {text!r}")
    return float(match[1]) * _UNITS[match[2].removesuffix("b") + "b" * bool(match[2])]


def step_of(options: argparse.Namespace, workload: Any, mesh: Any, layout: Any) -> tuple[Any, Any]:
    """The compiled step that the options ask for, and the types of its arguments.

    Raises `UsageError` for a workload without inputs and for settings that no tensor can have.
    """
    import meshdsl as md

    from ..train import UsageError, stages

    if options.forward and options.weight_update != "replicated":
        raise UsageError(
            f"--forward is a step without an update, so --weight-update {options.weight_update} says nothing"
        )
    asked = " ".join(options.settings) or "its config"
    try:
        if not workload.inputs(workload.config):
            raise UsageError(
                f"the workload {workload.name} has no inputs, so there is no step to cost\n"
                "  its inputs(config) returns an empty dict; it gives the type of every tensor of a batch"
            )
        compiled, arguments = stages(workload, mesh, layout, forward=options.forward)
    except (ShapeError, ArithmeticError) as error:
        if not options.settings and options.batch is None and options.length is None:
            raise
        raise UsageError(f"{workload.name} cannot be made with {asked}: {error}") from None
    empty = [f"{name} {spec}" for name, spec in _leaves(arguments) if any(dim.size == 0 for dim in spec.shape)]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise UsageError(
            f"{workload.name} has tensors of size 0: {', '.join(empty[:3])}{more}\n"
            "  every size is at least 1; look at the settings"
        )
    update, overlap = options.weight_update, options.overlap
    if update != "replicated" or overlap != "none":
        machine = machine_of(options) if update == "auto" or overlap != "none" else None  # it decides
        compiled = md.compile(
            compiled.function,
            mesh,
            layout,
            donate=compiled.donate,
            weight_update=update,
            overlap=overlap,
            machine=machine,
        )
    return compiled, arguments


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return [(jax.tree_util.keystr(path[1:], simple=True, separator="/"), leaf) for path, leaf in flat]


def machine_of(options: argparse.Namespace) -> Any:
    """The machine that the options name; an unknown one and a malformed file are mistakes of usage."""
    from ..cost.machine import MachineError, machine
    from ..train import UsageError

    try:
        return machine(DEFAULT_MACHINE if options.machine is None else options.machine)
    except MachineError as error:
        raise UsageError(str(error)) from None


def assignment_of(options: argparse.Namespace) -> dict[str, list[str]] | None:
    """Hardware axes by mesh axis, or None for the default."""
    from ..train import UsageError

    found: dict[str, list[str]] = {}
    for word in options.place:
        axis, equals, where = word.partition("=")
        if not equals or not axis or not where:
            raise UsageError(f"a place is written axis=hardware, such as cols=x or rows=node:2,gpu:4; got {word!r}")
        if axis in found:
            raise UsageError(f"the mesh axis {axis!r} is placed twice")
        found[axis] = where.split(",")
    return found or None


def report_of(options: argparse.Namespace, compiled: Any, arguments: Any, title: str) -> Any:
    """The report of one layout under the options."""
    import dataclasses

    from ..cost.machine import MachineError
    from ..train import UsageError

    try:
        found = compiled.cost(
            *arguments, machine=machine_of(options), limit=options.memory, assignment=assignment_of(options)
        )
    except MachineError as error:  # a dtype that the machine's file gives no peak for
        raise UsageError(str(error)) from None
    return dataclasses.replace(found, title=title)


def measured(options: argparse.Namespace, workload: Any, mesh: Any, layout: Any) -> tuple[Any, Any]:
    """The compiled step of a workload under one layout, and its report."""
    compiled, arguments = step_of(options, workload, mesh, layout)
    return compiled, report_of(options, compiled, arguments, step_title(options, workload))


def step_title(options: argparse.Namespace, workload: Any) -> str:
    """What is costed, in words."""
    return f"{workload.name}, {'evaluation' if options.forward else 'training'} step"


def exit_code(*reports: Any) -> int:
    """0, or 3 with every reason on stderr where a layout does not fit."""
    problems = [problem for report in reports for problem in report.problems()]
    for problem in problems:
        print(f"over memory: {problem}", file=sys.stderr)
    return ILLEGAL_LAYOUT if problems else OK
