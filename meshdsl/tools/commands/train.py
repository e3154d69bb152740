"""`meshdsl train`: trains a workload on its own data or on the Python standard library's own text.

With `--checkpoints`, a run can be stopped by SIGTERM (exit code 75) or SIGINT (130), or killed; the same command then
resumes from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import MeshdslError, UsageError
from . import devices
from .common import ILLEGAL_LAYOUT, OK, command, print_json, printable, say, write
from .records import StdoutWriter, sinks
from .train_options import train_options
from .weights import base_of_run, leaves


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "train a workload, on its own data or on the Python standard library's own text"
    parser = command(commands, "train", run, about)
    train_options(parser)


def run(options: argparse.Namespace) -> int:
    """Train and print the records; or print the settings (--print-config) or the cost (--dry-run)."""
    from ...train import Stop

    settings = _resolved(options)
    if options.print_config:
        if options.json:
            print_json({"command": "train", "event": "config", **settings.to_dict()})
        else:
            print(settings, end="")
        return OK
    plan = settings.run_plan(options.devices)
    devices.check(options, plan.mesh)
    if options.dry_run:
        return _dry_run(options, settings, plan)
    if settings.checkpoints.directory is None:
        devices.start(options, plan.mesh)
        return _train(options, settings, None)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            # nothing to save yet: exit as later, so that a scheduler starts the run again
            before = signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
            stack.callback(signal.signal, signal.SIGTERM, before)
        devices.start(options, plan.mesh)
        return _train(options, settings, stack.enter_context(Stop()))


def _resolved(options: argparse.Namespace) -> Any:
    from ...train import resolve
    from ...train.settings import Reading, Saving, Training

    of_tables = {"train": Training, "checkpoints": Saving, "data": Reading}
    options_given = {
        "mesh": options.mesh,
        "layout": options.layout,
        "plan": None if options.plan is None else str(options.plan),
        "checkpoints.directory": options.checkpoints,
        "data.source": options.data,
    }
    for table, kind in of_tables.items():  # options have the names of the settings
        options_given |= {f"{table}.{f.name}": vars(options)[f.name] for f in fields(kind) if f.name in options}
    settings = resolve(options.workload, options.config, options.settings, options_given)
    folder = settings.checkpoints.directory
    base = None if folder is None else base_of_run(folder)
    if base is not None and (base / "tokenizer.json").is_file():
        if settings.workload.data is None:
            raise UsageError(
                f"{folder} has imported weights, whose ids are those of {base / 'tokenizer.json'}, and the default "
                "data is bytes\n  give text with --data FILE.jsonl, --data FILE.txt or --data hf:NAME; or, for bytes, "
                "--data meshdsl.train:data_of_bytes"
            )
        if settings.data.source is not None and settings.data.tokenizer is None:
            options_given["data.tokenizer"] = str(base)
            settings = resolve(options.workload, options.config, options.settings, options_given)
    _check_used(options, settings)
    return settings


def _check_used(options: argparse.Namespace, settings: Any) -> None:
    """Raises `UsageError` for options that have no effect."""
    from ...errors.no_effect import no_effect

    chosen, saving = settings.train, settings.checkpoints
    shown = options.dry_run or options.print_config
    if options.machine and not shown and settings.run_plan().machine is None:
        where = "--dry-run, --weight-update auto, --overlap or --collective-steps"
        no_effect(UsageError(f"--machine has no effect here; use it with {where}"))
    set_keys = {setting.partition("=")[0] for setting in options.settings}
    used = {
        "--save-every": options.save_every is not None,
        "--keep": options.keep is not None,
        "--resume": options.resume is not None or saving.resume not in ("auto", "never"),
        "--take-over": saving.take_over,
        "--optimizer-changed": options.optimizer_changed,
    }
    if saving.directory is None and any(used.values()):
        raise UsageError(
            f"{' '.join(name for name in used if used[name])} has no effect without --checkpoints DIR\n"
            "  give the directory in which this run saves; it is also needed to resume from another run's step"
        )
    if options.eval_every and not chosen.eval_batches:
        raise UsageError("--eval-every has no effect with --eval-batches 0; use --eval-batches of at least 1")
    if "train.max_skips" in set_keys and chosen.non_finite != "skip":
        raise UsageError("train.max_skips has no effect with --non-finite stop; use --non-finite skip")


def _dry_run(options: argparse.Namespace, settings: Any, plan: Any) -> int:
    """Print the cost of the step; returns 3 if it does not fit in the machine's memory."""
    from ...train import stages
    from ...train.load import FILLS

    if options.devices is None and FILLS.search(settings.mesh or ""):
        raise UsageError(f"--dry-run knows no devices that fill the mesh {settings.mesh!r}; add --devices N")
    from .costing import machine_named

    machine = machine_named(settings.train.machine)
    compiled, types = stages(settings.workload, plan, guard=True)
    cost = compiled.cost(*types, machine=machine)
    if options.json:
        update = compiled.weight_update.to_dict()
        print_json({"command": "train", "event": "dry-run", "cost": cost.to_dict(), "weight_update": update})
    else:
        print(f"{cost}\n\n{compiled.weight_update}")
    return OK if cost.fits else ILLEGAL_LAYOUT


