"""`meshdsl train`: a workload on text that every Python carries, or on its own data.

With `--checkpoints` a run can be stopped at any time (SIGTERM: 75, SIGINT: 130) or killed, and the same command goes
on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import LayoutError, MeshdslError, raised
from .common import ILLEGAL_LAYOUT, OK, command, count, say, workload_options, write

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = command(commands, "train", run, "train a workload on text that every Python carries")
    workload_options(parser)
    option = parser.add_argument
    option("--config", type=Path, metavar="FILE", help="a TOML file; --set a.b=value and options go before it")
    option("--print-config", action="store_true", help="print the resolved configuration as TOML, and end")
    option("--dry-run", action="store_true", help="trace, partition and cost the step, and run nothing")
    option("--machine", metavar="NAME", help="what --dry-run costs the step on (default tpu-v5e)")
    option(
        "--devices",
        type=count,
        metavar="N",
        help="run on N CPU devices (default: accelerators if there are any, otherwise as many as needed)",
    )
    option("--steps", type=count, metavar="N", help="steps to take in all (default 100)")
    option("--seed", type=int, metavar="N", help="draws the parameters and the batches (default 0)")
    option(
        "--eval-every",
        type=count,
        metavar="N",
        help="evaluate on held-out text every N steps, and always after the last (default: only then)",
    )
    option("--eval-batches", type=count, metavar="N", help="batches of an evaluation; 0 for none (default 8)")
    option("--weight-update", choices=["replicated", "sharded", "auto"], help="where weights are updated")
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
        help="go on from the newest sound checkpoint (default auto), from nothing, or from a step's directory",
    )
    shown = parser.add_argument_group("what is shown")
    option = shown.add_argument
    option(
        "--log-every",
        type=count,
        default=0,
        metavar="N",
        help="print every Nth step (default: 20 lines in all; every step with --json)",
    )
    option("--metrics", type=Path, metavar="FILE", help="append every record to a file, as JSON lines")
    option("--tensorboard", type=Path, metavar="DIR", help="write event files (needs the extra `tensorboard`)")
    option("--profile", type=Path, metavar="DIR", help="trace five steps with JAX's profiler")
    several = parser.add_argument_group("several processes")
    option = several.add_argument
    option("--coordinator", metavar="HOST:PORT", help="where process 0 is reached; all processes get the same")
    option("--processes", type=count, metavar="N", help="how many processes there are")
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
    if options.dry_run:
        return _dry_run(options, settings, mesh, layout)
    _join(options, mesh)
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
        "train.non_finite": options.non_finite,
        "checkpoints.directory": options.checkpoints,
        "checkpoints.save_every": options.save_every,
        "checkpoints.keep": options.keep,
        "checkpoints.resume": options.resume,
    }
    return resolve(options.workload, options.config, options.settings, given)


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
    except (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError) as error:
        line = raised(error)
        if line is None:  # no line of the workload's led there, so it is a fault of meshdsl
            raise
        at = f"\n  at {line}  {line.source()}"
        problem = str(error).splitlines()[0] if str(error) else "no message"
        raise MeshdslError(
            f"{settings.workload.name} cannot be made with this configuration: {type(error).__name__}: {problem}{at}"
        ) from error


def _dry_run(options: argparse.Namespace, settings: Any, mesh: Any, layout: Any) -> int:
    """What the step is and costs; 3 when it does not fit the machine's memory."""
    from ..cost.machine import MachineError, machine
    from ..train import UsageError, stages

    try:
        on = machine(options.machine or "tpu-v5e")
    except MachineError as error:
        raise UsageError(str(error)) from None
    with _building(settings):
        compiled, types = stages(
            settings.workload, mesh, layout, weight_update=settings.train.weight_update, guard=True
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
    every = options.log_every or (1 if options.json else max(1, chosen.steps // 20))
    progress = Progress(chosen.steps, "train")
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(contextlib.closing(sink)) for sink in _sinks(options, first)]
        stack.enter_context(progress)
        records = train(
            settings.workload,
            mesh,
            layout,
            steps=chosen.steps,
            seed=chosen.seed,
            eval_every=chosen.eval_every,
            eval_batches=chosen.eval_batches,
            weight_update=chosen.weight_update,
            non_finite=chosen.non_finite,
            max_skips=chosen.max_skips,
            keep=_keeping(settings, progress, first) if stop is not None else None,
            stop=stop,
        )
        stack.enter_context(contextlib.closing(records))
        with _building(settings), _device_errors():
            for record in records:
                for sink in sinks:
                    sink.write(record)
                if first and record["event"] == "save":  # this run is the directory's only writer now
                    write(Path(settings.checkpoints.directory) / "config.toml", str(settings))
                if first:
                    _show(record, options, progress, every, chosen.steps)
    return OK


def _keeping(settings: Any, progress: Any, first: bool) -> Any:
    import sys

    import meshdsl as md

    from ..train import Keeping

    def report(line: str) -> None:
        progress.clear()
        print(line, file=sys.stderr, flush=True)

    chosen = settings.checkpoints
    checkpoints = md.Checkpoints(chosen.directory, keep=chosen.keep, report=report if first else lambda line: None)
    return Keeping(checkpoints, chosen.save_every, chosen.resume, settings.to_dict())


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """What the devices could not do, such as hold the arrays, in one line."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise MeshdslError(f"the devices could not run the step: {str(error).splitlines()[0]}") from error


def _sinks(options: argparse.Namespace, first: bool) -> list[Any]:
    """Files that get the records. Process 0 writes metrics; every process has a profile of its own."""
    from ..schema import SCHEMA_VERSION
    from ..train.metrics import Lines, Profile, TensorBoard

    made: list[Any] = []
    if options.metrics is not None and first:
        made.append(Lines(options.metrics, {"schema_version": SCHEMA_VERSION}))
    if options.tensorboard is not None and first:
        made.append(TensorBoard(options.tensorboard))
    if options.profile is not None:
        made.append(Profile(options.profile))
    return made


def _show(record: Mapping[str, Any], options: argparse.Namespace, progress: Any, every: int, steps: int) -> None:
    event = record["event"]
    if event == "step":
        loss = record["loss"]
        progress.update(record["step"], "skipped" if loss is None else f"loss {loss:.4f}")
        if record["step"] % every and record["step"] not in (1, steps) and not record.get("skipped"):
            return
    progress.clear()
    if options.json:
        say({"command": "train", **record})
    elif event != "save":
        print(_line(record), flush=True)


def _join(options: argparse.Namespace, mesh: Any) -> None:
    """Start JAX: as one of several processes, or alone, with the CPU devices that are asked for."""
    from ..train import UsageError

    several = (options.coordinator, options.processes, options.process)
    if all(part is None for part in several):
        _start(options.devices, mesh)
        return
    if any(part is None for part in several):
        raise UsageError("--coordinator, --processes and --process go together")
    if not 0 <= options.process < options.processes:
        raise UsageError(f"--process is from 0 to {options.processes - 1}, got {options.process}")
    import jax

    if options.devices is not None:
        if options.devices % options.processes or options.devices < mesh.size:
            raise UsageError(
                f"the mesh '{mesh}' has {mesh.size} places, and --devices {options.devices} over {options.processes} "
                "processes does not give them: it is the number over all processes, the same on each"
            )
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices // options.processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    except (RuntimeError, ValueError) as error:
        raise MeshdslError(f"the processes did not find each other at {options.coordinator}: {error}") from None


def _start(devices: int | None, mesh: Any) -> None:
    """Fix how many CPU devices there are, before JAX looks."""
    import jax

    import meshdsl as md

    from ..train import UsageError

    if devices is not None and devices < mesh.size:
        raise UsageError(f"the mesh '{mesh}' has {mesh.size} places, and --devices gives {devices}")
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        md.host_devices(devices)
    elif mesh.size > 1:
        if getattr(jax.config, "jax_num_cpu_devices", -1) < mesh.size:
            with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
                jax.config.update("jax_num_cpu_devices", mesh.size)
        if jax.default_backend() != "cpu" and jax.device_count() < mesh.size:
            raise LayoutError(
                f"the mesh '{mesh}' needs {mesh.size} devices, and there are {jax.device_count()} "
                f"({jax.default_backend()})\n  to try it on the CPU: --devices {mesh.size}"
            )


def _line(record: Mapping[str, Any]) -> str:
    """What a person reads of one record."""
    event = record["event"]
    if event == "step":
        loss = "not finite, skipped" if record["loss"] is None else f"{record['loss']:.4f}"
        loss += ", skipped" if record.get("skipped") and record["loss"] is not None else ""
        rate = f"  {record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
        left = f"  {_clock(record['seconds_left'])} left" if record.get("seconds_left", 0) >= 1 else ""
        return f"step {record['step']:>6}  loss {loss}  {record['seconds'] * 1e3:.0f} ms{rate}{left}"
    if event == "eval":
        bits = f", {record['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in record else ""
        return f"step {record['step']:>6}  held out: loss {record['loss']:.4f}{bits}"
    if event == "start":
        split = f"layout {record['layout']}" if record["layout"] else "nothing split"
        return (
            f"{record['workload']}: {record['parameters']:,} parameters on mesh {record['mesh']}, {split}\n"
            f"data: {_data(record['data'])}"
        )
    if event == "resume":
        changed = "".join(f"\n  {line}" for line in record["changed"])
        return f"step {record['step']:>6}  resumed from {record['from']}{changed}"
    rate = f"; {record['bytes_per_second']:,.0f} bytes a second" if "bytes_per_second" in record else ""
    skipped = f"; {record['skipped']} skipped" if "skipped" in record else ""
    return f"{record['steps']} steps in {record['seconds']:.1f} s{rate}{skipped}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _data(data: Mapping[str, Any]) -> str:
    if data["kind"] == "text":
        size, held_out = data["bytes"] / 1e6, sum(kind["bytes"] for kind in data["held_out"].values()) / 1e6
        return (
            f"{size:.2f} MB of English prose and Python source that this Python carries, {held_out:.2f} MB of it "
            f"held out (sha256 {data['sha256'][:16]})"
        )
    return "random numbers, since the batch is not text" if data["kind"] == "noise" else data["kind"]
