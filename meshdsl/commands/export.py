"""`meshdsl export`: a step of a run as a file of another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import OK, command, count, print_json, reason_of

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "write a saved step as a safetensors file or an orbax directory"
    parser = command(commands, "export", run, about, workload=False)
    parser.add_argument("run_directory", metavar="RUN", help="the checkpoint directory of a run")
    parser.add_argument("out", metavar="OUT", help="a file ending in .safetensors, or a new directory for orbax")
    parser.add_argument("--step", type=count, metavar="N", help="the step (default: the newest valid one)")
    parser.add_argument("--params-only", action="store_true", help="leave the optimizer state out")


def run(options: argparse.Namespace) -> int:
    """Write the file and print its path; raises `CheckpointError` if the step is corrupt."""
    import meshdsl as md

    from ..train import UsageError

    directory = Path(options.run_directory)
    try:
        is_directory = directory.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN cannot be read: {reason_of(error)}") from None
    if not is_directory:
        raise UsageError(f"RUN must be the checkpoint directory of a run; there is no directory {str(directory)!r}")
    checkpoints = md.Checkpoints(directory)
    step = checkpoints.latest() if options.step is None else options.step
    if step is None or step not in checkpoints.steps():
        saved = ", ".join(map(str, checkpoints.steps())) or "none"
        raise UsageError(f"{directory} has no step {'' if step is None else step}\n  steps: {saved}")
    prefix = "params/" if options.params_only else ""
    export = md.export_safetensors if options.out.endswith(".safetensors") else md.export_orbax
    export(checkpoints, step, options.out, prefix=prefix)
    if options.json:
        print_json({"command": "export", "step": step, "file": options.out, "params_only": options.params_only})
    else:
        print(f"step {step} written to {options.out}")
    return OK
