"""`meshdsl import`: a Hugging Face directory as the first step of a run."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import meshdsl as md

from ...errors import UsageError
from .common import OK, answer, command, options_of, write
from .weights import BASE, hub_directory, layout_options, started


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "read a Hugging Face directory into sharded parameters, and save them as the first step of a run"
    parser = command(commands, "import", run, about, workload=False)
    parser.add_argument("source", metavar="hf:DIR", help="a directory with config.json and safetensors files")
    option = options_of(parser)
    option("--model NAME", "llama, transformer:lm, or file.py:name", required=True)
    option("--out RUN", "the checkpoint directory of the run (default: only check)")
    option("--dtype DTYPE", 'of parameters and products; "stored": that of the files (default: float32)')
    option("--compute-dtype DTYPE", "of products (default: bfloat16, for files in 16 bits)")
    layout_options(parser)


def run(options: argparse.Namespace) -> int:
    """Import, save and print what was imported; raises `CheckpointError` with all that does not fit."""
    from ...train import load, resolve
    from ...train.weights.export import copy_files

    directory = hub_directory(options.source)
    if directory is None:
        raise UsageError(f"write the directory as hf:DIR, got {options.source[:60]!r}")
    source = options.model
    workload = load(source)
    mesh, layout = started(options, workload)
    dtypes = {"dtype": options.dtype, "compute_dtype": options.compute_dtype}
    workload, params = md.import_hugging_face(directory, workload, mesh, layout, **dtypes)
    if workload.hugging_face.merged is not None:  # adapters, which no file has
        draw = md.compile(lambda key: {p: x for p, x in workload.init(key)[0].items() if p not in params}, mesh, layout)
        params = {**params, **draw(md.random.key(0))}
    count = sum(math.prod(d.size for d in x.dims) for x in params.values())
    config = workload.config
    dtypes = {"dtype": config.param_dtype, "compute_dtype": config.compute_dtype}
    summary = {"parameters": count, "tensors": len(params), **dtypes, "run": options.out}
    if options.out is not None:
        values = {f"config.{f.name}": getattr(workload.config, f.name) for f in dataclasses.fields(workload.config)}
        place = {"mesh": options.mesh, "layout": options.layout, "checkpoints.directory": options.out}
        _save(resolve(source, None, [], {**values, **place}), params, mesh, layout)
        base = Path(options.out) / BASE
        base.mkdir(exist_ok=True)
        copy_files(directory, base)
    text = f"{count:,} parameters of {options.source} in {len(params)} tensors, {config.param_dtype}"
    if config.compute_dtype != config.param_dtype:
        text += f"; products in {config.compute_dtype} (--dtype and --compute-dtype choose others)"
    if options.out is not None:
        text += (
            f"\nsaved as step 0 of {options.out}; to train: meshdsl train {source} --config {options.out}/config.toml"
        )
    answer(options, {"command": "import", "source": options.source, "model": source, **summary}, text)
    return OK


def _save(settings: Any, params: Any, mesh: Any, layout: Any) -> None:
    """Save parameters and a new optimizer state as step 0, and the settings beside it."""
    from ...train import Keeping
    from ...train.state import State

    workload, folder = settings.workload, Path(settings.checkpoints.directory)
    names = {d.name for x in params.values() for d in x.dims}
    rules = {dim: axes for dim, axes in layout.rules.items() if dim in names}  # not those of the batch
    state = md.compile(workload.optimizer(workload.config).init, mesh, md.Layout(rules))(params)
    with md.Checkpoints(folder) as checkpoints:
        keeping = Keeping(checkpoints, config=settings.to_dict())
        keeping.save(State({"params": params, "state": state}), settings.train.seed, wait=True)
    write(folder / "config.toml", str(settings))
