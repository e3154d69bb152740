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
[mode.compiled]             # other figures of the same hardware, see `machine_modes`
operation = 0.0             # seconds
[sources]
hbm = "data sheet"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import MeshdslError
from .machine_checks import Checks

__all__ = ["MachineError", "read", "read_toml"]


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
FACTORS = ("transcendental", "overlap_slowdown", "operation", "attention", "tdp", "host_bandwidth")
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
    fields |= {key: checks.text(key, values[key]) for key in ("title", "device") if key in values}
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
