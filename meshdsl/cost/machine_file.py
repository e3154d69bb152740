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
message = 0.5e-6            # seconds of each message of an all_to_all
[[network.level]]           # inner to outer
kind = "switch"
axes = { gpu = 8 }
bandwidth = 230e9
[[network.measured]]        # group: its devices in each level
kind = "all_reduce"
group = [8]
points = [[1048576, 92e-6], [1073741824, 8.2e-3]]       # bytes of the whole array, seconds
[mode.eager]                # other figures of the same hardware, see `machine`
operation = 16e-6           # seconds
[sources]
hbm = "data sheet"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from ..errors import MeshdslError, UsageError
from ..errors.values import AboveZero, Bounds, Count, FromZero, Table, increasing, one_of, read
from ..targets import device_words
from .network import Network, NetworkTier, TimeTable
from .transfer import Kind


class MachineError(MeshdslError, ValueError):
    """An unknown machine, or a malformed machine file; lists every problem with its key.

    >>> import meshdsl as md
    >>> md.machine("tpu-v5")
    Traceback (most recent call last):
        ...
    meshdsl.cost.machine_file.MachineError: no machine is called 'tpu-v5'; did you mean 'tpu-v5p'? there are: ...
    """


def _is_dtype(name: str) -> str | None:
    try:
        import ml_dtypes  # noqa: F401  names bfloat16 and the 8-bit floats for NumPy

        known = np.dtype(name).name == name
    except TypeError:
        known = False
    return None if known else "no dtype has this name; write float32, bfloat16, int8, ... or, of a peak, other"


def _regimes(value: Any) -> str | None:
    missing = [name for name in REGIMES if isinstance(value, dict) and name not in value]
    return f"missing for {', '.join(missing)}" if missing else None


REGIMES = ("compute", "launch", "network")  # what an estimate depends on most
_Text = Annotated[str, lambda text: None if text else "it is empty"]
_Dtype = Annotated[str, lambda name: None if name == "other" else _is_dtype(name)]
_Fraction = Annotated[float, Bounds(0, 1, above=True)]
_Curve = Annotated[tuple[tuple[AboveZero, _Fraction], ...], increasing]
_MODE: dict[str, Any] = {  # what a mode may replace
    "vector": AboveZero,
    "hbm": AboveZero,
    "hbm_bandwidth": AboveZero,
    "launch": FromZero,
    "transcendental": AboveZero,
    "overlap_slowdown": Annotated[float, Bounds(1)],
    "operation": FromZero,
    "attention": AboveZero,
    "tdp": AboveZero,
    "host_bandwidth": AboveZero,
    "capability": AboveZero,
    "efficiency": _Curve,
    "convolution": _Curve,
    "memory": _Curve,
    "asynchronous": tuple[Kind, ...],
    "overlapped_by_compiler": tuple[Kind, ...],
    "pipelined": bool,
    "reached": dict[Annotated[str, _is_dtype], _Fraction],
    "uncertainty": FromZero | Annotated[dict[Annotated[str, one_of(REGIMES)], FromZero], _regimes],
}
MODE = tuple(_MODE)


@dataclass(frozen=True)
class _NetworkTable:
    level: tuple[NetworkTier, ...]
    launch: FromZero = 0.0
    message: FromZero = 0.0
    combine: Mapping[Kind, AboveZero] = field(default_factory=dict)
    measured: tuple[TimeTable, ...] = ()


_REQUIRED = ("title", "device", "vector", "hbm", "hbm_bandwidth", "launch", "efficiency", "peak", "network")
_FILE = _MODE | {
    "title": _Text,
    "device": Annotated[str, one_of(device_words())],
    "peak": dict[_Dtype, AboveZero],
    "network": _NetworkTable,
    "tile": Count,
    "sources": dict[str, _Text],
}


def read_machine(document: Mapping[str, Any], file: str) -> dict[str, Any]:
    """All fields of a `Machine` except name and file; raises `MachineError` with every problem of the document."""
    fields: dict[str, Any] = {}
    try:
        modes = document.get("mode", {})
        mode = Table(dict.fromkeys(modes if isinstance(modes, dict) else (), Table(_MODE)))
        fields = read("", document, Table(_FILE | {"mode": mode}, _REQUIRED))
        problems = [] if fields["peak"] else ["peak: at least one dtype is needed"]
        problems += _network_problems(fields["network"])
    except UsageError as error:
        problems = error.args[0].split("\n")
    if problems:
        raise MachineError("\n  ".join([f"the machine file {file} has something wrong", *problems]))
    if "asynchronous" in fields:
        fields.setdefault("overlapped_by_compiler", fields["asynchronous"])
    flash = fields.pop("mode", {}).get("flash", {})
    network = fields["network"]
    fields["network"] = Network(network.level, network.launch, network.measured, network.combine, network.message)
    return fields | ({"fused_attention": flash["attention"]} if "attention" in flash else {})


def _network_problems(network: _NetworkTable) -> list[str]:
    """The contradictions between the levels of a network."""
    problems = [] if network.level else ["network.level: at least one level is needed"]
    for i, level in enumerate(network.level):
        problems += _level_problems(f"network.level[{i}]", level)
    axes = [axis for level in network.level for axis in level.axes]
    for axis in sorted({axis for axis in axes if axes.count(axis) > 1}):
        problems.append(f"network.level: two levels have a hardware axis {axis!r}; give them different names")
    for i, table in enumerate(network.measured):
        problems += _table_problems(f"network.measured[{i}]", table, network.level)
    seen = [(table.kind, table.group) for table in network.measured]
    for kind, group in sorted({each for each in seen if seen.count(each) > 1}):
        problems.append(f"network.measured: two tables are of {kind} over {list(group)}; keep one")
    return problems


def _level_problems(key: str, level: NetworkTier) -> list[str]:
    problems: list[str] = []
    if not level.axes or (level.kind != "torus" and len(level.axes) > 1):
        count = "at least one axis" if level.kind == "torus" else "one axis"
        problems.append(f"{key}.axes: a {level.kind} has {count}, got {dict(level.axes)}")
    if level.wrap and level.kind != "torus":
        problems.append(f"{key}.wrap: only the axes of a torus wrap, not those of a {level.kind}")
    return problems


def _table_problems(key: str, table: TimeTable, levels: Sequence[NetworkTier]) -> list[str]:
    problems: list[str] = []
    if len(table.group) > len(levels):
        problems.append(f"{key}.group: devices in each of the {len(levels)} levels, inner to outer, got {table.group}")
    for n, level in zip(table.group, levels, strict=False):
        if n > level.size:
            problems.append(f"{key}.group: {n} devices in a level of {level.size}")
    if any(later < sooner for (_, sooner), (_, later) in pairwise(table.points)):
        problems.append(f"{key}.points: more bytes take less time; smooth the measurements")
    return problems
