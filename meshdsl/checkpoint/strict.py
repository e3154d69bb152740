"""Values from a file that nobody vouches for. Whatever is not exactly what is expected is a `CheckpointError`.

A line of JSON has no NaN or infinity and no key twice; a run's configuration nests no deeper than `DEPTH` and has no
integer of more than 4,096 bits. Checks name the file and the key.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import CheckpointError

__all__ = ["DEPTH", "whole", "items", "keys", "parse", "plain", "refuse", "show", "text"]

DEPTH = 32  # of lists and objects in a run's configuration
_BITS = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


def show(value: Any) -> str:
    """A value for a message, cut short, in printable characters."""
    return ascii(_short.repr(value))[1:-1]


def refuse(where: str, why: str) -> NoReturn:
    """Raises the error about a place in a file."""
    raise CheckpointError(f"{where}: {why}")


def parse(line: bytes, where: str) -> Any:
    """The value of one line of JSON: plain types, finite numbers, no key twice. Its depth is bounded by Python's."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in found:
            if key in made:
                refuse(where, f"the key {show(key)} is there twice")
            made[key] = value
        return made

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(where, f"the number {show(digits)} is not finite")

    def constant(name: str) -> NoReturn:
        refuse(where, f"{name} is not JSON")

    try:
        return json.loads(line.decode("ascii"), object_pairs_hook=pairs, parse_float=number, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise CheckpointError(f"{where}: this is not the JSON that meshdsl writes: {reason}") from None


class _NotPlainError(Exception):
    """Why a value cannot be kept as JSON, and the keys that lead to it, innermost first."""

    def __init__(self, why: str):
        self.why, self.path = why, list[str]()


def plain(value: Any, where: str) -> Any:
    """The value, when it is what JSON can hold and give back; tuples become lists.

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
        raise _NotPlainError(f"it nests deeper than {DEPTH} lists and objects")
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return dict(_pair(key, item, depth) for key, item in value.items())
    there = type(value).__name__
    raise _NotPlainError(f"it holds a {there}, and JSON holds text, numbers, true, false, null, lists, objects")


def _pair(key: Any, item: Any, depth: int) -> tuple[str, Any]:
    if not isinstance(key, str):
        raise _NotPlainError(f"the key {show(key)} is not text")
    try:
        return key, _plain(item, depth + 1)
    except _NotPlainError as problem:
        problem.path.append(show(key)[1:-1])
        raise


def keys(value: Any, wanted: tuple[str, ...], where: str) -> dict[str, Any]:
    """An object with exactly these keys."""
    if not isinstance(value, dict):
        refuse(where, f"expected an object with {', '.join(wanted)}, got {show(value)}")
    unknown, missing = [k for k in value if k not in wanted], [k for k in wanted if k not in value]
    if unknown:
        refuse(where, f"the key {show(unknown[0])} is unknown; there may be: {', '.join(wanted)}")
    if missing:
        refuse(where, f"the key {missing[0]!r} is missing")
    return value


def items(value: Any, where: str, count: int | None = None) -> list[Any]:
    """A list, of this length when one is given."""
    if not isinstance(value, list):
        refuse(where, f"expected a list, got {show(value)}")
    if count is not None and len(value) != count:
        refuse(where, f"expected {count} entries, got {len(value)}")
    return value


def whole(value: Any, where: str, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number from `low` to `high`; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(where, f"expected a whole number, got {show(value)}")
    if not low <= value <= high:
        refuse(where, f"{show(value)} is not from {low} to {high}")
    return value


def text(value: Any, where: str, longest: int) -> str:
    """Text of 1 to `longest` characters."""
    if not isinstance(value, str):
        refuse(where, f"expected text, got {show(value)}")
    if not 1 <= len(value) <= longest:
        refuse(where, f"expected 1 to {longest} characters, got {len(value)}")
    return value
