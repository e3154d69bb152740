"""Configuration values: parsed from command-line text or TOML, and written as TOML.

The type of a value is the annotation of its field: bool, int, float, str, a Literal, a tuple or list of these, or a
union of these, also with None. None is written as the text `none` in TOML and on the command line.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def from_text(key: str, text: str, kind: Any) -> Any:
    """Parses an option's text as a value of type `kind`.

    >>> from_text("sizes", "1, 2", tuple[int, ...]), from_text("scale", "none", float | None)
    ((1, 2), None)

    Raises `UsageError` if the text is not a value of the type.
    """
    found = _of_options(key, text, kind, from_text, text.lower() == "none")
    if found is not _OTHER:
        return found
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind in (int, float, str):
            return kind(text)
        if _is_list(kind):
            return _parse_list(key, [part.strip() for part in text.split(",") if part.strip()], kind, from_text)
    except (KeyError, ValueError):
        raise UsageError(f"{key} must be {_describe(kind)}, got {_shown(text)}") from None
    raise UsageError(f"{key} is {_describe(kind)}, which cannot be given as text; set it in the file")


def from_toml(key: str, value: Any, kind: Any) -> Any:
    """Checks a TOML value against its field's type; an integer is accepted for a float. Raises `UsageError`."""
    found = _of_options(key, value, kind, from_toml, value == "none")
    if found is not _OTHER:
        return found
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(key, value)
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    if _is_list(kind) and isinstance(value, list):
        return _parse_list(key, value, kind, from_toml)
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        of_parts = typing.get_args(kind)[1]
        return {name: from_toml(f"{key}.{name}", part, of_parts) for name, part in value.items()}
    if kind not in (bool, int, float, str) and not _is_list(kind):
        raise UsageError(f"{key} is {_describe(kind)}, which TOML cannot express; set it in the workload's file")
    raise UsageError(f"{key} must be {_describe(kind)}, got {_shown(value)}")


def _as_float(key: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{key} must be a float, and {_shown(value)} is too large") from None


def to_toml(value: Any) -> str:
    """The value as TOML text; `from_toml` restores it.

    >>> print(to_toml(True), to_toml(1e-3), to_toml((1, 2)), to_toml(None), to_toml('a "b"'))
    true 0.001 [1, 2] "none" "a \\"b\\""
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf and -inf are valid TOML
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def as_json(value: Any) -> Any:
    """The value as JSON; values that JSON does not support, such as infinity, become text.

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


_OTHER = object()


def _of_options(key: str, value: Any, kind: Any, parse: Any, is_none: bool) -> Any:
    """The value as one of the types of a union, or as a value of a Literal; `_OTHER` for another kind of type."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if type(None) in options and is_none else _first_of(key, value, options, parse)
    return _choice(key, value, options) if origin is typing.Literal else _OTHER


def _first_of(key: str, value: Any, options: tuple[Any, ...], parse: Any) -> Any:
    """Parses the value as the first type that accepts it; if none does, raises the first type's error."""
    problem: UsageError | None = None
    for option in options:
        if option is not type(None):
            try:
                return parse(key, value, option)
            except UsageError as error:
                problem = problem or error
    raise problem or UsageError(f"{key} must be none, got {_shown(value)}")


def _choice(key: str, value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        if isinstance(value, bool) == isinstance(option, bool) and str(value) == str(option):
            return option
    raise UsageError(f"{key} must be one of {', '.join(map(str, options))}, got {_shown(value)}")


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) in (tuple, list) and typing.get_args(kind) != ()


def _parse_list(key: str, parts: Sequence[Any], kind: Any, parse: Any) -> Any:
    """Parses each part with `parse` and returns a list or tuple."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and options[-1] is not Ellipsis:
        if len(parts) != len(options):
            raise UsageError(f"{key} must be {_describe(kind)}, got {len(parts)}")
        return tuple(parse(key, part, option) for part, option in zip(parts, options, strict=True))
    return typing.get_origin(kind)(parse(key, part, options[0]) for part in parts)


def _describe(kind: Any) -> str:
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    if _is_list(kind):
        options = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and options[-1] is not Ellipsis:
            return f"a list of {len(options)} values"
        return f"a list with elements that are {words.get(options[0], 'a value')}"
    return words.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**40:  # Python does not print integers of thousands of digits
        return "a number of more than 40 digits"
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
