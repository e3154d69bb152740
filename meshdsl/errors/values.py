"""The values of settings, plans, machine files and options: read by their types, and written as TOML.

A type is bool, int, float, str, a Literal, a tuple, list or dict of these, a union, also with None (written as the text
`none`), a dataclass (a table of its fields), or one of these with `Annotated`: `Bounds` of a number, or a function of
the value that returns what is wrong with it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from . import MeshdslError, UsageError, nearest, short

LONGEST = 1 << 20  # bytes of a file of settings, and of a workload's file
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MAPPINGS = (dict, collections.abc.Mapping)
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The least and the largest value of a finite number; `least` itself is excluded if `above`."""

    least: float
    most: float = math.inf
    above: bool = False

    def holds(self, value: Any) -> bool:
        lowest = self.least < value if self.above else self.least <= value
        return lowest and value <= self.most and abs(value) < math.inf

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'from'} {self.least:g}"
        return lower if self.most == math.inf else f"{lower} {'and at most' if self.above else 'to'} {self.most:g}"


def one_of(words: Sequence[str]) -> Callable[[str], str | None]:
    """A check for `Annotated`: the text is one of these words."""
    return lambda word: None if word in words else f"unknown {word!r}; {nearest(word, words)}"


def increasing(pairs: Sequence[tuple[float, float]]) -> str | None:
    """A check for `Annotated`: the first numbers of the pairs increase."""
    return None if all(a < b for (a, _), (b, _) in pairwise(pairs)) else "the first numbers of its pairs must increase"


AboveZero = Annotated[float, Bounds(0, above=True)]
FromZero = Annotated[float, Bounds(0)]
Count = Annotated[int, Bounds(1)]


def load_toml(path: Path, what: str, error: type[MeshdslError] = UsageError) -> dict[str, Any]:
    """The content of a TOML file, which `what` describes; raises `error` if it cannot be read."""
    try:
        return parse_toml(_start_of(path, what, error).decode("utf-8"), f"{what} {path}".lstrip(), error)
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}".lstrip()) from None
    except UnicodeDecodeError as problem:
        raise error(f"{what} {path} is not TOML: byte {problem.start} is not UTF-8".lstrip()) from None


def load_json(path: Path) -> Any:
    """The content of a JSON file; raises `UsageError` if it cannot be read."""
    try:
        return json.loads(_start_of(path, "", UsageError).decode("utf-8"))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read as JSON: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{path} cannot be read as JSON: {short(str(problem))}") from None


def _start_of(path: Path, what: str, error: type[MeshdslError]) -> bytes:
    with path.open("rb") as stream:
        raw = stream.read(LONGEST + 1)
    if len(raw) > LONGEST:
        raise error(f"{what} {path} has more than {LONGEST} bytes, the limit".lstrip())
    return raw


