"""Read and check machine files: every problem is reported at once, with its key. An example:

title = "NVIDIA A100 80 GB, eight to a node"
device = "GPU"
vector = 19.5e12            # FLOP/s
hbm = 80e9                  # bytes
hbm_bandwidth = 2.0e12      # bytes/s
launch = 6e-6               # seconds
efficiency = [[1e8, 0.1], [1e11, 0.7]]      # FLOPs of a matrix product, fraction of the peak
[peak]                      # FLOP/s by dtype; `other` is for those not named
bfloat16 = 312e12
[network]
launch = 20e-6
[[network.level]]           # inner to outer
kind = "switch"
axes = { gpu = 8 }
bandwidth = 230e9
[[network.measured]]        # group: its devices in each level
kind = "all_reduce"
group = [8]
points = [[1048576, 92e-6], [1073741824, 8.2e-3]]       # bytes of the whole array, seconds
[mode.compiled]             # other figures of the same hardware, see `machine`
operation = 0.0             # seconds
[sources]
hbm = "data sheet"

Check the values of a machine file: each check returns the value and records a problem under its key.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MeshdslError, nearest
from ..targets import device_words
from .network import KINDS, Network, NetworkTier, TimeTable


class MachineError(MeshdslError, ValueError):
    """An unknown machine, or a malformed machine file; lists every problem with its key.

    >>> import meshdsl as md
    >>> md.machine("tpu-v5")
    Traceback (most recent call last):
        ...
    meshdsl.cost.machine_file.MachineError: no machine is called 'tpu-v5'; did you mean 'tpu-v5p'? there are: ...
    """


def read_toml(path: Path, kind: str, way_out: Callable[[], str]) -> dict[str, Any]:
    """The content of a TOML file; raises `MachineError`, with the way out, if it is missing or cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MachineError(f"there is no {kind} {path}{way_out()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"the {kind} {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"the {kind} {path} is not TOML: {error}") from None


RATES = ("vector", "hbm", "hbm_bandwidth", "launch")
FACTORS = ("transcendental", "overlap_slowdown", "operation", "attention", "tdp", "host_bandwidth", "capability")
NUMBERS = (*RATES, *FACTORS)
CURVES = {"efficiency": "FLOPs, fraction", "convolution": "FLOPs, fraction", "memory": "bytes, fraction"}
ASYNCHRONY = ("asynchronous", "overlapped_by_compiler")
SOFTWARE = (*ASYNCHRONY, "pipelined", "reached", "uncertainty")
OPTIONAL = (*FACTORS, *SOFTWARE, "memory", "convolution", "tile", "mode", "sources")
TOP = ("title", "device", *RATES, "efficiency", "peak", "network", *OPTIONAL)
MODE = (*NUMBERS, *CURVES, *SOFTWARE)  # what a mode may replace


def read(document: Mapping[str, Any], file: str) -> dict[str, Any]:
    """All fields of a `Machine` except name and file; raises `MachineError` with every problem of the document."""
    checks = Checks()
    checks.names("", document, TOP)
    missing = [key for key in TOP if key not in document and key not in OPTIONAL]
    checks.problems += [f"{key}: missing" for key in missing]
    values = {key: document[key] for key in document if key in TOP}
    fields: dict[str, Any] = {
        key: checks.number(key, values[key], least=_least(key)) for key in NUMBERS if key in values
    }
    known: dict[str, Sequence[str]] = {"title": (), "device": device_words()}
    fields |= {key: checks.text(key, values[key], words) for key, words in known.items() if key in values}
    fields |= {key: checks.curve(key, what, values[key]) for key, what in CURVES.items() if key in values}
    of_key = {"peak": checks.peak, "network": checks.network, "reached": checks.reached}
    of_key |= {"uncertainty": checks.uncertainty, "tile": partial(checks.whole, "tile"), "pipelined": checks.pipelined}
    fields |= {key: check(values[key]) for key, check in of_key.items() if key in values}
    checks.modes(values.get("mode", {}), MODE)
    fields |= {key: checks.kinds(key, values[key]) for key in ASYNCHRONY if key in values}
    if "asynchronous" in fields:
        fields.setdefault("overlapped_by_compiler", fields["asynchronous"])
    flash = values.get("mode", {}).get("flash", {}) if isinstance(values.get("mode", {}), dict) else {}
    if isinstance(flash, dict) and "attention" in flash:
        fields["fused_attention"] = checks.number("mode.flash.attention", flash["attention"], least=_least("attention"))
    fields["sources"] = checks.sources(values.get("sources", {}))
    if checks.problems:
        raise MachineError("\n  ".join([f"the machine file {file} has something wrong", *checks.problems]))
    return fields


def _least(key: str) -> float:
    return {"overlap_slowdown": 1.0, "launch": 0.0, "operation": 0.0}.get(key, math.ulp(0.0))


REGIMES = ("compute", "launch", "network")  # what an estimate depends on most
LEVEL = ("kind", "axes", "bandwidth", "latency", "wrap", "share", "device_bandwidth")
MEASURED = ("kind", "group", "points")
LEVEL_KINDS = ("torus", "ring", "switch", "mesh")


class Checks:
    """Each check returns the value and records any problem under its key."""

    def __init__(self):
        self.problems: list[str] = []

    def wrong(self, key: str, what: str) -> None:
        self.problems.append(f"{key}: {what}")

    def names(self, key: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                self.wrong(f"{key}.{name}" if key else name, f"unknown key; {nearest(name, known)}")

    def table(self, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.wrong(key, f"a table is expected, got {value!r}")
        return {}

    def tables(self, key: str, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, list) and all(isinstance(each, dict) for each in value):
            return value
        self.wrong(key, f"written as [[{key}]], once for each, got {value!r}")
        return []

    def number(self, key: str, value: Any, least: float = math.ulp(0.0), most: float = math.inf) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and least <= value <= most:
            return float(value)
        bounds = "above 0" if least == math.ulp(0.0) else f"of at least {least:g}"
        self.wrong(
            key, f"a number {bounds}{'' if most == math.inf else f' and at most {most:g}'} is expected, got {value!r}"
        )
        return 1.0

    def whole(self, key: str, value: Any, least: int = 1) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.wrong(key, f"a whole number of at least {least} is expected, got {value!r}")
        return least

    def text(self, key: str, value: Any, known: Sequence[str] = ()) -> str:
        if not isinstance(value, str) or not value:
            self.wrong(key, f"a text is expected, got {value!r}")
        elif known and value not in known:
            self.wrong(key, f"unknown {value!r}; {nearest(value, known)}")
        return str(value)

    def peak(self, value: Any) -> dict[str, float]:
        peak = self.table("peak", value)
        for name in peak:
            if name != "other" and not _is_dtype(name):
                self.wrong(f"peak.{name}", "no dtype has this name; write float32, bfloat16, int8, ... or other")
        if not peak:
            self.wrong("peak", "at least one dtype is needed")
        return {name: self.number(f"peak.{name}", rate) for name, rate in peak.items()}

    def reached(self, value: Any) -> dict[str, float]:
        """Factors on the efficiency of products, by dtype."""
        factors = self.table("reached", value)
        for name in factors:
            if not _is_dtype(name):
                self.wrong(f"reached.{name}", "no dtype has this name; write float32, bfloat16, int8, ...")
        return {name: self.number(f"reached.{name}", factor, most=1.0) for name, factor in factors.items()}

    def uncertainty(self, value: Any) -> float | dict[str, float]:
        """One half-width, or one for each regime."""
        if not isinstance(value, dict):
            return self.number("uncertainty", value, least=0.0)
        self.names("uncertainty", value, REGIMES)
        missing = [name for name in REGIMES if name not in value]
        if missing:
            self.wrong("uncertainty", f"missing for {', '.join(missing)}")
        return {name: self.number(f"uncertainty.{name}", width, least=0.0) for name, width in value.items()}

    def pipelined(self, value: Any) -> bool:
        if not isinstance(value, bool):
            self.wrong("pipelined", f"true or false is expected, got {value!r}")
        return bool(value)

    def modes(self, value: Any, keys: Sequence[str]) -> None:
        """Tables of the `keys` that a mode replaces; their values are checked in `read` of a machine in that mode."""
        for name, mode in self.table("mode", value).items():
            self.names(f"mode.{name}", self.table(f"mode.{name}", mode), keys)

    def kinds(self, key: str, value: Any) -> tuple[str, ...]:
        """Kinds of collectives."""
        if not isinstance(value, list):
            self.wrong(key, f"a list of kinds of collectives is expected, got {value!r}")
            return ()
        return tuple(self.text(f"{key}[{i}]", kind, KINDS) for i, kind in enumerate(value))

    def pairs(self, key: str, value: Any, what: str) -> list[tuple[float, float]]:
        """Pairs of numbers with increasing first numbers."""
        if not isinstance(value, list) or not value or not all(isinstance(p, list) and len(p) == 2 for p in value):
            self.wrong(key, f"a list of pairs [{what}] is expected, got {value!r}")
            return []
        pairs = [(self.number(f"{key}[{i}]", a), self.number(f"{key}[{i}]", b)) for i, (a, b) in enumerate(value)]
        if not _increasing(a for a, _ in pairs):
            self.wrong(key, f"the first of each pair [{what}] must increase")
        return pairs

    def curve(self, key: str, what: str, value: Any) -> tuple[tuple[float, float], ...]:
        """Fractions of a rate, by size."""
        pairs = self.pairs(key, value, what)
        for i, (_, fraction) in enumerate(pairs):
            self.number(f"{key}[{i}]", fraction, most=1.0)
        return tuple(pairs)

    def network(self, value: Any) -> Network:
        table = self.table("network", value)
        self.names("network", table, ("launch", "combine", "level", "measured"))
        levels = [self.level(f"network.level[{i}]", level)
                  for i, level in enumerate(self.tables("network.level", table.get("level", [])))]  # fmt: skip
        if not levels:
            self.wrong("network.level", "at least one level is needed")
        axes = [axis for level in levels for axis in level.axes]
        for axis in sorted({axis for axis in axes if axes.count(axis) > 1}):
            self.wrong("network.level", f"two levels have a hardware axis {axis!r}; give them different names")
        measured = [self.measured(f"network.measured[{i}]", item, levels)
                    for i, item in enumerate(self.tables("network.measured", table.get("measured", [])))]  # fmt: skip
        seen = [(item.kind, item.group) for item in measured]
        for kind, group in sorted({key for key in seen if seen.count(key) > 1}):
            self.wrong("network.measured", f"two tables are of {kind} over {list(group)}; keep one")
        launch = self.number("network.launch", table.get("launch", 0.0), least=0.0)
        limits = self.table("network.combine", table.get("combine", {}))
        self.names("network.combine", limits, KINDS)
        combine = {kind: self.number(f"network.combine.{kind}", limit) for kind, limit in limits.items()}
        return Network(tuple(levels), launch, tuple(measured), combine)

    def level(self, key: str, entries: Mapping[str, Any]) -> NetworkTier:
        self.names(key, entries, LEVEL)
        for name in ("kind", "axes", "bandwidth"):
            if name not in entries:
                self.wrong(f"{key}.{name}", "missing")
        kind = self.text(f"{key}.kind", entries.get("kind", "switch"), LEVEL_KINDS)
        axes = self.table(f"{key}.axes", entries.get("axes", {"x": 1}))
        sizes = {axis: self.whole(f"{key}.axes.{axis}", size) for axis, size in axes.items()}
        if not sizes or (kind != "torus" and len(sizes) > 1):
            self.wrong(
                f"{key}.axes", f"a {kind} has {'one axis' if kind != 'torus' else 'at least one axis'}, got {axes!r}"
            )
        if "wrap" in entries and kind != "torus":
            self.wrong(f"{key}.wrap", f"only the axes of a torus wrap, not those of a {kind}")
        return NetworkTier(
            kind=kind,
            axes=sizes,
            bandwidth=self.number(f"{key}.bandwidth", entries.get("bandwidth", 1.0)),
            latency=self.number(f"{key}.latency", entries.get("latency", 0.0), least=0.0),
            wrap=self.whole(f"{key}.wrap", entries.get("wrap", 0), least=0),
            share=self.whole(f"{key}.share", entries.get("share", 1)),
            device_bandwidth=self.number(f"{key}.device_bandwidth", entries["device_bandwidth"])
            if "device_bandwidth" in entries
            else math.inf,
        )

    def measured(self, key: str, entries: Mapping[str, Any], levels: Sequence[NetworkTier]) -> TimeTable:
        self.names(key, entries, MEASURED)
        for name in MEASURED:
            if name not in entries:
                self.wrong(f"{key}.{name}", "missing")
        kind = self.text(f"{key}.kind", entries.get("kind", KINDS[0]), KINDS)
        group = entries.get("group", [])
        if not isinstance(group, list) or len(group) > len(levels):
            self.wrong(f"{key}.group", f"devices in each of the {len(levels)} levels, inner to outer, got {group!r}")
            group = []
        counts = tuple(self.whole(f"{key}.group", n) for n in group)
        for n, level in zip(counts, levels, strict=False):
            if n > level.size:
                self.wrong(f"{key}.group", f"{n} devices in a level of {level.size}")
        points = self.pairs(f"{key}.points", entries["points"], "bytes, seconds") if "points" in entries else []
        if any(later < sooner for (_, sooner), (_, later) in pairwise(points)):
            self.wrong(f"{key}.points", "more bytes take less time; smooth the measurements")
        return TimeTable(kind, counts, tuple(points))

    def sources(self, value: Any) -> dict[str, str]:
        return {key: self.text(f"sources.{key}", text) for key, text in self.table("sources", value).items()}


def _increasing(values: Iterable[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _is_dtype(name: str) -> bool:
    try:
        import ml_dtypes  # noqa: F401  names bfloat16 and the 8-bit floats for NumPy

        return np.dtype(name).name == name
    except TypeError:
        return False
