"""`meshdsl export`: a step of a run as a file of another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import UsageError
from .common import OK, answer, command, count, options_of
from .weights import base_of_run, checkpoints_of, hub_directory, params_of_run, settings_of_run


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "write a saved step as a safetensors file, an orbax directory or a Hugging Face directory"
    parser = command(commands, "export", run, about, workload=False)
    parser.add_argument("run_directory", metavar="RUN", help="the checkpoint directory of a run")
    parser.add_argument(
        "out", metavar="OUT", help="a file ending in .safetensors, a new directory for orbax, or hf:DIR"
    )
    option = options_of(parser)
    option("--model NAME", "for hf:DIR: the model, as in `meshdsl import`")
    option("--dtype DTYPE", "for hf:DIR: of the tensors (default: that of the parameters)")
    option(
        "--base hf:DIR",
        "for hf:DIR: keep the config.json and tokenizer of this directory (default: those of `meshdsl import`)",
    )
    option("--step N", "the step (default: the newest valid one)", count)
    option("--params-only", "leave the optimizer state out")


def run(options: argparse.Namespace) -> int:
    """Write the file and print its path; raises `CheckpointError` if the step is corrupt."""
    hub = hub_directory(options.out)
    if (hub is None) != (options.model is None):
        raise UsageError("a Hugging Face directory needs both: OUT as hf:DIR, and --model NAME")
    if hub is None and (options.dtype or options.base):
        name = "--dtype" if options.dtype else "--base"
        raise UsageError(f"{name} is for OUT as hf:DIR; other formats keep what the run has")
    suffix = Path(options.out).suffix
    if hub is None and suffix not in ("", ".safetensors"):
        raise UsageError(
            f"OUT is written as a file NAME.safetensors, a new directory for orbax, or hf:DIR; {options.out!r} ends in "
            f"{suffix}"
        )
    checkpoints, step = checkpoints_of(options.run_directory, options.step)
    if hub is not None:
        workload = settings_of_run(options.model, checkpoints, step, []).workload
        given = None if options.base is None else hub_directory(options.base) or Path(options.base)
        base = given or base_of_run(options.run_directory)
        md.export_hugging_face(
            params_of_run(checkpoints, step, workload), workload, hub, dtype=options.dtype, base=base
        )
    else:
        export = md.export_safetensors if options.out.endswith(".safetensors") else md.export_orbax
        export(checkpoints, step, options.out, prefix="params/" if options.params_only else "")
    record = {"command": "export", "step": step, "file": options.out, "params_only": options.params_only}
    answer(options, record, f"step {step} written to {options.out}")
    return OK
