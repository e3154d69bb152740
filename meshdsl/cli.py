"""The command `meshdsl`. Results go to stdout, progress and errors to stderr; `--json` makes every result JSON lines.

Exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout, 5 non-finite loss, 130 interrupted. An error that meshdsl
raises on purpose is printed once, without a traceback. JAX is imported only when a command needs it: `--help` does not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import LayoutError, MeshdslError, Where, caller

__all__ = ["SCHEMA_VERSION", "main"]

SCHEMA_VERSION = 1  # of every JSON line; raised when a field changes its meaning or goes

OK, FAILURE, USAGE, ILLEGAL_LAYOUT, INTERRUPTED = 0, 1, 2, 3, 130

_EXAMPLES = """\
examples:
  meshdsl train models/transformer.py:lm --steps 200
  meshdsl train models/transformer.py:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols' --set d_model=512
  meshdsl explain models/transformer.py:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols'
  meshdsl doctor

exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout, 5 non-finite loss, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    entry = caller()
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except MeshdslError as error:
        print(f"{type(error).__name__}: {_message(error, entry)}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _message(error: MeshdslError, entry: Where) -> str:
    """The text of the error. Where nothing of the user's ran, the line it ends in is the one that called `main`."""
    lines = str(error).splitlines()
    return "\n".join(lines[:-1] if error.where == entry else lines)


def _exit_code(error: MeshdslError) -> int:
    return getattr(error, "exit_code", ILLEGAL_LAYOUT if isinstance(error, LayoutError) else FAILURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshdsl",
        description="Write a model once with named dims; choose how it is split over a mesh; see every collective.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshdsl {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "train a workload on text that every Python carries", workload=True)
    train.add_argument("--steps", type=_count, default=100, metavar="N", help="steps to take (default 100)")
    train.add_argument(
        "--seed", type=int, default=0, metavar="N", help="draws the parameters and the batches (default 0)"
    )
    train.add_argument(
        "--eval-every",
        type=_count,
        default=0,
        metavar="N",
        help="evaluate on held-out text every N steps, and always after the last (default: only then)",
    )
    train.add_argument(
        "--eval-batches", type=_count, default=8, metavar="N", help="batches of an evaluation; 0 for none (default 8)"
    )
    train.add_argument(
        "--log-every",
        type=_count,
        default=0,
        metavar="N",
        help="print every Nth step (default: 20 lines in all; every step with --json)",
    )

    explain = _command(
        commands, "explain", _explain, "print a training step as a program, with its collectives", workload=True
    )
    what = explain.add_mutually_exclusive_group()
    what.add_argument("--program", action="store_true", help="the program and nothing else")
    what.add_argument("--graph", action="store_true", help="the graph before any layout, and nothing else")

    _command(commands, "doctor", _doctor, "versions and devices, and whether they are what meshdsl is tested with")
    return parser


def _command(commands: Any, name: str, run: Any, about: str, *, workload: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + "."
    )
    parser.set_defaults(run=run)
    if workload:
        parser.add_argument("workload", metavar="WORKLOAD", help="file.py:name, for example models/transformer.py:lm")
        parser.add_argument(
            "--layout",
            metavar="RULES",
            help="rules such as 'batch:rows;heads:cols', or the name of one in the workload (default: no split)",
        )
        parser.add_argument(
            "--mesh", metavar="AXES", help="axes such as 'rows:2;cols:4' (default: those of the named layout)"
        )
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="settings",
            help="change a field of the config; may be repeated",
        )
        parser.add_argument("--batch", metavar="N", help="the same as --set batch=N")
        parser.add_argument("--length", metavar="N", help="the same as --set length=N")
        parser.add_argument(
            "--devices",
            type=_count,
            metavar="N",
            help="run on N CPU devices (default: accelerators if there are any, otherwise as many as needed)",
        )
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"a count is a whole number, got {text!r}")
    return int(text)


def _version() -> str:
    from . import __version__

    return __version__


def _say(record: Mapping[str, Any]) -> None:
    # JSON has no NaN and no infinity: a metric that is either is null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    print(json.dumps({"schema_version": SCHEMA_VERSION, **finite}, allow_nan=False), flush=True)