def _train(options: argparse.Namespace, settings: Any, stop: Any) -> int:
    import jax

    from ...train import Progress, train
    from ...train.peers import Peers
    from ...train.watch import Watch

    plan = settings.run_plan(jax.device_count() if options.devices is None else options.devices)
    watch = Watch(settings.train.step_timeout)
    chosen, is_first = settings.train, jax.process_index() == 0
    progress = Progress(chosen.steps, "train")

    def report(line: str) -> None:
        progress.clear()
        say(line)

    problems: list[MeshdslError] = []
    with contextlib.ExitStack() as stack:
        files = sinks(options, is_first, report)
        stdout = [StdoutWriter(options, progress, chosen.steps, goes_on=stop is not None)] if is_first else []
        for sink in (*files, *stdout):
            stack.enter_context(contextlib.closing(sink))
        records = train(
            settings.workload,
            plan,
            peak_seconds=_peak_seconds(settings, plan),
            steps=chosen.steps,
            seed=chosen.seed,
            eval_every=chosen.eval_every,
            eval_batches=chosen.eval_batches,
            non_finite=chosen.non_finite,
            max_skips=chosen.max_skips,
            keep=_run_checkpoints(settings, report if is_first else lambda line: None) if stop is not None else None,
            stop=stop,
            watch=watch,
            optimizer_changed=options.optimizer_changed,
        )
        stack.enter_context(contextlib.closing(records))
        peers = None
        if not devices.is_one_of_several():
            stack.enter_context(watch.alone(report))
        else:
            peers = stack.enter_context(Peers(report, watch, devices.host_of(options.coordinator)))
            peers.agree("their settings", _what_runs(settings, options))
        has_settings = not is_first
        for record in records:
            if peers is not None:
                _compare(peers, record)
            files = [sink for sink in files if _attempt(partial(sink.write, record), problems, report)]
            if record["event"] == "save" and not has_settings:
                has_settings = True
                _attempt(partial(_save_settings, settings, options.config), problems, report)
            for sink in stdout:
                sink.write(record)
    if problems:
        raise problems[0]
    return OK


def _compare(peers: Any, record: dict[str, Any]) -> None:
    """Compare what this process starts with, resumes and stores with the others."""
    peers.note(record)
    if record["event"] in ("start", "resume"):
        peers.agree(f"what they {record['event']}", record)
    if record["event"] == "start":
        peers.agree("the program of a step", peers.watch.collectives())
    if "digests" in record:
        way_out = "resume from an earlier step, and look at what each process reads, and at its host"
        peers.agree(f"what they store of step {record['step']}", record.pop("digests"), way_out)


def _what_runs(settings: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The settings, the hash of the workload's file and the versions, which all processes of a run must share."""
    from ...train.peers import versions

    file = Path(options.workload.rpartition(":")[0] or options.workload)
    source = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
    return {**leaves(settings.to_dict()), "the workload's file": source, **versions()}


def _peak_seconds(settings: Any, plan: Any) -> float | None:
    """Seconds of a step's products at the devices' peak; None if no machine file has these devices."""
    import jax

    from ...cost.machine import MachineError
    from ...cost.report.rates import machine_of_device
    from ...train import stages
    from .costing import work

    machine = machine_of_device(jax.devices()[0].device_kind)
    if machine is None:
        return None
    compiled, arguments = stages(settings.workload, plan)
    try:
        return work(settings.workload, compiled, arguments).peak_seconds(machine, plan.mesh.size)
    except MachineError:
        return None  # the machine has no peak for a dtype of the model


def _attempt(work: Callable[[], object], problems: list[MeshdslError], report: Callable[[str], object]) -> bool:
    """True if a file was written. Otherwise the run goes on without it, and fails at its end."""
    try:
        work()
    except MeshdslError as error:
        problems.append(error)
        report(f"{type(error).__name__}: {error.args[0]}\n  the run goes on without it, and fails at its end")
        return False
    return True


def _save_settings(settings: Any, config_file: Path | None) -> None:
    """Write the merged settings to the checkpoint directory, without overwriting the file given with --config.

    Temporary files of killed runs are removed; the run holds the directory's lock.
    """
    from ...train.checkpoint.arguments import is_url

    folder = Path(settings.checkpoints.directory)
    if is_url(settings.checkpoints.directory):
        (md.Checkpoints(settings.checkpoints.directory).directory / "config.toml").write_text(str(settings))
        return
    path = folder / "config.toml"
    for name in os.listdir(folder):
        if re.fullmatch(r"\.(config|resolved)\.toml\.[a-z0-9_]{8}", name):
            with contextlib.suppress(OSError):
                os.unlink(folder / name)
    is_given = config_file is not None and path.exists() and path.samefile(config_file)
    write(folder / "resolved.toml" if is_given else path, str(settings))


def _run_checkpoints(settings: Any, report: Callable[[str], object]) -> Any:
    from ...train import Keeping
    from ...train.checkpoint.arguments import is_url

    chosen = settings.checkpoints
    if not is_url(chosen.directory) and Path(chosen.directory).exists() and not Path(chosen.directory).is_dir():
        raise UsageError(f"--checkpoints must be a directory, and {chosen.directory} is a file")
    checkpoints = md.Checkpoints(
        chosen.directory, keep=chosen.keep, take_over=chosen.take_over, report=lambda line: report(printable(line))
    )
    return Keeping(checkpoints, chosen.save_every, chosen.resume, settings.to_dict())
