"""The command `meshdsl`. Results go to stdout, progress and errors to stderr; with `--json`, results are JSON lines.

Exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
75 stopped by SIGTERM and saved, 130 interrupted. Errors are printed without a traceback (`MESHDSL_TRACEBACK=full` shows
it). JAX is imported only by commands that need it; `--help` works without.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
from collections.abc import Sequence

from ..cost.report.schema import SCHEMA_VERSION
from ..errors import caller
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
    plot,
    scale,
    search,
    train,
    verify,
)
from .commands.common import FAILURE, OK, version
from .commands.failures import exit_code_of
from .commands.output import json_lines, steady
from .commands.parser import Parser

__all__ = ["SCHEMA_VERSION", "main", "parser"]

GROUPS = {
    "start": (init, list_, doctor),
    "analyse": (analyze, compare, search, scale, explain, verify),
    "train": (train, plot, import_, generate, export),
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
  meshdsl plot runs/a.jsonl runs/b.jsonl --html runs.html
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
