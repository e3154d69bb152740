"""The argument parser: one line of usage, that of the command, and a suggestion for a misspelled name."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .common import USAGE, shortened

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors name the closest command or option."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, allow_abbrev=False, **options)

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
        commands = next((a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)
        if commands is None or not words:
            return
        names = list(commands.choices)
        first = next((word for word in words if not re.match("--?.", word)), None)
        if first is not None and first not in names and words.index(first) == 0:
            self.error(f"no command {shortened(first)}{_guess(first, names)}; commands: {', '.join(names)}")


def _guess(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
