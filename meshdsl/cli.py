"""The command `meshdsl`. Results go to stdout, progress and errors to stderr; with `--json`, results are JSON lines.

Exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
75 stopped by SIGTERM and saved, 130 interrupted. `MeshdslError`s are printed without a traceback. JAX is imported only
by commands that need it; `--help` works without.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import analyze, compare, doctor, explain, search, train, verify
from .commands.common import FAILURE, ILLEGAL_LAYOUT, INTERRUPTED, version
from .errors import LayoutError, MeshdslError, Where, caller
from .report.schema import SCHEMA_VERSION

__all__ = ["SCHEMA_VERSION", "main"]

COMMANDS = (analyze, compare, search, explain, verify, train, doctor)

_EXAMPLES = """\
examples:
  meshdsl analyze models/transformer.py:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols' --machine tpu-v5e
  meshdsl compare models/transformer.py:lm --layout data --layout data_model --html layouts.html
  meshdsl explain models/transformer.py:lm --layout data_model --dim heads
  meshdsl search models/transformer.py:lm --devices 8
  meshdsl train models/transformer.py:lm --steps 200
  meshdsl train models/transformer.py:lm --steps 2000 --checkpoints runs/lm --save-every 200
  meshdsl train models/transformer.py:lm --mesh 'rows:2;cols:4' --layout 'batch:rows;heads:cols' --set d_model=512
  meshdsl doctor

exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
            75 stopped by SIGTERM and saved, 130 interrupted (saved if --checkpoints is given)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit code."""
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
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _message(error: MeshdslError, entry: Where) -> str:
    """The text of the error, without the last line if that only names the caller of `main`."""
    lines = str(error).splitlines()
    return "\n".join(lines[:-1] if error.where == entry else lines)


def _exit_code(error: MeshdslError) -> int:
    return getattr(error, "exit_code", ILLEGAL_LAYOUT if isinstance(error, LayoutError) else FAILURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshdsl",
        description="Write a model once with named dims, choose a layout for each mesh, and see every collective.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshdsl {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
