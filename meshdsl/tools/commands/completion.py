"""`meshdsl completion SHELL` prints a script that completes commands, options and values, made from the parser.

The scripts ask `meshdsl completion workloads FILE` and `meshdsl completion layouts FILE:NAME` for the names in a file.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import OK
from .declared import layouts_of, workloads_of

__all__ = ["add"]

SHELLS = ("bash", "zsh", "fish")
NAMES = ("workloads", "layouts")  # what a script asks for
FILES = {"FILE", "PATH", "DIR", "DIRECTORY", "FOLDER"}  # metavars of options whose values are files
MODELS = Path(__file__).parent.parent.parent.parent / "models"
MACHINES = Path(__file__).parent.parent.parent / "cost" / "machines"

_HELP = """\
install it for your user:
  meshdsl completion bash > ~/.local/share/bash-completion/completions/meshdsl
  meshdsl completion zsh > ~/.zfunc/_meshdsl      (with fpath=(~/.zfunc $fpath) before compinit)
  meshdsl completion fish > ~/.config/fish/completions/meshdsl.fish
"""


@dataclass(frozen=True)
class Option:
    """One option of a command. `values` are its choices; `is_file`: its value is a file."""

    name: str
    about: str
    takes_value: bool
    values: tuple[str, ...]
    is_file: bool
    is_layout: bool = False


Commands = dict[str, tuple[str, list[Option]]]  # by name: what the command does, and its options


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in bash, zsh or fish",
        description="Print a script that completes commands, options and their values.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = (*SHELLS, *NAMES)
    parser.add_argument("shell", metavar="SHELL", choices=choices, help="bash, zsh or fish; workloads or layouts of OF")
    parser.add_argument("of", metavar="OF", nargs="?", default="", help="a model file, or one of its workloads")
    parser.set_defaults(run=run, parser=parser, json=False, commands=commands)


def run(options: argparse.Namespace) -> int:
    """Print the script, or the names that a script asks for."""
    if options.shell in NAMES:
        file, _, name = options.of.partition(":")
        workloads = [f"{file}:{name}" for name in workloads_of(Path(file))]
        print(*(layouts_of(Path(file), name) if options.shell == "layouts" else workloads), sep="\n")
        return OK
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](commands_of(options.commands)), end="")
    return OK


def commands_of(commands: Any) -> Commands:
    """The subcommands as argparse stores them: name, help and options."""
    about = {action.dest: action.help or "" for action in commands._choices_actions}
    return {name: (about[name], _options(parser)) for name, parser in commands.choices.items()}


def _options(parser: argparse.ArgumentParser) -> list[Option]:
    return [
        Option(
            name,
            " ".join((action.help or "").split()),
            action.nargs != 0,
            tuple(map(str, action.choices)) if action.choices else _known(name),
            isinstance(action.metavar, str) and action.metavar in FILES,
            name == "--layout",
        )
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    ]


def _known(option: str) -> tuple[str, ...]:
    """The values of an option whose choices the parser does not list: machines, and models that read weights."""
    if option == "--machine":
        return tuple(sorted(path.stem for path in MACHINES.glob("*.toml")))
    return _models() if option == "--model" else ()


def _models() -> tuple[str, ...]:
    files = sorted(MODELS.glob("*.py"))
    return tuple(path.stem for path in files if "hugging_face=" in path.read_text(encoding="utf-8"))


def bash(commands: Commands) -> str:
    """The script for bash."""
    values, names = [], []
    for command, (_, options) in commands.items():
        names.append(f"    {command}) known={_quoted(option.name for option in options)} ;;")
        for option in options:
            if option.is_layout:
                values.append(f'    "{command} --layout") COMPREPLY=($(compgen -W "$layouts" -- "$word")); return ;;')
            elif option.values:
                words = _quoted(option.values)
                values.append(f'    "{command} {option.name}") COMPREPLY=($(compgen -W {words} -- "$word")); return ;;')
            elif option.is_file:
                values.append(f'    "{command} {option.name}") COMPREPLY=($(compgen -f -- "$word")); return ;;')
            elif option.takes_value:
                values.append(f'    "{command} {option.name}") return ;;')
    return f"""\