def _place(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The workload, the mesh and the layout that the options ask for."""
    from .train import configure, load, place

    workload = load(options.workload)
    named = [f"{key}={value}" for key in ("batch", "length") if (value := getattr(options, key)) is not None]
    workload = configure(workload, [*options.settings, *named])
    return workload, *place(workload, options.layout, options.mesh)


def _start(devices: int | None, mesh: Any) -> None:
    """Fix how many CPU devices there are, before JAX looks."""
    import jax

    import meshdsl as md

    from .train import UsageError

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


def _train(options: argparse.Namespace) -> int:
    workload, mesh, layout = _place(options)
    _start(options.devices, mesh)
    from .train import Progress, train

    records = train(
        workload,
        mesh,
        layout,
        steps=options.steps,
        seed=options.seed,
        eval_every=options.eval_every,
        eval_batches=options.eval_batches,
    )
    every = options.log_every or (1 if options.json else max(1, options.steps // 20))
    progress = Progress(options.steps, "train")
    with progress:
        for record in records:
            if record["event"] == "step":
                progress.update(record["step"], f"loss {record['loss']:.4f}")
            if record["event"] == "step" and record["step"] % every and record["step"] not in (1, options.steps):
                continue
            progress.clear()
            if options.json:
                _say({"command": "train", **record})
            else:
                print(_line(record), flush=True)
    return OK


def _line(record: Mapping[str, Any]) -> str:
    """What a person reads of one record."""
    if record["event"] == "step":
        return f"step {record['step']:>6}  loss {record['loss']:.4f}  {record['seconds'] * 1e3:.0f} ms"
    if record["event"] == "eval":
        bits = f", {record['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in record else ""
        return f"step {record['step']:>6}  held out: loss {record['loss']:.4f}{bits}"
    if record["event"] == "start":
        split = f"layout {record['layout']}" if record["layout"] else "nothing split"
        return (
            f"{record['workload']}: {record['parameters']:,} parameters on mesh {record['mesh']}, {split}\n"
            f"data: {_data(record['data'])}"
        )
    rate = f"; {record['bytes_per_second']:,.0f} bytes a second" if "bytes_per_second" in record else ""
    return f"{record['steps']} steps in {record['seconds']:.1f} s{rate}"


def _data(data: Mapping[str, Any]) -> str:
    if data["kind"] == "text":
        size, held_out = data["bytes"] / 1e6, sum(kind["bytes"] for kind in data["held_out"].values()) / 1e6
        return (
            f"{size:.2f} MB of English prose and Python source that this Python carries, {held_out:.2f} MB of it "
            f"held out (sha256 {data['sha256'][:16]})"
        )
    return "random numbers, since the batch is not text" if data["kind"] == "noise" else "given"


def _explain(options: argparse.Namespace) -> int:
    workload, mesh, layout = _place(options)
    from .train import report, stages

    compiled, arguments = stages(workload, mesh, layout)
    if options.graph:
        text = str(compiled.graph(*arguments))
        if options.json:
            _say({"command": "explain", "graph": text})
        else:
            print(text)
        return OK
    program = compiled.program(*arguments)
    if options.json:
        _say({"command": "explain", "program": str(program), "collectives": report.collectives(program)})
        return OK
    print(program)
    if not options.program:
        print(f"\ncollectives of one step, per device, loop trips counted ({mesh})\n")
        print(report.collective_table(program))
    return OK


def _doctor(options: argparse.Namespace) -> int:
    found, problems = _examine()
    if options.json:
        _say({"command": "doctor", **found, "problems": problems, "ok": not problems})
    else:
        for key, value in found.items():
            print(f"{key:<14}{value if isinstance(value, str) else ', '.join(value)}")
        for problem in problems:
            print(f"problem: {problem}")
        print("something needs attention" if problems else "all is well")
    return FAILURE if problems else OK


def _examine() -> tuple[dict[str, Any], list[str]]:
    """What this machine has, and what about it is not as meshdsl is tested."""
    wanted = _requirements()
    found: dict[str, Any] = {"meshdsl": _version(), "python": platform.python_version(), "system": platform.platform()}
    problems = []
    for name in ("jax", "jaxlib", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
            problems.append(f"{name} is not installed; pip install {name}{wanted.get(name, '')}")
            continue
        if not _within(found[name], wanted.get(name, "")):
            problems.append(f"{name} {found[name]} is outside the tested range {wanted[name]}")
    found["tested jax"] = wanted.get("jax", "unknown")
    found["cpu cores"] = str(os.cpu_count())
    try:
        import jax

        found["devices"] = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except Exception as error:  # whatever a broken plugin raises: report it, that is what a doctor is for
        problems.append(f"JAX finds no device: {type(error).__name__}: {error}")
    return found, problems


def _requirements() -> dict[str, str]:
    """The ranges of versions that meshdsl's own metadata states."""
    try:
        lines = importlib.metadata.requires("meshdsl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    parsed = (re.match(r"([\w.-]+)\s*([<>=!~][^;]*)?(;.*)?$", line) for line in lines)
    return {m[1]: (m[2] or "").strip() for m in parsed if m and not m[3]}


def _within(version: str, wanted: str) -> bool:
    """
    >>> _within("0.10.2", "<0.11,>=0.10.2"), _within("0.11.0", "<0.11,>=0.10.2"), _within("1.0", "")
    (True, False, True)
    """
    numbers = _numbers(version)
    for bound in wanted.split(","):
        match = re.match(r"\s*(>=|<)\s*([\d.]+)", bound)
        if match and (numbers >= _numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
