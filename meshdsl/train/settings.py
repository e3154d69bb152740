"""What a run is: its workload and layout, how it trains, what it keeps. Each value is given in one of four places.

A later place wins: the defaults, the TOML file, the settings `a.b=value`, the options of the command line. A key
that is not there is an error with the nearest one. What comes out can be printed as TOML, and is the same file again.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import meshdsl as md

from .load import load, nearest
from .values import UsageError, as_json, checked, read, written

__all__ = ["Saving", "Settings", "Training", "resolve"]

_LONGEST = 1 << 20  # bytes of a configuration file


@dataclass(frozen=True)
class Training:
    """How the run trains: the table [train]."""

    steps: int = 100
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 8
    weight_update: Literal["replicated", "sharded", "auto"] = "replicated"
    machine: str | None = None  # what weight_update "auto" decides for
    non_finite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10


@dataclass(frozen=True)
class Saving:
    """What the run keeps: the table [checkpoints]."""

    directory: str | None = None
    save_every: int = 100
    keep: int = 3
    resume: str = "auto"  # or never, or the path of a step, or of a directory of them


@dataclass(frozen=True)
class _Place:
    mesh: str | None = None
    layout: str | None = None


_AT_LEAST = {"steps": 0, "eval_every": 0, "eval_batches": 0, "max_skips": 1, "save_every": 1, "keep": 1}
_TABLES = {"train": Training, "checkpoints": Saving, "config": None}


@dataclass(frozen=True)
class Settings:
    """A run, resolved. `print` shows it as TOML."""

    source: str  # file.py:name
    workload: md.Workload
    mesh: str | None = None
    layout: str | None = None
    train: Training = field(default_factory=Training)
    checkpoints: Saving = field(default_factory=Saving)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON, by table."""
        return as_json(self._tables())

    def __str__(self) -> str:
        return "\n".join(_table("", self._tables())).strip() + "\n"

    def _tables(self) -> dict[str, Any]:
        return {
            "workload": self.source,
            "mesh": self.mesh,
            "layout": self.layout,
            "train": dataclasses.asdict(self.train),
            "checkpoints": dataclasses.asdict(self.checkpoints),
            "config": dataclasses.asdict(self.workload.config),
        }


def resolve(
    source: str, file: Path | None = None, settings: Iterable[str] = (), options: Mapping[str, Any] | None = None
) -> Settings:
    """The run that a workload's name, a TOML file, settings and options ask for.

    `options` has values by dotted key, such as `train.steps`; None is an option that was not given. A setting without
    a table (`d_model=512`) is one of the workload's config. Raises `UsageError` for a key that is not there, with the
    nearest one, and for a value that its key cannot hold.
    """
    workload = load(source)
    kinds = {"mesh": str | None, "layout": str | None}
    for table, kind in _TABLES.items():
        kinds |= _fields(type(workload.config) if kind is None else kind, f"{table}.")
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _flat(_parsed(file), kinds):
            if key == "workload" and value == source:  # what --print-config wrote
                continue
            kind = kinds[_known(key, kinds, str(file))]
            try:
                values[key] = checked(key, value, kind)
            except UsageError:  # what --print-config wrote may come back, of any type
                if not key.startswith("config.") or written(value) != written(_present(workload.config, key)):
                    raise
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"a setting is written key=value, for example d_model=512; got {setting!r}")
        key = key if key in kinds or key.partition(".")[0] in _TABLES else f"config.{key}"
        if key.startswith("config.") and key not in kinds:
            fields = [name.removeprefix("config.") for name in kinds if name.startswith("config.")]
            name = key.removeprefix("config.")
            raise UsageError(f"the config of {workload.name} has no {name!r}{nearest(name, fields)}")
        shown = key.removeprefix("config.")
        kind = kinds[_known(key, kinds, "a run")]
        values[key] = read(shown, text, kind)
    values |= {key: value for key, value in (options or {}).items() if value is not None}
    return _made(source, workload, values, list(settings))


def _made(source: str, workload: md.Workload, values: Mapping[str, Any], settings: list[str]) -> Settings:
    for key, value in values.items():
        low = _AT_LEAST.get(key.partition(".")[2]) if not key.startswith("config.") else None
        if low is not None and value < low:
            raise UsageError(f"{key} is at least {low}, got {value}")
        if key in ("checkpoints.directory", "checkpoints.resume", "train.machine") and value == "":
            raise UsageError(f"{key} is empty")
    try:
        config = _replaced(workload.config, "config.", values)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, md.MeshdslError):
            raise
        asked = " ".join(settings) or "what the file gives"
        raise UsageError(f"the config of {workload.name} does not take {asked}: {error}") from error
    return Settings(
        source,
        dataclasses.replace(workload, config=config),
        values.get("mesh"),
        values.get("layout"),
        _replaced(Training(), "train.", values),
        _replaced(Saving(), "checkpoints.", values),
    )


def _replaced(config: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """The dataclass with the values that have its prefix, those inside its own dataclasses too."""
    changes = {}
    for f in dataclasses.fields(config):
        inner = getattr(config, f.name)
        if f"{prefix}{f.name}" in values:
            changes[f.name] = values[f"{prefix}{f.name}"]
        elif dataclasses.is_dataclass(inner) and any(key.startswith(f"{prefix}{f.name}.") for key in values):
            changes[f.name] = _replaced(inner, f"{prefix}{f.name}.", values)
    return dataclasses.replace(config, **changes) if changes else config


def _present(config: Any, key: str) -> Any:
    """The value that a config has at a key such as `config.drop.keep`."""
    return functools.reduce(getattr, key.split(".")[1:], config)


def _fields(kind: Any, prefix: str) -> dict[str, Any]:
    """The type of every field by dotted key; the fields of a dataclass inside are keys of their own."""
    hints, found = typing.get_type_hints(kind), {}
    for f in dataclasses.fields(kind):
        inner = hints[f.name]
        found |= _fields(inner, f"{prefix}{f.name}.") if dataclasses.is_dataclass(inner) else {prefix + f.name: inner}
    return found


def _parsed(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(_LONGEST + 1)
        if len(raw) > _LONGEST:
            raise UsageError(f"{file} has more than {_LONGEST} bytes, and no configuration has")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not TOML: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise UsageError(f"{file} is not a configuration: its values lie too deep") from None
    except ValueError as error:  # TOML's own errors, and numbers of thousands of digits
        raise UsageError(f"{file} is not TOML: {error}") from None


def _flat(tables: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Values by dotted key. Tables are opened as far as there are keys in them."""
    for name, value in tables.items():
        key = prefix + name
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in kinds):
            yield from _flat(value, kinds, f"{key}.")
        else:
            yield key, value


def _known(key: str, kinds: Mapping[str, Any], where: str) -> str:
    if key in kinds:
        return key
    if key == "workload":
        raise UsageError(f"{where} is for another workload; the one of this run is named on the command line")
    table = key.partition(".")[0]
    near = [name for name in kinds if name.startswith(f"{table}.")] or list(kinds)
    if len(key) > 200:
        key = f"{key[:197]}..."
    raise UsageError(f"{where} has no key {key!r}{nearest(key, near)}")


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    plain = [f"{key} = {written(value)}" for key, value in values.items() if not isinstance(value, dict)]
    lines = ["", *([f"[{name}]"] if name else []), *plain]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _table(f"{name}.{key}" if name else key, value)
    return lines