def parse_toml(text: str, what: str, error: type[MeshdslError]) -> dict[str, Any]:
    """The content of TOML text; raises `error` if it is malformed."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{what} is not TOML: its values are nested too deeply") from None
    except ValueError as problem:  # TOML's own errors, and numbers of thousands of digits
        raise error(f"{what} is not TOML: {problem}") from None


@dataclasses.dataclass(frozen=True)
class Table:
    """The type of a table: the types of its keys, and the keys that it must have."""

    kinds: Mapping[str, Any]
    required: Sequence[str] = ()


def read(key: str, value: Any, kind: Any, *, is_text: bool = False) -> Any:
    """The value of a TOML file, or text of the command line, as a value of type `kind`.

    >>> read("sizes", "1, 2", tuple[int, ...], is_text=True), read("scale", "none", float | None)
    ((1, 2), None)
    >>> read("plan", {"mode": "list", "part": 2}, Table({"mode": str, "parts": int}))
    Traceback (most recent call last):
        ...
    meshdsl.errors.UsageError: plan.part: unknown key; did you mean 'parts'? there are: mode, parts
      ...

    In TOML, an integer is accepted for a float. Raises `UsageError` with all problems, a line for each.
    """
    reader = _Reader(is_text)
    found = reader.read(key, value, kind)
    if reader.problems:
        raise UsageError("\n".join(reader.problems))
    return found


class _Reader:
    """Reads values, and collects the problems; a value with a problem is read as None."""

    def __init__(self, is_text: bool):
        self.problems: list[str] = []
        self.is_text = is_text

    def read(self, key: str, value: Any, kind: Any, described: Any = None) -> Any:
        """The value as `kind`; a problem shows the type `described`."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._checked(key, value, kind)
        if origin in (types.UnionType, typing.Union):
            return self._one_of(key, value, args)
        if origin in (tuple, list):
            return self._list(key, value, kind)
        if origin in _MAPPINGS:
            return self._mapping(key, value, args)
        if isinstance(kind, Table):
            return self._table(key, value, kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(key, value, kind)
        if origin is typing.Literal or kind in _NAMES:
            found = _chosen(value, args) if args else _parsed(value, kind) if self.is_text else _converted(value, kind)
            return self._wrong(key, value, described or kind) if found is None else found
        self.problems.append(f"{key} is {_describe(kind)}, which has no text; set it in the workload's file")
        return None

    def _dataclass(self, key: str, value: Any, kind: Any) -> Any:
        before, values = len(self.problems), self._table(key, value, _table_of(kind))
        return None if len(self.problems) > before else kind(**values)

    def _mapping(self, key: str, value: Any, kinds: Sequence[Any]) -> Any:
        if not isinstance(value, dict):
            return self._wrong(key, value, dict[str, Any])
        names = [self.read(f"{key}.{name}", name, kinds[0]) for name in value]
        values = self._table(key, value, Table(dict.fromkeys(value, kinds[1]))).values()
        return dict(zip(names, values, strict=True))

    def _wrong(self, key: str, value: Any, kind: Any) -> None:
        self.problems.append(f"{key} must be {_describe(kind)}, got {_shown(value)}".lstrip())

    def _checked(self, key: str, value: Any, kind: Any) -> Any:
        before, found = len(self.problems), self.read(key, value, typing.get_args(kind)[0], kind)
        for check in () if len(self.problems) > before else kind.__metadata__:
            if isinstance(check, Bounds):
                if not check.holds(found):
                    return self._wrong(key, value, kind)
            elif wrong := check(found):
                self.problems.append(f"{key}: {wrong}" if key else wrong)
        return found

    def _one_of(self, key: str, value: Any, options: Sequence[Any]) -> Any:
        """The value as the first type that accepts it; if none does, the problem is that of the first type."""
        if type(None) in options and (value.lower() if isinstance(value, str) else value) == "none":
            return None
        problems: list[list[str]] = []
        for option in options:
            reader = _Reader(self.is_text)
            found = reader.read(key, value, option) if option is not type(None) else self
            if found is not self and not reader.problems:
                return found
            problems += [reader.problems] if reader.problems else []
        inside = [each for each in problems if not each[0].startswith(f"{key} ")]  # of a table or a list
        self.problems += (inside or problems)[0]
        return None

    def _list(self, key: str, value: Any, kind: Any) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if self.is_text:
            value = [part.strip() for part in value.split(",") if part.strip()]
        has_length = origin is tuple and args[-1] is not Ellipsis
        if not isinstance(value, list) or (has_length and len(value) != len(args)):
            return self._wrong(key, value, kind)
        kinds = args if has_length else args[:1] * len(value)
        return origin(self.read(f"{key}[{i}]", *each) for i, each in enumerate(zip(value, kinds, strict=True)))

    def _table(self, key: str, value: Any, table: Table) -> dict[str, Any]:
        """The values of a table, without unknown keys."""
        if not isinstance(value, dict):
            self._wrong(key, value, table)
            return {}
        prefix, kinds = f"{key}." if key else "", table.kinds
        self.problems += [f"{prefix}{name}: unknown key; {nearest(name, kinds)}" for name in value if name not in kinds]
        self.problems += [f"{prefix}{name}: missing" for name in table.required if name not in value]
        return {name: self.read(prefix + name, value[name], kinds[name]) for name in value if name in kinds}


def _table_of(kind: Any) -> Table:
    """The table of a dataclass's fields."""
    hints, unset = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING
    fields = dataclasses.fields(kind)
    required = [f.name for f in fields if f.default is unset and f.default_factory is unset]
    return Table({f.name: hints[f.name] for f in fields}, required)


def _chosen(value: Any, options: Sequence[Any]) -> Any:
    """The option that is written like this value."""
    same = (x for x in options if str(x) == str(value) and isinstance(x, bool) == isinstance(value, bool))
    return next(same, None)


def _parsed(text: str, kind: Any) -> Any:
    try:
        return _WORDS.get(text.lower()) if kind is bool else kind(text)
    except ValueError:
        return None


def _converted(value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return None
    return value if type(value) is kind else None


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bounds = [str(check) for check in kind.__metadata__ if isinstance(check, Bounds)]
        return " ".join([_describe(args[0]), *bounds])
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (tuple, list):
        is_open = origin is list or args[-1] is Ellipsis
        return f"a list, each {_describe(args[0])}" if is_open else f"a list of {len(args)} values"
    if origin in _MAPPINGS or isinstance(kind, Table) or dataclasses.is_dataclass(kind):
        return "a table"
    return _NAMES.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**40:  # Python does not print integers of thousands of digits
        return "a number of more than 40 digits"
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def to_toml(value: Any) -> str:
    """The value as TOML text; `from_toml` restores it.

    >>> print(to_toml(True), to_toml(1e-3), to_toml((1, 2)), to_toml(None), to_toml({'a "b"': 1}))
    true 0.001 [1, 2] "none" { "a \\"b\\"" = 1 }
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # nan, inf and -inf are valid TOML
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{to_toml(str(name))} = {to_toml(part)}" for name, part in value.items()) + " }"
    return json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def as_json(value: Any) -> Any:
    """The value as JSON; values that JSON does not support, such as infinity, become text.

    >>> as_json({"scale": float("inf"), "sizes": (1, 2)})
    {'scale': 'inf', 'sizes': [1, 2]}
    """
    import numpy as np  # imported here because it is slow, and `--help` imports this file

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
