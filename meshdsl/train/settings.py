"""The settings of a run: workload, mesh, layout, training and checkpoints.

Four sources are merged; later ones override earlier ones: defaults, a TOML file, settings `a.b=value`, command-line
options. Unknown keys are errors that name the closest key. The result prints as a TOML file with the same settings.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import meshdsl as md

from ..errors import UsageError, nearest
from ..errors.values import Bounds, Count, as_json, load_toml, read, to_toml
from .documents import Documents, read_rows
from .load import filled, load, module_of
from .plans import knobs_of, plan_of_file, plan_on, with_knobs
from .tokens import TokenFiles

_FromZero = Annotated[int, Bounds(0)]


@dataclass(frozen=True)
class Training:
    """Training options: the table [train]."""

    steps: _FromZero = 100
    seed: int = 0
    eval_every: _FromZero = 0
    eval_batches: _FromZero = 8
    weight_update: Literal["replicated", "sharded", "auto"] = "replicated"
    update_group: str | None = None
    regather: bool = False
    remat: str = "model"
    microbatches: Count = 1
    chunks: Count = 1
    overlap: str = "none"
    collective_steps: Literal["auto", "flat", "always"] | None = None  # None: "auto", and the machine is not for steps
    machine: str | None = None  # for weight_update "auto", for an overlap and for collectives in steps
    non_finite: Literal["stop", "skip"] = "stop"
    max_skips: Count = 10
    step_timeout: Annotated[float, Bounds(1, above=True)] | None = None  # times the median step


@dataclass(frozen=True)
class Saving:
    """Checkpoint options: the table [checkpoints]."""

    directory: str | None = None
    save_every: Count = 100
    keep: Count = 3
    resume: str = "auto"  # or never, or the path of a step or of a checkpoint directory
    take_over: bool = False


@dataclass(frozen=True)
class Reading:
    """The data of a run: the table [data]."""

    source: str | None = None  # a file, hf:NAME, or module:function; None: the workload's own
    tokenizer: str | None = None  # a tokenizer file, or a directory with tokenizer.json; None: bytes
    held_out: Annotated[float, Bounds(0, 1)] = 0.05  # the share of the documents for evaluation


_TABLES = {"train": Training, "checkpoints": Saving, "data": Reading, "config": None}


@dataclass(frozen=True)
class Settings:
    """The merged settings of a run. `print` shows them as TOML."""

    source: str  # file.py:name
    workload: md.Workload
    mesh: str | None = None
    layout: str | None = None
    plan: str | None = None  # a file; the other settings override its knobs
    train: Training = field(default_factory=Training)
    checkpoints: Saving = field(default_factory=Saving)
    data: Reading = field(default_factory=Reading)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values, by table."""
        return as_json(self._tables())

    def run_plan(self, devices: int | None = None) -> md.Plan:
        """The plan of the run: that of the file, with the settings' values; raises `LayoutError` for an illegal one.

        So many `devices` fill a mesh axis `name:*`; without them, its size is 1.
        """
        chosen, steps = self.train, self.train.collective_steps
        mesh = None if self.mesh is None else filled(self.mesh, devices)
        plan = plan_on(self.workload, plan_of_file(self.plan), self.layout, mesh).replace(machine=None)
        knobs = {name: getattr(chosen, name) for name in knobs_of(plan)}
        plan = with_knobs(plan, {**knobs, "collective_steps": steps or "auto"})
        return plan.replace(machine=chosen.machine) if plan.needs_machine or steps == "auto" else plan

    def __str__(self) -> str:
        return "\n".join(_toml_lines("", self._tables())).strip() + "\n"

    def _tables(self) -> dict[str, Any]:
        return {
            "workload": self.source,
            "mesh": self.mesh,
            "layout": self.layout,
            "plan": self.plan,
            "train": dataclasses.asdict(self.train),
            "checkpoints": dataclasses.asdict(self.checkpoints),
            **({} if self.data.source is None else {"data": dataclasses.asdict(self.data)}),
            "config": dataclasses.asdict(self.workload.config),
        }


