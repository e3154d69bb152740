"""`meshdsl train`: a workload on text that every Python carries, or on its own data.

With `--checkpoints` a run can be stopped at any time (SIGTERM: 75, SIGINT: 130) or killed, and the same command goes
on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import MeshdslError, raised
from . import devices
from .common import ILLEGAL_LAYOUT, OK, command, count, positive, say, workload_options, write
from .records import Shown, sinks

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "train", run, "train a workload, on its own data or on text that every Python carries")
    workload_options(parser, more=", or of the run, such as train.max_skips=3")
    option = parser.add_argument
    option("--config", type=Path, metavar="FILE", help="a TOML file of the run; what is typed wins over it")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration as TOML, and end"
    )
    instead.add_argument(
        "--dry-run", action="store_true", help="check the options, trace, partition and cost the step, and run nothing"
    )
    option(
        "--machine",
        metavar="NAME",
        help="what --dry-run costs the step on, and --weight-update auto decides for (default tpu-v5e)",
    )
    option(
        "--devices",
        type=positive,
        metavar="N",
        help="run on N CPU devices, of all processes together (default: accelerators if there are any, otherwise as "
        "many CPU devices as the mesh has)",
    )
    option("--steps", type=count, metavar="N", help="steps to take in all (default 100)")
    option("--seed", type=int, metavar="N", help="draws the parameters and the batches (default 0)")
    option(
        "--eval-every",
        type=count,
        metavar="N",
        help="evaluate on held-out data every N steps, and always after the last (default: only then)",
    )
    option("--eval-batches", type=count, metavar="N", help="batches of an evaluation; 0 for none (default 8)")
    option(
        "--weight-update",
        choices=["replicated", "sharded", "auto"],
        help="how the training step updates weights (default replicated)",
    )
    option(
        "--non-finite",
        choices=["stop", "skip"],
        help="what to do at a loss or gradient that is not finite: stop with 5 (default), or skip the step; "
        "train.max_skips in a row (default 10) stop with 5 too",
    )
    saving = parser.add_argument_group("checkpoints")
    option = saving.add_argument
    option("--checkpoints", metavar="DIR", help="save the run in this directory, and go on from what is there")
    option("--save-every", type=count, metavar="N", help="save every N steps, and after the last (default 100)")
    option("--keep", type=count, metavar="N", help="checkpoints that are kept, the newest ones (default 3)")
    option(
        "--resume",
        metavar="auto|never|PATH",
        help="go on from the newest sound checkpoint if there is one (default auto), from nothing, or from the "
        "directory of a step or of several",
    )
    shown = parser.add_argument_group("what is shown")
    option = shown.add_argument
    option(
        "--log-every",
        type=positive,
        metavar="N",
        help="print every Nth step (default: 20 lines in all; every step with --json)",
    )
    option("--metrics", type=Path, metavar="FILE", help="append every record to a file, as JSON lines")
    option("--tensorboard", type=Path, metavar="DIR", help="write event files (needs the extra `tensorboard`)")
    option("--profile", type=Path, metavar="DIR", help="trace five steps, from the third on, with JAX's profiler")
    several = parser.add_argument_group("several processes")
    option = several.add_argument
    option("--coordinator", metavar="HOST:PORT", help="where process 0 is reached; all processes get the same")
    option("--processes", type=positive, metavar="N", help="how many processes there are")
    option("--process", type=count, metavar="I", help="which of them this is, from 0")


def run(options: argparse.Namespace) -> int:
    """Train, saying one line for each record."""
    from ..train import Stop

    settings = _resolved(options)
    if options.print_config:
        if options.json:
            say({"command": "train", "event": "config", **settings.to_dict()})
        else:
            print(settings, end="")
        return OK
    mesh, layout = _placed(settings)
    devices.check(options, mesh)
    if options.dry_run:
        return _dry_run(options, settings, mesh, layout)
    devices.start(options, mesh)
    if settings.checkpoints.directory is None:
        return _train(options, settings, mesh, layout, None)
    with Stop() as stop:
        return _train(options, settings, mesh, layout, stop)


def _resolved(options: argparse.Namespace) -> Any:
    from ..train import resolve

    given = {
        "mesh": options.mesh,
        "layout": options.layout,
        "config.batch": options.batch,
        "config.length": options.length,
        "train.steps": options.steps,
        "train.seed": options.seed,
        "train.eval_every": options.eval_every,
        "train.eval_batches": options.eval_batches,
        "train.weight_update": options.weight_update,
        "train.machine": options.machine,
        "train.non_finite": options.non_finite,
        "checkpoints.directory": options.checkpoints,
        "checkpoints.save_every": options.save_every,
        "checkpoints.keep": options.keep,
        "checkpoints.resume": options.resume,
    }
    settings = resolve(options.workload, options.config, options.settings, given)
    _check_used(options, settings)
    return settings


def _check_used(options: argparse.Namespace, settings: Any) -> None:
    """Raises `UsageError` for an option that would change nothing."""
    from ..train import UsageError

    chosen, saving = settings.train, settings.checkpoints
    if options.machine and not options.dry_run and not options.print_config and chosen.weight_update != "auto":
        raise UsageError("--machine does nothing here; it is for --dry-run, and for --weight-update auto")
    typed = {setting.partition("=")[0] for setting in options.settings}
    asked = {
        "--save-every": options.save_every is not None,
        "--keep": options.keep is not None,
        "--resume": options.resume is not None or saving.resume not in ("auto", "never"),
    }
    if saving.directory is None and any(asked.values()):
        raise UsageError(
            f"{' '.join(name for name in asked if asked[name])} does nothing without --checkpoints DIR\n"
            "  that is where the run saves itself, also when it goes on from a step of another run"
        )
    if options.eval_every and not chosen.eval_batches:
        raise UsageError("--eval-every does nothing with no batches to evaluate on; give --eval-batches at least 1")
    if "train.max_skips" in typed and chosen.non_finite != "skip":
        raise UsageError("train.max_skips does nothing with --non-finite stop; it counts the steps that skip skips")


def _placed(settings: Any) -> tuple[Any, Any]:
    from ..train import place

    return place(settings.workload, settings.layout, settings.mesh)


@contextlib.contextmanager
def _building(settings: Any) -> Iterator[None]:
    """The workload's own functions run here: what they cannot do with the configuration is said with their line."""
    try:
        yield
    except MeshdslError:
        raise
    except Exception as error:  # a workload's file is any program
        line = raised(error)
        if line is None:  # no line of the workload's led there, so it is a fault of meshdsl
            raise
        at = f"\n  at {line}  {line.source()}"
        problem = str(error).splitlines()[0] if str(error) else "no message"
        raise MeshdslError(
            f"{settings.workload.name} does not run with this configuration: {type(error).__name__}: {problem}{at}"
        ) from error


