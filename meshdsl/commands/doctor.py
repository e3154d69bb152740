"""`meshdsl doctor`: versions and devices, and whether they are what meshdsl is tested with."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from .common import FAILURE, OK, command, out_file, say, version

__all__ = ["add"]


def add(commands: Any) -> None:
    """Declare the command."""
    about = "versions and devices, and whether they are what meshdsl is tested with"
    parser = command(commands, "doctor", run, about, workload=False)
    parser.add_argument(
        "--calibrate",
        nargs="?",
        const="",
        type=_machine_file,
        metavar="FILE",
        help="measure this computer's CPU instead, and write its machine file, which --machine cpu reads (default: "
        "in $MESHDSL_MACHINES or ~/.config/meshdsl/machines)",
    )
    parser.add_argument("--quick", action="store_true", help="with --calibrate: fewer points, a third of the time")


def run(options: argparse.Namespace) -> int:
    """Say what there is, and every problem with it; or measure the machine."""
    if options.calibrate is not None:
        return _calibrate(options)
    if options.quick:
        from ..train import UsageError

        raise UsageError("--quick goes with --calibrate, and there is no --calibrate")
    found, problems = _examine()
    if options.json:
        say({"command": "doctor", **found, "problems": problems, "ok": not problems})
    else:
        for key, value in found.items():
            print(f"{key:<14}{value if isinstance(value, str) else ', '.join(value)}")
        for problem in problems:
            print(f"problem: {problem}")
        print("something needs attention" if problems else "all is well")
    return FAILURE if problems else OK


def _machine_file(text: str) -> str:
    """A path that `--machine` will take for a file."""
    if text and not text.endswith(".toml"):
        raise argparse.ArgumentTypeError(f"a machine file ends in .toml, got {text!r}")
    return str(out_file(text)) if text else ""


def _calibrate(options: argparse.Namespace) -> int:
    """Measure; the result is the path of the file and what it says."""
    import jax

    import meshdsl as md

    jax.config.update("jax_platforms", "cpu")
    md.host_devices(8)
    from ..compilers.calibrate import calibrate

    path = calibrate(options.calibrate or None, quick=options.quick)
    found = md.machine(path)
    if options.json:
        say({"command": "doctor", "machine_file": str(path), "machine": found.name, "title": found.title})
    else:
        print(f"{found}\nwritten to {path}")
    return OK


def _examine() -> tuple[dict[str, Any], list[str]]:
    """What this machine has, and what about it is not as meshdsl is tested."""
    import importlib.metadata  # slow to import, and `--help` reads this file
    import platform

    wanted = _requirements()
    found: dict[str, Any] = {"meshdsl": version(), "python": platform.python_version(), "system": platform.platform()}
    problems = []
    for name in ("jax", "jaxlib", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
            problems.append(f"{name} is not installed; pip install {name}{wanted.get(name, '')}")
            continue
        if not _within(found[name], wanted.get(name, "")):
            problems.append(f"{name} {found[name]} is outside the tested range {wanted[name]}")
    found["tested jax"] = wanted.get("jax", "unknown")
    found["cpu cores"] = str(os.cpu_count())
    try:
        import jax

        found["devices"] = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except Exception as error:  # whatever a broken plugin raises: report it, that is what a doctor is for
        problems.append(f"JAX finds no device: {type(error).__name__}: {error}")
    return found, problems


def _requirements() -> dict[str, str]:
    """The ranges of versions that meshdsl's own metadata states."""
    import importlib.metadata

    try:
        lines = importlib.metadata.requires("meshdsl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    parsed = (re.match(r"([\w.-]+)\s*([<>=!~][^;]*)?(;.*)?$", line) for line in lines)
    return {m[1]: (m[2] or "").strip() for m in parsed if m and not m[3]}


def _within(version: str, wanted: str) -> bool:
    """
    >>> _within("0.10.2", "<0.11,>=0.10.2"), _within("0.11.0", "<0.11,>=0.10.2"), _within("1.0", "")
    (True, False, True)
    """
    numbers = _numbers(version)
    for bound in wanted.split(","):
        match = re.match(r"\s*(>=|<)\s*([\d.]+)", bound)
        if match and (numbers >= _numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
