"""Options, exit codes and output functions shared by the commands."""

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
    "workload_mesh_layout",
    "positive",
    "print_json",
    "version",
    "workload_of",
    "workload_options",
    "write",
]

OK, FAILURE, USAGE, ILLEGAL_LAYOUT, INTERRUPTED = 0, 1, 2, 3, 130

Run = Callable[[argparse.Namespace], int]


def command(commands: Any, name: str, run: Run, about: str, *, workload: bool = True) -> argparse.ArgumentParser:
    """Add a subcommand with the option `--json` and, if `workload`, the argument WORKLOAD."""
    sentence = about[0].upper() + about[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=sentence)
    parser.set_defaults(run=run)
    if workload:
        parser.add_argument("workload", metavar="WORKLOAD", help="file.py:name, for example models/transformer.py:lm")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    return parser


def workload_options(parser: argparse.ArgumentParser, *, several: bool = False, extra: str = "") -> None:
    """Add the options for mesh, layout and config settings; `several` allows many meshes and layouts."""
    repeated: dict[str, Any] = {"action": "append", "default": []} if several else {}
    default_layout = "; repeat per layout (default: all named layouts)" if several else " (default: no sharding)"
    several_meshes = "; one for all layouts, or one per layout" if several else ""
    parser.add_argument(
        "--layout",
        metavar="RULES",
        help=f"rules such as 'batch:rows;heads:cols', or the name of a layout in the workload{default_layout}",
        **repeated,
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help=f"axes such as 'rows:2;cols:4'{several_meshes} (default: the mesh of the named layout)",
        **repeated,
    )
    config_options(parser, extra)


def config_options(parser: argparse.ArgumentParser, extra: str = "") -> None:
    """Add the options for config settings; `extra` is added to the help text of --set."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help=f"set a value of the workload's config, such as d_model=512{extra}; may be repeated",
    )
    parser.add_argument("--batch", type=count, metavar="N", help="same as --set batch=N")
    parser.add_argument("--length", type=count, metavar="N", help="same as --set length=N")


def count(text: str) -> int:
    """Parse an option as an integer from 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer from 0, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse an option as an integer from 1."""
    n = count(text)
    if not n:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return n


def out_file(text: str) -> Path:
    """Parse an option as an output file, whose folder must exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {str(path.parent)!r} to write {path.name!r} in")
    return path


def write(path: Path, text: str) -> None:
    """Write a file atomically, by renaming a temporary file; raises `UsageError` if that fails."""
    import tempfile

    from ..train import UsageError

    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp creates files that only their owner may read
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


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record with the schema version as one JSON line on stdout."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **plain(record)}, allow_nan=False), flush=True)


def version() -> str:
    """The installed version of meshdsl."""
    from .. import __version__

    return __version__


def workload_of(options: argparse.Namespace) -> Any:
    """The workload named by the options, with their settings applied."""
    from ..train import configure, load

    workload = load(options.workload)
    shortcuts = [f"{key}={value}" for key in ("batch", "length") if (value := getattr(options, key)) is not None]
    return configure(workload, [*options.settings, *shortcuts])


def workload_mesh_layout(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The workload, mesh and layout given by the options."""
    from ..train import mesh_and_layout

    workload = workload_of(options)
    return workload, *mesh_and_layout(workload, options.layout, options.mesh)
