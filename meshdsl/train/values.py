"""A value of a configuration: read from the text of an option, checked when it comes from TOML, written as TOML.

Its type is the annotation of its field: bool, int, float, str, a choice, a tuple or list of these, or one of these or
None. TOML has no None; there and on the command line it is the text `none`.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import meshdsl as md

__all__ = ["UsageError", "as_json", "checked", "read", "written"]


class UsageError(md.MeshdslError):
    """The command line asks for what is not there."""

    exit_code = 2


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read(key: str, text: str, kind: Any) -> Any:
    """The value that an option's text stands for.

    >>> read("sizes", "1, 2", tuple[int, ...]), read("scale", "none", float | None)
    ((1, 2), None)

    Raises `UsageError` for a text that the type cannot hold.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if type(None) in options and text.lower() == "none":
            return None
        return _first(key, text, options, read)
    if origin is typing.Literal:
        return _choice(key, text, options)
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind in (int, float, str):
            return kind(text)
        if _is_list(kind):
            return _listed(key, [part.strip() for part in text.split(",") if part.strip()], kind, read)
    except (KeyError, ValueError):
        raise UsageError(f"{key} is {_article(kind)}, got {_shown(text)}") from None
    raise UsageError(f"{key} is {_article(kind)}, which cannot be given as text; set it in the file")


def checked(key: str, value: Any, kind: Any) -> Any:
    """A value of a TOML file as its field's type; a whole number will do for a float. Raises `UsageError`."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if type(None) in options and value == "none":
            return None
        return _first(key, value, options, checked)
    if origin is typing.Literal:
        return _choice(key, value, options)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UsageError(f"{key} is a number, and {_shown(value)} is beyond the largest") from None
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    if _is_list(kind) and isinstance(value, list):
        return _listed(key, value, kind, checked)
    if origin is dict and isinstance(value, dict):
        return {name: checked(f"{key}.{name}", part, options[1]) for name, part in value.items()}
    if kind not in (bool, int, float, str) and not _is_list(kind):
        raise UsageError(f"{key} is {_article(kind)}, which a file cannot give; set it in the workload's file")
    raise UsageError(f"{key} is {_article(kind)}, got {_shown(value)}")


def written(value: Any) -> str:
    """The value as TOML; `read` or `checked` gives it back.

    >>> print(written(True), written(1e-3), written((1, 2)), written(None), written('a "b"'))
    true 0.001 [1, 2] "none" "a \\"b\\""
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf: as TOML has them
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def as_json(value: Any) -> Any:
    """The value as JSON has it; what JSON lacks, a number that is not finite too, as its text.

    >>> as_json({"scale": float("inf"), "sizes": (1, 2)})
    {'scale': 'inf', 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _first(key: str, value: Any, options: tuple[Any, ...], how: Any) -> Any:
    """The value as the first of several types that takes it; the first one's complaint when none does."""
    problem: UsageError | None = None
    for option in options:
        if option is not type(None):
            try:
                return how(key, value, option)
            except UsageError as error:
                problem = problem or error
    raise problem or UsageError(f"{key} is none, got {_shown(value)}")


def _choice(key: str, value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        if isinstance(value, bool) == isinstance(option, bool) and str(value) == str(option):
            return option
    raise UsageError(f"{key} is one of {', '.join(map(str, options))}, got {_shown(value)}")


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) in (tuple, list) and typing.get_args(kind) != ()


def _listed(key: str, parts: Sequence[Any], kind: Any, how: Any) -> Any:
    """A list or tuple of these parts: each as `how` takes it."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and options[-1] is not Ellipsis:
        if len(parts) != len(options):
            raise UsageError(f"{key} is {_article(kind)}, got {len(parts)} of them")
        return tuple(how(key, part, option) for part, option in zip(parts, options, strict=True))
    return typing.get_origin(kind)(how(key, part, options[0]) for part in parts)


def _article(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if _is_list(kind):
        options = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and options[-1] is not Ellipsis:
            return f"a list of {len(options)} values"
        return f"a list, each of them {words.get(options[0], 'a value')}"
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**40:  # Python refuses to print numbers of thousands of digits
        return "a number of more than 40 digits"
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
