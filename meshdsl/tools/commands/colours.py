"""Colours in a terminal. Mesh axes have the same order of colours as in pictures: blue, orange, purple, green, ...

A stream gets colours if it is a terminal that has them, and `NO_COLOR` is not set (https://no-color.org).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from ...errors.markup import axis_pattern

AXES = ("34", "33", "35", "32", "95", "36")  # in the order of `markup.AXIS_COLOURS`
BOLD, ERROR = "1", "1;31"


def has_colours(stream: Any = None) -> bool:
    """True if text on a stream (default: stdout) is coloured."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return (sys.stdout if stream is None else stream).isatty()
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def painted(text: str, axes: Iterable[str]) -> str:
    """Text for stdout, with the names of mesh axes in their colours."""
    axes = list(axes)
    if not axes or not has_colours():
        return text
    colours = {axis: AXES[i % len(AXES)] for i, axis in enumerate(axes)}

    def mark(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return _in(colours[name], name)

    return re.sub(axis_pattern(axes), mark, text)


def of_error(name: str) -> str:
    """The name of an error for stderr, in red."""
    return _in(ERROR, name) if has_colours(sys.stderr) else name


def bold(text: str) -> str:
    """Text for stdout in bold."""
    return _in(BOLD, text) if has_colours() else text


def _in(colour: str, text: str) -> str:
    return f"\033[{colour}m{text}\033[0m"
