"""`meshdsl verify`: what is costed beside what is emitted, and beside what the TPU's own compiler makes of it."""

from __future__ import annotations

import argparse
from typing import Any

from .common import FAILURE, ILLEGAL_LAYOUT, OK, command, placed, say, workload_options
from .costing import DEFAULT_MACHINE, step_of, step_options, step_title

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    about = "compare what is costed with the StableHLO that JAX lowers, and with what a TPU's compiler makes of it"
    parser = command(commands, "verify", run, about)
    workload_options(parser)
    step_options(parser)
    parser.add_argument(
        "--machine", metavar="NAME", help=f"what --weight-update auto decides on (default {DEFAULT_MACHINE})"
    )
    parser.add_argument(
        "--aot",
        metavar="TOPOLOGY",
        help="compile it as well, without the hardware, for example for tpu:v5e:4x4 (needs the extra `aot`)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="with --aot: less of the compiler's effort, several times faster"
    )


def run(options: argparse.Namespace) -> int:
    """Lower the step and compare; 1 where they differ, 3 where the compiler says that it does not fit."""
    from ..compilers.verify import verify
    from ..train import UsageError

    if options.fast and not options.aot:
        raise UsageError("--fast goes with --aot, and there is no --aot")
    if options.machine and options.weight_update != "auto":
        raise UsageError(
            "--machine goes with --weight-update auto: what is sent is the same on every machine otherwise"
        )
    if options.aot:
        import jax

        jax.config.update("jax_platforms", "cpu")  # the compiler has a process of its own, and no TPU is asked for
    workload, mesh, layout = placed(options)
    compiled, arguments = step_of(options, workload, mesh, layout)
    program = compiled.program(*arguments)
    found = verify(compiled.lower(*arguments).as_text(), program)
    made = _made(options, compiled, arguments) if options.aot else None
    if options.json:
        beside = (
            {} if made is None else {"aot": {**made.to_dict(), "predicted": _memory(compiled, arguments).to_dict()}}
        )
        say({"command": "verify", "title": step_title(options, workload), **found.to_dict(), **beside})
    else:
        print(f"{step_title(options, workload)} on {mesh}: {found}")
        if made is not None:
            print("\n" + _beside(made, _memory(compiled, arguments)))
    if made is not None and not made.fits:
        return ILLEGAL_LAYOUT
    return OK if found.equal else FAILURE


def _made(options: argparse.Namespace, compiled: Any, arguments: Any) -> Any:
    """The step compiled for the topology."""
    from ..compilers.aot import compile_for
    from ..train import UsageError

    if not options.aot.startswith("tpu:") or not options.aot.removeprefix("tpu:"):
        raise UsageError(f"a topology is written tpu:NAME:SIZES, for example tpu:v5e:4x4; got {options.aot!r}")
    program, donated = compiled.program(*arguments), compiled.donated(*arguments)
    return compile_for(options.aot, program, donated=donated, effort="O1" if options.fast else "")


def _memory(compiled: Any, arguments: Any) -> Any:
    from ..cost.memory import memory

    return memory(compiled.program(*arguments), donated=compiled.donated(*arguments))


def _beside(made: Any, memory: Any) -> str:
    """The compiler's memory and collectives beside the program's own."""
    from ..report.tables import table
    from ..units import percent, show_bytes

    lines = [str(made)]
    if made.memory is None:
        lines += [f"  predicted {show_bytes(memory.peak)} at the peak", f"  the compiler: {made.message.strip()[:500]}"]
        return "\n".join(lines)
    held = memory.by_category
    ours = sum(held[name] for name in ("parameters", "optimizer state", "inputs"))
    rows = [
        [name, show_bytes(predicted), show_bytes(compiled), percent(predicted - compiled, compiled)]
        for name, predicted, compiled in (
            ("peak", memory.peak, made.memory.peak),
            ("arguments", ours, made.memory.argument),
        )
    ]
    lines.append(table(["on one device", "predicted", "compiled", "difference"], rows, "<>>>"))
    changed = [change for change in made.changes if change.words]
    kept = len(made.changes) - len(changed)
    total = len(made.changes)
    lines += [
        "",
        f"collectives: {kept} of {total} kinds as the program states them, {len(changed)} changed by the compiler",
    ]
    return "\n".join([*lines, *(f"  {change}" for change in changed)])
