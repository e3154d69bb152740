"""The argument parser: one line of usage, that of the command, and a suggestion for a misspelled name."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .colours import bold
from .common import USAGE, shortened

EXPERT = {  # options that most people never need; the help lists them last
    *("--place", "--profile", "--update-group", "--regather", "--microbatches", "--collective-steps", "--non-finite"),
    *("--take-over", "--keep", "--cluster", "--coordinator", "--processes", "--process", "--eval-batches"),
    *("--patience", "--time-limit"),
}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors name the closest command or option."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, allow_abbrev=False, **options)
        self.groups: dict[str, list[str]] = {}  # the commands, in the groups that the help shows

    def format_help(self) -> str:
        """The help: usage, description, commands by group, options, examples. Headings are bold in a terminal."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self._sections():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return re.sub(r"(?m)^[a-z][\w ,]*:", lambda heading: bold(heading[0]), formatter.format_help())

    def _sections(self) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        commands = self.commands()
        listed = {action.dest: action for action in commands._choices_actions} if commands is not None else {}
        for title, names in self.groups.items():
            yield title, [listed[name] for name in names]
        rare = [action for action in self._actions if EXPERT.intersection(action.option_strings)]
        for group in self._action_groups:
            hidden = [*rare, *([commands] if self.groups else [])]
            yield group.title, [a for a in group._group_actions if a not in hidden]
        yield "expert options", rare

    def commands(self) -> argparse._SubParsersAction[Any] | None:
        """The subcommands, if the parser has any."""
        return next((a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; exits with code 2 and a message on stderr if the arguments are wrong."""
        words = list(sys.argv[1:] if args is None else args)
        self._check_command(words)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            parser: Parser = getattr(options, "parser", self)
            parser.error(parser.unknown(unknown))
        return options

    def error(self, message: str) -> NoReturn:
        """Print one line of usage and the message, and exit with code 2."""
        required = [action.metavar or action.dest for action in self._actions if not action.option_strings]
        words = " ".join([self.prog, *map(str, required), "[options]"])
        self.exit(USAGE, f"usage: {words}; {self.prog} --help lists the options\n{self.prog}: error: {message}\n")

    def unknown(self, words: Sequence[str]) -> str:
        """The message for arguments that the parser does not know."""
        word = next((word for word in words if word.startswith("-") and len(word) > 1), None)
        if word is None:
            return f"unexpected argument {shortened(words[0])}"
        name = word.partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        return f"no option {shortened(name)}{_guess(name, known)}"

    def _check_command(self, words: Sequence[str]) -> None:
        """Exits if the first word should be a command and is not."""
        commands = self.commands()
        if commands is None or not words:
            return
        names = list(commands.choices)
        first = next((word for word in words if not re.match("--?.", word)), None)
        if first is not None and first not in names and words.index(first) == 0:
            self.error(f"no command {shortened(first)}{_guess(first, names)}; commands: {', '.join(names)}")


def _guess(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
