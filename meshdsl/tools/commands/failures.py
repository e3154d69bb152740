"""Runs a command, and turns whatever it raises into a message on stderr and an exit code. No traceback is printed.

A model file runs the user's code, which may raise anything, also `SystemExit`: these are failures of the file, and
the message shows its line. Set `MESHDSL_TRACEBACK=full` to see the traceback as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from ...errors import InternalError, LayoutError, MeshdslError, Where, raised
from ...errors.jax_version import check_jax
from . import doctor
from .colours import of_error
from .common import FAILURE, ILLEGAL_LAYOUT, INTERRUPTED, printable, reason_of

__all__ = ["exit_code_of"]


def exit_code_of(options: argparse.Namespace, entry: Where) -> int:
    """Run the command and return its exit code. `entry` is the line that called `main`."""
    try:
        if options.run.__module__ != doctor.__name__:  # which reports an old JAX itself
            check_jax()
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
        return _exit_code(known)


def _message(error: MeshdslError, entry: Where) -> str:
    """The text of the error, without the last line if that only names the caller of `main`."""
    lines = printable(str(error)).split("\n")
    return "\n".join(lines[:-1] if error.where == entry else lines)


def _exit_code(error: MeshdslError) -> int:
    return getattr(error, "exit_code", ILLEGAL_LAYOUT if isinstance(error, LayoutError) else FAILURE)


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
