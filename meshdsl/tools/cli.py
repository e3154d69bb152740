"""The command `meshdsl`. Results go to stdout, progress and errors to stderr; with `--json`, results are JSON lines.

Exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
75 stopped by SIGTERM and saved, 130 interrupted. Errors are printed without a traceback (`MESHDSL_TRACEBACK=full` shows
it). JAX is imported only by commands that need it; `--help` works without.

Runs a command, and turns whatever it raises into a message on stderr and an exit code. No traceback is printed.

A model file runs the user's code, which may raise anything, also `SystemExit`: these are failures of the file, and
the message shows its line. Set `MESHDSL_TRACEBACK=full` to see the traceback as well.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from ..errors import InternalError, LayoutError, MeshdslError, Where, caller, raised
from ..errors.jax_version import check_jax
from ..errors.no_effect import reported
from .commands import (
    analyze,
    compare,
    doctor,
    explain,
    export,
    generate,
    import_,
    init,
    list_,
    scale,
    search,
    train,
    verify,
)
from .commands.colours import of_error
from .commands.common import FAILURE, ILLEGAL_LAYOUT, INTERRUPTED, OK, printable, reason_of, version
from .commands.output import json_lines, steady
from .commands.parser import Parser

GROUPS = {
    "start": (init, list_, doctor),
    "analyse": (analyze, compare, search, scale, explain, verify),
    "train": (train, import_, generate, export),
}

_EXAMPLES = """\
examples:
  meshdsl init mine.py
  meshdsl list transformer:lm
  meshdsl analyze transformer:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols' --machine tpu-v5e
  meshdsl compare transformer:lm --layout data --layout data_model --html layouts.html
  meshdsl explain transformer:lm --layout data_model --dim heads
  meshdsl search transformer:lm --devices 8
  meshdsl scale transformer:lm --layout data --machine h100 --html scaling.html
  meshdsl train transformer:lm --steps 200
  meshdsl train transformer:lm --steps 2000 --checkpoints runs/lm --save-every 200
  meshdsl train transformer:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols' --set d_model=512
  meshdsl export runs/lm lm.safetensors --params-only
  meshdsl import hf:llama-3.2-1b --model llama --out runs/llama --layout zero
  meshdsl generate llama --params runs/llama --prompt-ids 1,2,3 --tokens 16
  meshdsl doctor

exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
            75 stopped by SIGTERM and saved, 130 interrupted (saved if --checkpoints is given)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit code."""
    entry = caller()
    options = argparse.Namespace()
    with steady() as stdout:
        try:
            options = parser().parse_args(arguments)
        except SystemExit as stop:  # --help, --version or a mistake; argparse has printed it
            code = stop.code if isinstance(stop.code, int) else FAILURE
        else:
            with json_lines() if options.json else contextlib.nullcontext():
                code = exit_code_of(options, entry)
        stdout.flush()
        problem = stdout.problem
        if problem is None or (problem.errno == errno.EPIPE and getattr(options, "saves", False)):
            return code
        if problem.errno != errno.EPIPE:
            print(f"stdout cannot be written: {problem.strerror}", file=sys.stderr)
        return FAILURE if code == OK else code


def parser() -> Parser:
    """The parser of all commands; its help lists them in groups."""
    root = Parser(
        prog="meshdsl",
        description="Write a model once with named dims, choose a layout for each mesh, and see every collective.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"meshdsl {version()}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for title, modules in GROUPS.items():
        for module in modules:
            module.add(commands)
        root.groups[title] = [module.__name__.rpartition(".")[2].rstrip("_") for module in modules]
    return root


def exit_code_of(options: argparse.Namespace, entry: Where) -> int:
    """Run the command and return its exit code. `entry` is the line that called `main`."""
    try:
        if options.run.__module__ != doctor.__name__:  # which reports an old JAX itself
            check_jax()
        with contextlib.nullcontext() if getattr(options, "strict", True) else reported(_warn_once()):
            return options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, and there is nothing to save
        return FAILURE
    except BaseException as error:
        if os.environ.get("MESHDSL_TRACEBACK"):
            traceback.print_exc()
        known = error if isinstance(error, MeshdslError) else _explained(error, getattr(options, "workload", None))
        print(f"{of_error(type(known).__name__)}: {_message(known, entry)}", file=sys.stderr)
        return getattr(known, "exit_code", ILLEGAL_LAYOUT if isinstance(known, LayoutError) else FAILURE)


def _warn_once() -> Callable[[str], object]:
    """A function that prints a warning on stderr, the first time for each text."""
    return functools.cache(lambda text: print(f"warning: {text}; it is dropped", file=sys.stderr))


def _message(error: MeshdslError, entry: Where) -> str:
    """The text of the error, without the last line if that only names the caller of `main`."""
    lines = printable(str(error)).split("\n")
    return "\n".join(lines[:-1] if error.where == entry else lines)


def _explained(error: BaseException, workload: str | None) -> MeshdslError:
    """The error to print instead: of the user's file, of the machine, or of meshdsl itself."""
    name, text = type(error).__name__, _first_line(error)
    if "Unable to initialize backend" in text or "Unknown backend" in text:
        platforms = os.environ.get("JAX_PLATFORMS")
        variable = f"JAX_PLATFORMS is {platforms!r}; " if platforms else ""
        return MeshdslError(f"JAX cannot start: {variable}{text}")
    line = raised(error) if workload is not None else None
    if line is not None:
        problem = f"calls sys.exit({text})" if isinstance(error, SystemExit) else f"fails: {name}: {text}"
        return MeshdslError(f"{workload} {problem}\n  at {line}  {line.source()}".rstrip())
    if isinstance(error, OSError):
        return MeshdslError(": ".join(str(part) for part in (error.filename, reason_of(error)) if part))
    if isinstance(error, MemoryError):
        return MeshdslError(f"not enough memory: {text}")
    if isinstance(error, SystemExit):
        return MeshdslError(f"the program was ended by sys.exit({text}), outside of meshdsl")
    frames = traceback.extract_tb(error.__traceback__)
    location = f"\n  at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return InternalError(
        f"{name}: {text}{location}\n  this is a bug in meshdsl; please report it. MESHDSL_TRACEBACK=full shows more"
    )


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, which may itself fail to print."""
    try:
        return next(iter(str(error).splitlines()), "no message")
    except Exception as problem:
        return f"its text cannot be shown ({type(problem).__name__})"
