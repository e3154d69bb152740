"""What commands share: options, exit codes, and how a result is said."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..report.schema import SCHEMA_VERSION, plain

__all__ = [
    "FAILURE",
    "ILLEGAL_LAYOUT",
    "INTERRUPTED",
    "OK",
    "USAGE",
    "command",
    "config_options",
    "count",
    "out_file",
    "placed",
    "positive",
    "say",
    "version",
    "workload_of",
    "workload_options",
    "write",
]

OK, FAILURE, USAGE, ILLEGAL_LAYOUT, INTERRUPTED = 0, 1, 2, 3, 130

Run = Callable[[argparse.Namespace], int]


def command(commands: Any, name: str, run: Run, about: str, *, workload: bool = True) -> argparse.ArgumentParser:
    """A new command with `--json`; with a workload and its settings where it needs one."""
    sentence = about[0].upper() + about[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=sentence)
    parser.set_defaults(run=run)
    if workload:
        parser.add_argument("workload", metavar="WORKLOAD", help="file.py:name, for example models/transformer.py:lm")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    return parser


def workload_options(parser: argparse.ArgumentParser, *, several: bool = False, more: str = "") -> None:
    """Mesh and layout, or several of each, and settings of the workload's config."""
    many: dict[str, Any] = {"action": "append", "default": []} if several else {}
    each = "; once for each layout (default: all of the workload)" if several else " (default: no split)"
    meshes = "; one for all, or one for each layout" if several else ""
    parser.add_argument(
        "--layout",
        metavar="RULES",
        help=f"rules such as 'batch:rows;heads:cols', or the name of one in the workload{each}",
        **many,
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help=f"axes such as 'rows:2;cols:4'{meshes} (default: those of the named layout)",
        **many,
    )
    config_options(parser, more)


def config_options(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Settings of the workload's config; `more` says what else they may set."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help=f"a value of the workload's config, such as d_model=512{more}; may be repeated",
    )
    parser.add_argument("--batch", type=count, metavar="N", help="the same as --set batch=N")
    parser.add_argument("--length", type=count, metavar="N", help="the same as --set length=N")


def count(text: str) -> int:
    """A whole number of an option."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"a count is a whole number, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of an option, from 1."""
    n = count(text)
    if not n:
        raise argparse.ArgumentTypeError("at least 1 is needed, got 0")
    return n


def out_file(text: str) -> Path:
    """A file to write: its folder has to be there before anything is computed."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} to write {path.name!r} in")
    return path


def write(path: Path, text: str) -> None:
    """The whole file or nothing: it is written beside its place and renamed. Raises `UsageError` where it cannot be."""
    import tempfile

    from ..train import UsageError

    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def say(record: Mapping[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **plain(record)}, allow_nan=False), flush=True)


def version() -> str:
    """The version of this package."""
    from .. import __version__

    return __version__


def workload_of(options: argparse.Namespace) -> Any:
    """The workload that the options name, with their settings."""
    from ..train import configure, load

    workload = load(options.workload)
    named = [f"{key}={value}" for key in ("batch", "length") if (value := getattr(options, key)) is not None]
    return configure(workload, [*options.settings, *named])


def placed(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The workload, the mesh and the layout that the options ask for."""
    from ..train import place

    workload = workload_of(options)
    return workload, *place(workload, options.layout, options.mesh)
