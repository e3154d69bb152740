"""Strict checks for values from untrusted files. A value that is not as expected raises `CheckpointError`.

JSON with NaN, infinity or repeated keys is refused. A configuration may be nested at most `DEPTH` deep and contain
integers of at most 4,096 bits. Errors name the file and the key.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import CheckpointError

DEPTH = 32  # maximum nesting of lists and objects in a configuration
_BITS = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


def show(value: Any) -> str:
    """A value for an error message, shortened, in printable ASCII."""
    return ascii(_short.repr(value))[1:-1]


def refuse(where: str, reason: str) -> NoReturn:
    """Raises `CheckpointError` about a location in a file."""
    raise CheckpointError(f"{where}: {reason}")


def parse(line: bytes, where: str) -> Any:
    """Parses one line of JSON; refuses numbers that are not finite and repeated keys."""

    def pairs(pairs_: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs_:
            if key in result:
                refuse(where, f"the key {show(key)} is repeated")
            result[key] = value
        return result

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(where, f"the number {show(digits)} is not finite")

    def constant(name: str) -> NoReturn:
        refuse(where, f"{name} is not JSON")

    try:
        return json.loads(line.decode("ascii"), object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise CheckpointError(f"{where}: invalid JSON: {reason}") from None


class _NotPlainError(Exception):
    """A value that cannot be stored as JSON: the reason, and the keys that lead to it, innermost first."""

    def __init__(self, reason: str):
        self.why, self.path = reason, list[str]()


def plain(value: Any, where: str) -> Any:
    """The value as plain JSON types; tuples become lists. Raises `CheckpointError` if JSON cannot store it exactly.

    >>> plain({"betas": (0.9, 0.999)}, "config")
    {'betas': [0.9, 0.999]}
    """
    try:
        return _plain(value, 0)
    except _NotPlainError as problem:
        raise CheckpointError(f"{'.'.join([where, *reversed(problem.path)])}: {problem.why}") from None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        if value.bit_length() > _BITS:
            raise _NotPlainError(f"an integer has more than {_BITS} bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NotPlainError(f"{value} cannot be written as JSON")
        return value
    if depth == DEPTH:
        raise _NotPlainError(f"it is nested deeper than {DEPTH} lists and objects")
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return dict(_pair(key, item, depth) for key, item in value.items())
    kind = type(value).__name__
    raise _NotPlainError(f"it has type {kind}; JSON supports text, numbers, true, false, null, lists and objects")


def _pair(key: Any, item: Any, depth: int) -> tuple[str, Any]:
    if not isinstance(key, str):
        raise _NotPlainError(f"the key {show(key)} is not text")
    try:
        return key, _plain(item, depth + 1)
    except _NotPlainError as problem:
        problem.path.append(show(key)[1:-1])
        raise


def keys(value: Any, expected: tuple[str, ...], where: str) -> dict[str, Any]:
    """The value, which must be an object with exactly the expected keys."""
    if not isinstance(value, dict):
        refuse(where, f"expected an object with {', '.join(expected)}, got {show(value)}")
    unknown, missing = [k for k in value if k not in expected], [k for k in expected if k not in value]
    if unknown:
        refuse(where, f"the key {show(unknown[0])} is unknown; known: {', '.join(expected)}")
    if missing:
        refuse(where, f"the key {missing[0]!r} is missing")
    return value


def items(value: Any, where: str, count: int | None = None) -> list[Any]:
    """The value, which must be a list, of length `count` if given."""
    if not isinstance(value, list):
        refuse(where, f"expected a list, got {show(value)}")
    if count is not None and len(value) != count:
        refuse(where, f"expected {count} entries, got {len(value)}")
    return value


def integer(value: Any, where: str, high: int = 2**63 - 1) -> int:
    """The value, which must be an integer from 0 to `high`, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(where, f"expected an integer, got {show(value)}")
    if not 0 <= value <= high:
        refuse(where, f"{show(value)} is not from 0 to {high}")
    return value


def text(value: Any, where: str, longest: int) -> str:
    """The value, which must be text of 1 to `longest` characters."""
    if not isinstance(value, str):
        refuse(where, f"expected text, got {show(value)}")
    if not 1 <= len(value) <= longest:
        refuse(where, f"expected 1 to {longest} characters, got {len(value)}")
    return value
