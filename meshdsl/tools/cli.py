"""The command `meshdsl`. Results go to stdout, progress and errors to stderr; with `--json`, results are JSON lines.

Exit codes: 0 ok, 1 failure, 2 usage, 3 illegal layout or over memory, 4 corrupt checkpoint, 5 non-finite loss,
69 another process of the run ended or was late, 75 stopped by SIGTERM and saved, 130 interrupted. JAX is imported only
by commands that need it; `--help` works without.

Whatever a command raises is a message on stderr without a traceback (`MESHDSL_TRACEBACK=full` shows it). A model file
runs the user's code, which may raise anything, also `SystemExit`: the message then shows its line.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from ..errors import InternalError, LayoutError, MeshdslError, nearest, raised, text_of
from ..errors.installed import check_jax
from ..errors.no_effect import reported
from .commands import (
    analyze,
    compare,
    devices,
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
from .commands.common import (
    FAILURE,
    ILLEGAL_LAYOUT,
    INTERRUPTED,
    discard_output,
    json_lines,
    leave,
    printable,
    reason_of,
    say,
    version,
)

COMMANDS = (
    *(init, list_, doctor),
    *(analyze, compare, search, scale, explain, verify),
    *(train, import_, generate, export),
)

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
            69 another process of the run ended, or a step took longer than --step-timeout,
            75 stopped by SIGTERM and saved, 130 interrupted (saved if --checkpoints is given)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit code; --help and mistakes raise `SystemExit`."""
    options = _parsed(arguments)
    try:
        if options.run.__module__ != doctor.__name__:  # which reports an old JAX itself
            check_jax()
        with contextlib.ExitStack() as stack:
            if options.json:
                stack.enter_context(json_lines())
            if not getattr(options, "strict", True):
                stack.enter_context(reported(_warn_once()))
            code = options.run(options)
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, and there is nothing to save
        discard_output()
        return FAILURE
    except BaseException as error:
        discard_output()
        if os.environ.get("MESHDSL_TRACEBACK"):
            traceback.print_exc()
        known = error if isinstance(error, MeshdslError) else _explained(error, getattr(options, "workload", None))
        say(f"{type(known).__name__}: {printable(str(known))}")
        code = getattr(known, "exit_code", ILLEGAL_LAYOUT if isinstance(known, LayoutError) else FAILURE)
        if devices.is_one_of_several():  # JAX would wait for the other processes, which may wait for this one
            leave(code)
        return code


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; an unknown one is named with one that is spelled nearly alike, or with commands that have it."""
    root, commands = parsers()
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-") and words[0] not in commands:
        is_workload = ".py" in words[0] or ":" in words[0]
        guess = f"write meshdsl train {words[0]}" if is_workload else nearest(words[0], commands)
        root.error(f"no command {words[0]!r}; {guess}")
    options, more = root.parse_known_args(words)
    if not more:
        return options
    unknown = next((word.partition("=")[0] for word in more if word.startswith("--")), "")
    command: argparse.ArgumentParser = options.parser
    having = [name for name, each in commands.items() if unknown in each._option_string_actions]
    close = difflib.get_close_matches(unknown, command._option_string_actions, n=1, cutoff=0.75)
    guess = (
        f"; did you mean {close[0]}?" if close else f"; {unknown} is an option of {', '.join(having)}" if having else ""
    )
    command.error(f"unrecognized arguments: {' '.join(more)}{guess}")


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and that of each command."""
    root = argparse.ArgumentParser(
        prog="meshdsl",
        description="Write a model once with named dims, choose a layout for each mesh, and see every collective.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"meshdsl {version()}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    for name, command in commands.choices.items():  # a mistake shows the usage; forty options would hide the message
        words = [str(action.metavar or action.dest) for action in command._positionals._group_actions]
        command.usage = " ".join(["meshdsl", name, *words, "[options]"])
    return root, commands.choices


def _warn_once() -> Callable[[str], object]:
    """A function that prints a warning on stderr, the first time for each text."""
    return functools.cache(lambda text: print(f"warning: {text}; it is dropped", file=sys.stderr))


def _explained(error: BaseException, workload: str | None) -> MeshdslError:
    """The error to print instead: of the user's file, of the machine, or of meshdsl itself."""
    name, text = type(error).__name__, next(iter(text_of(error).splitlines()), "no message")
    if "Unable to initialize backend" in text or "Unknown backend" in text:
        platforms = os.environ.get("JAX_PLATFORMS")
        variable = f"JAX_PLATFORMS is {platforms!r}; " if platforms else ""
        return MeshdslError(f"JAX cannot start: {variable}{text}")
    if name == "ValueError" and "for JAX flag" in text:  # an environment variable, which JAX reads on import
        return MeshdslError(f"JAX cannot start: {text} (an environment variable in capital letters)")
    line = raised(error) if workload is not None else None
    if line is not None:
        problem = f"calls sys.exit({text})" if isinstance(error, SystemExit) else f"fails: {name}: {text}"
        return MeshdslError(f"{workload} {problem}\n  at {line}  {line.source()}".rstrip())
    if isinstance(error, OSError):
        return MeshdslError(": ".join(str(part) for part in (error.filename, reason_of(error)) if part))
    if name == "JaxRuntimeError":
        return MeshdslError(f"the devices could not run the program: {text}")
    if isinstance(error, MemoryError):
        return MeshdslError(f"not enough memory: {text}")
    if isinstance(error, SystemExit):
        return MeshdslError(f"the program was ended by sys.exit({text}), outside of meshdsl")
    frames = traceback.extract_tb(error.__traceback__)
    location = f"\n  at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return InternalError(
        f"{name}: {text}{location}\n  this is a bug in meshdsl; please report it. MESHDSL_TRACEBACK=full shows more"
    )