def _dry_run(options: argparse.Namespace, settings: Any, mesh: Any, layout: Any) -> int:
    """What the step is and costs; 3 when it does not fit the machine's memory."""
    from ..cost.machine import MachineError, machine
    from ..train import UsageError, stages

    try:
        on = machine(settings.train.machine or "tpu-v5e")
    except MachineError as error:
        raise UsageError(str(error)) from None
    with _building(settings):
        chosen = settings.train
        compiled, types = stages(
            settings.workload, mesh, layout, weight_update=chosen.weight_update, machine=chosen.machine, guard=True
        )
        cost = compiled.cost(*types, machine=on)
    if options.json:
        update = compiled.weight_update.to_dict()
        say({"command": "train", "event": "dry-run", "cost": cost.to_dict(), "weight_update": update})
    else:
        print(f"{cost}\n\n{compiled.weight_update}")
    return OK if cost.fits else ILLEGAL_LAYOUT


def _train(options: argparse.Namespace, settings: Any, mesh: Any, layout: Any, stop: Any) -> int:
    import jax

    from ..train import Progress, train

    chosen, first = settings.train, jax.process_index() == 0
    progress = Progress(chosen.steps, "train")

    def report(line: str) -> None:
        progress.clear()
        print(line, file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        files = sinks(options, first, report)
        shown = [Shown(options, progress, chosen.steps)] if first else []
        for sink in (*files, *shown):
            stack.enter_context(contextlib.closing(sink))
        records = train(
            settings.workload,
            mesh,
            layout,
            steps=chosen.steps,
            seed=chosen.seed,
            eval_every=chosen.eval_every,
            eval_batches=chosen.eval_batches,
            weight_update=chosen.weight_update,
            machine=chosen.machine,
            non_finite=chosen.non_finite,
            max_skips=chosen.max_skips,
            keep=_keeping(settings, report if first else lambda line: None) if stop is not None else None,
            stop=stop,
        )
        stack.enter_context(contextlib.closing(records))
        with _building(settings), _device_errors():
            for record in records:
                for sink in files:
                    sink.write(record)
                if first and record["event"] == "save":
                    _save_settings(settings, options.config)
                for sink in shown:
                    sink.write(record)
    return OK


def _save_settings(settings: Any, given: Path | None) -> None:
    """The resolved configuration beside the steps; the file that was given with --config is left as it is."""
    folder = Path(settings.checkpoints.directory)
    named = folder / "config.toml"
    own = given is not None and named.exists() and named.samefile(given)
    write(folder / "resolved.toml" if own else named, str(settings))


def _keeping(settings: Any, report: Callable[[str], object]) -> Any:
    import meshdsl as md

    from ..train import Keeping, UsageError

    chosen = settings.checkpoints
    if Path(chosen.directory).exists() and not Path(chosen.directory).is_dir():
        raise UsageError(f"--checkpoints is a directory, and {chosen.directory} is a file")
    checkpoints = md.Checkpoints(chosen.directory, keep=chosen.keep, report=report)
    return Keeping(checkpoints, chosen.save_every, chosen.resume, settings.to_dict())


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """What the devices could not do, such as hold the arrays, in one line."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise MeshdslError(f"the devices could not run the step: {str(error).splitlines()[0]}") from error
