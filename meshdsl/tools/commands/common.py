"""Options, exit codes and output functions shared by the commands."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

from ...cost.report.schema import SCHEMA_VERSION, plain
from ...errors import MeshdslError, UsageError, short
from ...errors.values import Bounds, read

LARGEST = 10**15  # of any count on the command line
MOST_DEVICES = 4096  # CPU devices of one program
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
OK, FAILURE, ILLEGAL_LAYOUT, INTERRUPTED = 0, 1, 3, 130

Run = Callable[[argparse.Namespace], int]


def command(commands: Any, name: str, run: Run, about: str, *, workload: bool = True) -> argparse.ArgumentParser:
    """Add a subcommand with the option `--json` and, if `workload`, the argument WORKLOAD."""
    sentence = about[0].upper() + about[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=sentence, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    if workload:
        parser.add_argument("workload", metavar="WORKLOAD", help="a model (llama, transformer:lm) or file.py:name")
    option = options_of(parser)
    option("--json", "JSON lines on stdout")
    return parser


def options_of(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """The function that adds an option to a parser or a group, written as its help shows it: `--steps N`.

    The kind of its value is a function of the text, or the choices. An option without a kind and without a name for
    its value is a flag.
    """

    def option(written: str, about: str, kind: Any = None, **more: Any) -> None:
        words = written.replace(",", "").split()
        flags = [word for word in words if word.startswith("--")]
        if flags != words:
            more["metavar"] = words[-1]
        if callable(kind):
            more["type"] = kind
        elif kind is not None:
            more["choices"] = kind
        elif flags == words:
            more.setdefault("action", "store_true")
        parser.add_argument(*flags, help=about, **more)

    return option


def section(parser: argparse._ActionsContainer, title: str) -> argparse._ActionsContainer:
    """A section of the command's help; the section itself, if options are added to one already."""
    return parser.add_argument_group(title) if isinstance(parser, argparse.ArgumentParser) else parser


def workload_options(
    parser: argparse._ActionsContainer, *, several: bool = False, extra: str = "", of_mesh: str = ""
) -> None:
    """Add the options for mesh, layout and config settings; `several` allows many meshes and layouts.

    `extra` and `of_mesh` are added to the help texts of --set and --mesh.
    """
    repeated: dict[str, Any] = {"action": "append", "default": []} if several else {}
    default_layout = "; repeat per layout (default: all named layouts)" if several else " (default: no sharding)"
    several_meshes = "; one for all layouts, or one per layout" if several else ""
    group = section(parser, "model and layout")
    option = options_of(group)
    option(
        "--layout RULES",
        f"rules such as 'batch:rows;heads:cols', or the name of a layout in the workload{default_layout}",
        **repeated,
    )
    option(
        "--mesh AXES",
        f"axes such as 'rows:2;cols:4'{several_meshes}{of_mesh} (default: the mesh of the named layout)",
        **repeated,
    )
    config_options(group, extra)


def config_options(parser: argparse._ActionsContainer, extra: str = "") -> None:
    """Add the options for config settings; `extra` is added to the help text of --set."""
    option = options_of(parser)
    option(
        "--set KEY=VALUE",
        f"set a value of the workload's config, such as d_model=512{extra}; may be repeated",
        action="append",
        default=[],
        dest="settings",
    )


def typed(kind: Any) -> Callable[[str], Any]:
    """A parser of an option's value, of a type that `errors.values` reads."""

    def parse(text: str) -> Any:
        try:
            return read("", text, kind, is_text=True)
        except UsageError as error:
            raise argparse.ArgumentTypeError(error.args[0]) from None

    return parse


count = typed(Annotated[int, Bounds(0, LARGEST)])
positive = typed(Annotated[int, Bounds(1, LARGEST)])
integer = typed(Annotated[int, Bounds(-(10**40), 10**40)])
factor = typed(Annotated[float, Bounds(1, above=True)])
share = typed(Annotated[float, Bounds(0, 1)])
cpu_devices = typed(Annotated[int, Bounds(1, MOST_DEVICES)])


def printable(text: str) -> str:
    """Text that may come from a file, with control characters escaped; line ends are kept."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def out_file(text: str) -> Path:
    """Parse an option as an output file, whose folder must exist."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{short(text)} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"no folder {short(str(path.parent))} to write {path.name[:60]!r} in")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a path: {reason_of(error)}") from None
    return path


def reason_of(error: Exception) -> str:
    """The reason of an `OSError` without its number and path, or the text of another error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def write(path: Path, text: str) -> None:
    """Write a file as `errors.files.write_text` does.

    Raises `UsageError` if it cannot, and `MeshdslError` if the disk is full or broken.
    """
    from ...errors.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        message = f"{path} cannot be written: {reason_of(error)}"
        if error.errno in _FULL:
            raise MeshdslError(message) from None
        raise UsageError(message) from None


_results: list[Any] = []


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Sends all that is printed to stderr meanwhile, except the records of `print_json`."""
    _results.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


def discard_output() -> None:
    """Drop what is printed from now on to a stream that cannot be written, also what Python flushes when it exits."""
    for stream in (*_results, sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def leave(code: int) -> NoReturn:
    """End the process now, without what Python and JAX do at exit."""
    for stream in (*_results, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line on stderr, unless it cannot be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard_output()


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record with the schema version as one JSON line on stdout."""
    line = json.dumps({"schema_version": SCHEMA_VERSION, **plain(record)}, allow_nan=False)
    print(line, file=_results[-1] if _results else sys.stdout, flush=True)


def answer(options: argparse.Namespace, record: Mapping[str, Any], text: object) -> None:
    """Print the result of a command: its record with `--json`, otherwise its text."""
    if options.json:
        print_json(record)
    else:
        print(text)


def version() -> str:
    """The installed version of meshdsl."""
    from ... import __version__

    return __version__


def workload_of(options: argparse.Namespace) -> Any:
    """The workload named by the options, with their settings applied."""
    from ...train import configure, load

    workload = load(options.workload)
    return configure(workload, options.settings)