def resolve(
    source: str, file: Path | None = None, settings: Iterable[str] = (), options: Mapping[str, Any] | None = None
) -> Settings:
    """Merges a workload's defaults, a TOML file, settings and command-line options into the settings of a run.

    `options` has values by dotted key, such as `train.steps`; None means that the option was not given. A setting
    without a table (`d_model=512`) belongs to the workload's config. Raises `UsageError` for an unknown key, with the
    closest known one, and for a value of the wrong type.
    """
    workload = load(source)
    kinds = {"mesh": str | None, "layout": str | None, "plan": str | None}
    for table, kind in _TABLES.items():
        kinds |= _fields(type(workload.config) if kind is None else kind, f"{table}.")
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _flatten(load_toml(file, ""), kinds):
            if key == "workload" and value == source:  # written by --print-config
                continue
            kind = kinds[_known_key(key, kinds, str(file))]
            try:
                values[key] = read(key, value, kind)
            except UsageError:  # --print-config also writes fields whose type cannot be parsed
                if not key.startswith("config.") or to_toml(value) != to_toml(_current_value(workload.config, key)):
                    raise
    values |= dict(_parsed(workload, setting, kinds) for setting in settings)
    values |= {key: value for key, value in (options or {}).items() if value is not None}
    return _build(source, workload, values, list(settings))


def _build(source: str, workload: md.Workload, values: Mapping[str, Any], settings: list[str]) -> Settings:
    for key, value in values.items():
        if key in ("plan", "checkpoints.directory", "checkpoints.resume", "train.machine") and value == "":
            raise UsageError(f"{key} must not be empty")
    values = {**_of_plan(plan_of_file(values.get("plan"))), **values}
    found = _replace(Settings(source, _configured(workload, values, settings)), "", values)
    return dataclasses.replace(found, workload=with_data(found.workload, found.data))


def with_data(workload: md.Workload, data: Reading) -> md.Workload:
    """The workload with the data of a run, if that is given; raises `UsageError` for inputs that it does not have."""
    if data.source is None:
        if data.tokenizer is not None:
            raise UsageError("--tokenizer has no effect without --data")
        return workload
    source, tokenizer, share = data.source, data.tokenizer, data.held_out
    module, colon, name = source.partition(":")
    if colon and module != "hf" and name.isidentifier():
        function = getattr(module_of(module), name, None)
        if not callable(function):
            raise UsageError(f"{module} has no function {name!r}, with f(config, seed)(split, step) -> dict of arrays")
        return dataclasses.replace(workload, data=function)
    fields = [f.name for f in dataclasses.fields(workload.config)]
    inputs = {*workload.inputs(workload.config)} - {"segments"}
    if not {"batch", "length", "vocab"} <= {*fields} or inputs != {"tokens", "targets"}:
        raise UsageError(f"--data {source} is text, for models of tokens and targets, and not for {workload.name}")

    def read(config: Any, seed: int) -> Any:
        sizes = {"seed": seed, "batch": config.batch, "length": config.length}
        if source.endswith(".bin"):
            return TokenFiles([source], [source], dtype="uint16" if config.vocab <= 1 << 16 else "uint32", **sizes)
        documents = Documents(read_rows(source), tokenizer=tokenizer, held_out=share, **sizes)
        documents.check(config.vocab)
        return documents

    return dataclasses.replace(workload.replace(packed=True) if "packed" in fields else workload, data=read)


def configure(workload: md.Workload, settings: Iterable[str] = ()) -> md.Workload:
    """The workload with `key=value` settings applied to its config; values are parsed as the type of their field.

    Raises `UsageError` for an unknown key, and for a value that the field's type does not accept.
    """
    settings, kinds = list(settings), _fields(type(workload.config), "config.")
    return _configured(workload, dict(_parsed(workload, setting, kinds, ()) for setting in settings), settings)


