"""`meshdsl verify`: compares predicted collectives and memory with StableHLO and with the TPU compiler's result.

Of a JAX function that contains `jax.shard_map`, it says whether the function computes what one device computes.
"""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import UsageError
from .common import FAILURE, ILLEGAL_LAYOUT, OK, command, options_of, print_json, section, workload_options
from .costing import DEFAULT_MACHINE, needs_machine, step_of, step_options, step_title
from .plans import knob_options, workload_and_plan


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "check predicted collectives against StableHLO and the TPU compiler"
    parser = command(commands, "verify", run, about)
    workload_options(parser)
    step_options(parser)
    knob_options(parser)
    option = options_of(parser)
    option(
        "--machine NAME",
        f"machine for --weight-update auto, --overlap and --collective-steps (default {DEFAULT_MACHINE})",
    )
    option(
        "--aot TOPOLOGY",
        "also compile for a topology such as tpu:v5e:4x4, without the hardware (needs the extra `aot`)",
    )
    option("--fast", "with --aot: reduce the compiler's effort; several times faster")
    group = section(parser, "a JAX function with jax.shard_map, file.py:step")
    option = options_of(group)
    option("--args NAME", "its arguments: a tuple in the file (default step_args)")
    option("--reference NAME", "a function in the file that one device computes")
    option("--static", "follow shardings, without computing: for real sizes")
    option("--devices N", "CPU devices for the meshes of the file", int)


def run(options: argparse.Namespace) -> int:
    """Lower the step and compare; returns 1 if they differ, and 3 if the compiler reports that it does not fit.

    For a JAX function, 1 if it does not compute what one device computes, or if that is undecided.
    """
    if options.devices is not None:
        import meshdsl as md

        md.host_devices(options.devices)
    if (found := _function(options)) is not None:
        return _verify_function(options, *found)
    return _verify_step(options)


def _verify_step(options: argparse.Namespace) -> int:
    """Compare the step of a workload with StableHLO, and with the TPU compiler's."""
    from ...errors.no_effect import no_effect
    from ..compilers.verify import verify

    own = [f"--{name}" for name in ("args", "reference", "static", "devices") if getattr(options, name)]
    if own:
        raise UsageError(f"{own[0]} has no effect on a workload; it is for a JAX function with jax.shard_map")
    if options.fast and not options.aot:
        raise UsageError("--fast has no effect without --aot")
    if options.aot:
        import jax

        jax.config.update("jax_platforms", "cpu")  # the compiler runs in its own process; no TPU is needed
    workload, plan = workload_and_plan(options)
    if options.machine and not needs_machine(options, plan):
        others = "--weight-update auto, --overlap or --collective-steps"
        why = "the collectives are the same on every machine"
        no_effect(UsageError(f"--machine has no effect without {others}: {why}"))
    compiled, arguments = step_of(options, workload, plan)
    program = compiled.program(*arguments)
    comparison = verify(compiled.lower(*arguments).as_text(), program)
    built = _compile(options, compiled, arguments) if options.aot else None
    if options.json:
        aot = {} if built is None else {"aot": {**built.to_dict(), "predicted": _memory(compiled, arguments).to_dict()}}
        print_json({"command": "verify", "title": step_title(options, workload), **comparison.to_dict(), **aot})
    else:
        print(f"{step_title(options, workload)} on {plan.mesh}: {comparison}")
        if built is not None:
            print("\n" + _aot_text(built, _memory(compiled, arguments)))
    if built is not None and not built.fits:
        return ILLEGAL_LAYOUT
    return OK if comparison.equal else FAILURE


def _function(options: argparse.Namespace) -> tuple[Any, Any] | None:
    """The module and the function that are named, if it is a function and no workload."""
    from ...train.load import module_of

    file, _, name = options.workload.rpartition(":")
    if not file.endswith(".py"):
        return None
    module = module_of(file)
    f = getattr(module, name, None)
    return (module, f) if callable(f) and not hasattr(f, "workload") else None


def _verify_function(options: argparse.Namespace, module: Any, f: Any) -> int:
    """Check a JAX function of a file."""
    import meshdsl as md

    given = [f"--{name}" for name in ("layout", "mesh", "aot", "fast") if getattr(options, name)]
    if given:
        raise UsageError(f"{given[0]} has no effect on a JAX function, which has its mesh and its specs in it")
    file, _, name = options.workload.rpartition(":")
    names = [options.args] if options.args else [f"{name}_args", "args"]
    args = next((getattr(module, each) for each in names if hasattr(module, each)), None)
    if not isinstance(args, tuple):
        raise UsageError(
            f"{file} has no tuple {' or '.join(names)} with the arguments of {name}\n"
            f"  write {names[0]} = (params, batch), of arrays or jax.ShapeDtypeStruct"
        )
    reference = None if options.reference is None else getattr(module, options.reference, None)
    if options.reference is not None and reference is None:
        raise UsageError(f"{file} has no function {options.reference!r}; --reference names one")
    report = md.verify_jax(f, *args, reference=reference, simulate=not options.static, machine=options.machine)
    if options.json:
        print_json({"command": "verify", "title": options.workload, **report.to_dict()})
    else:
        print(f"{options.workload} is {report}")
    return OK if report.ok else FAILURE


def _compile(options: argparse.Namespace, compiled: Any, arguments: Any) -> Any:
    """Compile the step for the topology of --aot."""
    from ..compilers.aot import compile_for

    if not options.aot.startswith("tpu:") or not options.aot.removeprefix("tpu:"):
        raise UsageError(f"write a topology as tpu:NAME:SIZES, for example tpu:v5e:4x4; got {options.aot!r}")
    program, donated = compiled.program(*arguments), compiled.donated(*arguments)
    return compile_for(options.aot, program, donated=donated, effort="O1" if options.fast else "")


def _memory(compiled: Any, arguments: Any) -> Any:
    from ...cost.memory import memory
    from ..compilers.aot import tpu_program

    return memory(tpu_program(compiled.program(*arguments)), donated=compiled.donated(*arguments))


def _aot_text(built: Any, memory: Any) -> str:
    """The predicted memory and collectives beside the compiler's, as text."""
    from ...errors.tables import table
    from ...errors.units import percent, show_bytes

    lines = [str(built)]
    if built.memory is None:
        lines += [
            f"  predicted {show_bytes(memory.peak)} at the peak",
            f"  the compiler: {built.message.strip()[:500]}",
        ]
        return "\n".join(lines)
    sizes = memory.by_category
    predicted_arguments = sum(sizes[name] for name in ("parameters", "optimizer state", "inputs"))
    rows = [
        [name, show_bytes(predicted), show_bytes(compiled), percent(predicted - compiled, compiled)]
        for name, predicted, compiled in (
            ("peak", memory.peak, built.memory.peak),
            ("arguments", predicted_arguments, built.memory.argument),
        )
    ]
    lines.append(table(["on one device", "predicted", "compiled", "difference"], rows, "<>>>"))
    changed = [change for change in built.changes if change.words]
    unchanged = len(built.changes) - len(changed)
    total = len(built.changes)
    lines += [
        "",
        f"collectives: {unchanged} of {total} kinds as predicted, {len(changed)} changed by the compiler",
    ]
    return "\n".join([*lines, *(f"  {change}" for change in changed)])
