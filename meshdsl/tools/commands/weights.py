"""Options and functions shared by the commands that read or write weights: models by name, `hf:DIR`, saved steps."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import UsageError, nearest_path
from . import devices
from .common import cpu_devices, options_of, reason_of

HUB = "hf:"
BASE = "base"  # the folder of a run with the files of its Hugging Face directory that hold no weights


def layout_options(parser: argparse.ArgumentParser) -> None:
    """Add `--layout`, `--mesh` and `--devices`, for a command that runs as a single process."""
    option = options_of(parser)
    option("--layout RULES", "rules, or the name of a layout of the model")
    option("--mesh AXES", "axes such as 'rows:2;cols:4'")
    option("--devices N", "run on N CPU devices", cpu_devices)
    parser.set_defaults(coordinator=None, processes=None, process=None, cluster="none")


def started(options: argparse.Namespace, workload: Any) -> tuple[Any, Any]:
    """Start JAX for the mesh of the options; returns the mesh and the layout."""
    from ...train import mesh_and_layout

    mesh, layout = mesh_and_layout(workload, options.layout, options.mesh)
    devices.check(options, mesh)
    devices.start(options, mesh)
    return mesh, layout


def hub_directory(text: str) -> Path | None:
    """The directory of `hf:DIR`, or None for other text."""
    return Path(text.removeprefix(HUB)) if text.startswith(HUB) else None


def settings_of_run(source: str, checkpoints: Any, step: int, changes: list[str]) -> Any:
    """The settings with which a step was saved; `changes` are given as KEY=VALUE."""
    from ...train import resolve

    saved = checkpoints.restore(step, like={}).config
    config = saved.get("config") if isinstance(saved, Mapping) else None
    if not isinstance(config, Mapping):
        raise UsageError(f"step {step} of {checkpoints.directory} was not saved by `meshdsl train` or `meshdsl import`")
    known = leaves(resolve(source).to_dict()["config"], "config.")
    values = {key: value for key, value in leaves(config, "config.").items() if key in known}
    return resolve(source, None, changes, values)


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key.

    >>> leaves({"train": {"steps": 3}})
    {'train.steps': 3}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def checkpoints_of(text: str, step: int | None) -> tuple[Any, int]:
    """The checkpoints of a run's directory, and the step; raises `UsageError` if there is none."""
    from ...train.checkpoint.arguments import is_url

    try:
        is_directory = is_url(text) or Path(text).is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN cannot be read: {reason_of(error)}") from None
    if not is_directory:
        raise UsageError(
            f"there is no directory {text[:60]!r}; give that of a run, or hf:DIR\n  {nearest_path(Path(text), '*/')}"
        )
    checkpoints = md.Checkpoints(text)
    step = checkpoints.latest() if step is None else step
    if step is None or step not in checkpoints.steps():
        saved = ", ".join(map(str, checkpoints.steps())) or "none"
        raise UsageError(f"{text} has no step {'' if step is None else step}\n  steps: {saved}")
    return checkpoints, step


def base_of_run(run: str) -> Path | None:
    """The folder of a run with the config.json and the tokenizer that `meshdsl import` copied; None without them."""
    folder = Path(run) / BASE
    with contextlib.suppress(OSError):  # a name that is too long
        return folder if (folder / "config.json").is_file() else None
    return None


def params_of_run(checkpoints: Any, step: int, workload: Any, **where: Any) -> dict[str, Any]:
    """The parameters of a saved step, on one device or under a mesh and a layout."""
    specs = workload.model(workload.config).specs(workload.inputs(workload.config))
    return checkpoints.restore(step, like={"params": specs}, **where).tree["params"]