# bash completion of meshdsl, from `meshdsl completion bash`
_meshdsl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} known=""
  local colon=$before file="" layouts=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {_quoted((*commands, "--help", "--version"))} -- "$word"))
    return
  fi
  case "$word $before" in
    ": "*) colon=: file=$before word="" ;;
    *" :") file=${{COMP_WORDS[COMP_CWORD-2]}} ;;
  esac
  if [ "$colon" = ":" ]; then
    COMPREPLY=($(compgen -W "$(meshdsl completion workloads "$file" 2>/dev/null | sed 's/^[^:]*://')" -- "$word"))
    return
  fi
  if [ "$before" = "--layout" ]; then
    file=$(printf '%s\n' "$COMP_LINE" | grep -o '[^ ]*[.]py:[A-Za-z_0-9]*' | head -n 1)
    layouts=$(meshdsl completion layouts "$file" 2>/dev/null)
  fi
  case "$command $before" in
{_lines(values)}
  esac
  case "$command" in
{_lines(names)}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$known" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _meshdsl meshdsl
"""


def zsh(commands: Commands) -> str:
    """The script for zsh."""
    values, names = [], []
    for command, (_, options) in commands.items():
        names.append(f"      {command}) compadd -- {' '.join(option.name for option in options)} ;;")
        for option in options:
            if option.is_layout:
                values.append(f'    "{command} --layout") compadd -- ${{(f)layouts}}; return ;;')
            elif option.values:
                values.append(f'    "{command} {option.name}") compadd -- {" ".join(option.values)}; return ;;')
            elif option.is_file:
                values.append(f'    "{command} {option.name}") _files; return ;;')
            elif option.takes_value:
                values.append(f'    "{command} {option.name}") return ;;')
    described = [f"    {shlex.quote(f'{name}:{about}')}" for name, (about, _) in commands.items()]
    return f"""\
#compdef meshdsl
# zsh completion of meshdsl, from `meshdsl completion zsh`
_meshdsl() {{
  local -a described=(
{_lines(described)}
  )
  if (( CURRENT == 2 )); then
    _describe command described
    return
  fi
  local layouts=""
  [[ $words[CURRENT-1] == --layout ]] && layouts=$(meshdsl completion layouts "${{words[(r)*.py:*]}}" 2>/dev/null)
  if [[ $PREFIX == *.py:* ]]; then
    compadd -- ${{(f)"$(meshdsl completion workloads "${{PREFIX%%:*}}" 2>/dev/null)"}}
    return
  fi
  case "$words[2] $words[CURRENT-1]" in
{_lines(values)}
  esac
  if [[ $PREFIX == -* ]]; then
    case "$words[2]" in
{_lines(names)}
    esac
  else
    _files
  fi
}}
compdef _meshdsl meshdsl
"""


def fish(commands: Commands) -> str:
    """The script for fish."""
    lines = [
        "# fish completion of meshdsl, from `meshdsl completion fish`",
        "function __meshdsl_layouts",
        "    set -l workload (string match -r '\\S+\\.py:\\w+' -- (commandline -cp))",
        '    test -n "$workload"; and meshdsl completion layouts $workload[1] 2>/dev/null',
        "end",
        "complete -c meshdsl -n 'string match -q \"*.py:*\" -- (commandline -ct)' "
        "-a '(meshdsl completion workloads (string split -f1 : -- (commandline -ct)) 2>/dev/null)'",
    ]
    for command, (about, options) in commands.items():
        lines.append(f"complete -c meshdsl -n __fish_use_subcommand -f -a {command} -d {shlex.quote(about)}")
        for option in options:
            start = f"complete -c meshdsl -n '__fish_seen_subcommand_from {command}' -l {option.name[2:]}"
            value = f" -x -a {_quoted(option.values)}" if option.values else " -r -F" if option.is_file else " -x"
            value = " -x -a '(__meshdsl_layouts)'" if option.is_layout else value
            lines.append(f"{start}{value if option.takes_value else ''} -d {shlex.quote(option.about)}")
    return _lines(lines) + "\n"


def _quoted(words: Any) -> str:
    return shlex.quote(" ".join(words))


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)