def _parsed(
    workload: md.Workload, setting: str, kinds: Mapping[str, Any], tables: Collection[str] = _TABLES
) -> tuple[str, Any]:
    """The dotted key and the value of `key=value`; a key without one of the tables belongs to the config."""
    key, equals, text = setting.partition("=")
    if not equals:
        raise UsageError(f"write a setting as key=value, for example d_model=512; got {setting!r}")
    key = key if key in kinds or key.partition(".")[0] in tables else f"config.{key}"
    name = key.removeprefix("config.")
    if name != key and key not in kinds:
        fields = [known.removeprefix("config.") for known in kinds if known.startswith("config.")]
        raise UsageError(f"the config of {workload.name} has no {name!r}; {nearest(name, fields)}")
    return key, read(name, text, kinds[_known_key(key, kinds, "a run")], is_text=True)


def _configured(workload: md.Workload, values: Mapping[str, Any], settings: Sequence[str]) -> md.Workload:
    """The workload with the values of its config; `settings` are what the user wrote, for the error."""
    try:
        return dataclasses.replace(workload, config=_replace(workload.config, "config.", values))
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, md.MeshdslError):
            raise
        rejected = " ".join(settings) or "the values of the file"
        raise UsageError(f"the config of {workload.name} rejects {rejected}: {error}") from error


def _of_plan(plan: md.Plan | None) -> dict[str, Any]:
    """The settings of a plan, by dotted key; without its mesh and layout."""
    if plan is None:
        return {}
    knobs = {f"train.{name}": value for name, value in knobs_of(plan).items()}
    if plan.machine is None and plan.steps == "auto":
        knobs["train.collective_steps"] = None
    return {**knobs, "train.machine": plan.machine}


def _replace(config: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """The dataclass with the values whose keys start with `prefix`; recurses into nested dataclasses."""
    changes = {}
    for f in dataclasses.fields(config):
        inner = getattr(config, f.name)
        if f"{prefix}{f.name}" in values:
            changes[f.name] = values[f"{prefix}{f.name}"]
        elif dataclasses.is_dataclass(inner) and any(key.startswith(f"{prefix}{f.name}.") for key in values):
            changes[f.name] = _replace(inner, f"{prefix}{f.name}.", values)
    return dataclasses.replace(config, **changes) if changes else config


def _current_value(config: Any, key: str) -> Any:
    """The value of a config at a dotted key such as `config.drop.keep`."""
    return functools.reduce(getattr, key.split(".")[1:], config)


def _fields(kind: Any, prefix: str) -> dict[str, Any]:
    """The type of every field by dotted key; nested dataclasses are expanded."""
    hints, types = typing.get_type_hints(kind, include_extras=True), {}
    for f in dataclasses.fields(kind):
        inner = hints[f.name]
        types |= _fields(inner, f"{prefix}{f.name}.") if dataclasses.is_dataclass(inner) else {prefix + f.name: inner}
    return types


def _flatten(tables: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values by dotted key; a table is expanded if a known key lies inside it."""
    for name, value in tables.items():
        key = prefix + name
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in kinds):
            yield from _flatten(value, kinds, f"{key}.")
        else:
            yield key, value


def _known_key(key: str, kinds: Mapping[str, Any], where: str) -> str:
    if key in kinds:
        return key
    if key == "workload":
        raise UsageError(f"{where} is for another workload than the one on the command line")
    table = key.partition(".")[0]
    candidates = [name for name in kinds if name.startswith(f"{table}.")] or list(kinds)
    if len(key) > 200:
        key = f"{key[:197]}..."
    raise UsageError(f"{where} has no key {key!r}; {nearest(key, candidates)}")


def _toml_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    plain = [f"{key} = {to_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    lines = ["", *([f"[{name}]"] if name else []), *plain]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _toml_lines(f"{name}.{key}" if name else key, value)
    return lines
