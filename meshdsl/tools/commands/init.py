"""`meshdsl init`: writes a model file and the settings of a run, to start from.

The texts that `meshdsl init` writes: a model file and the settings of a run.
"""

from __future__ import annotations

import argparse
import keyword
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .common import OK, answer, command, out_file, write


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "write a model file and a TOML file of settings that train, to start from"
    parser = command(commands, "init", run, about, workload=False)
    parser.add_argument("file", metavar="FILE", type=_model_file, help="the model file to write, such as mine.py")


def _model_file(text: str) -> Path:
    """Parse the path of a model file; its name is the workload's."""
    path = out_file(text)
    if path.suffix != ".py" or not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise argparse.ArgumentTypeError(f"must be named like a Python module, such as mine.py, got {path.name[:60]!r}")
    return path


def run(options: argparse.Namespace) -> int:
    """Write both files, unless one exists."""
    model, settings = options.file, options.file.with_suffix(".toml")
    for path in (model, settings):
        if path.exists():
            raise UsageError(f"{path} exists already, and init overwrites nothing\n  name another file, or remove it")
    name = "model_" + model.stem if model.stem in _TAKEN else model.stem
    words = (str(model), name, str(settings))
    write(model, model_text(*words))
    write(settings, settings_text(*words))
    text = (
        f"wrote {model} and {settings}; now:\n\n"
        f"  meshdsl list {model}:{name}\n"
        f"  meshdsl train {model}:{name} --config {settings}\n"
        f"  meshdsl compare {model}:{name} --layout data --layout both"
    )
    answer(options, {"command": "init", "model": str(model), "settings": str(settings), "workload": name}, text)
    return OK


_TAKEN = {"Config", "LAYOUTS", "inputs", "model", "loss", "data", "md", "np", "annotations", "Callable", "dataclass"}


_MODEL = '''"""A model to start from: two layers that learn a function of random inputs. Replace it with yours.

    meshdsl train {file}:{name} --config {settings}
    meshdsl compare {file}:{name} --layout data --layout both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import meshdsl as md
import numpy as np


@dataclass(frozen=True)
class Config:
    """Sizes and the learning rate; `--set hidden=512` changes one."""

    batch: int = 64
    io: int = 8
    hidden: int = 64
    learning_rate: float = 1e-2


# name: the mesh and the rules; `--layout NAME` picks one. The model mentions mesh axes nowhere
LAYOUTS = {{
    "data": ("rows:8", "batch:rows"),
    "hidden": ("cols:8", "hidden:cols"),
    "both": ("rows:2 cols:4", "batch:rows; hidden:cols"),
}}


def inputs(config: Config) -> dict[str, object]:
    """The dims of a batch."""
    return {{
        "x": md.spec([md.Dim("batch", config.batch), md.Dim("io", config.io)]),
        "target": md.spec([md.Dim("batch", config.batch)]),
    }}


def model(config: Config) -> md.Model:
    """The prediction [batch] for x [batch, io]."""
    io, hidden = md.Dim("io", config.io), md.Dim("hidden", config.hidden)

    def two_layers(batch: dict[str, md.Tensor]) -> md.Tensor:
        w = md.param("w", [io, hidden], init=md.init.he(fan_in="io"))
        bias = md.param("bias", hidden, init=md.init.zeros())
        v = md.param("v", hidden, init=md.init.lecun(fan_in="hidden"))
        h = md.relu(md.einsum(batch["x"], w, out="batch hidden") + bias)
        return md.einsum(h, v, out="batch")

    return md.model(two_layers)


def loss(config: Config) -> Callable[..., md.Tensor]:
    """The mean squared error."""
    predict = model(config)

    def squared_error(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.Tensor:
        return md.mean(md.square(predict(params, batch) - batch["target"]))

    return squared_error


def data(config: Config, seed: int) -> Callable[[str, int], dict[str, np.ndarray]]:
    """Batches by split ("train" or "held_out") and step: the target is the sum of |x|, centred."""

    def batch(split: str, step: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([seed, split == "train", step])
        x = random.standard_normal((config.batch, config.io)).astype(np.float32)
        return {{"x": x, "target": np.abs(x).sum(1) - config.io * 0.8}}

    return batch


{name} = md.Workload(
    name="{name}",
    config=Config(),
    model=model,
    inputs=inputs,
    loss=loss,
    optimizer=lambda config: md.optim.adam(config.learning_rate),
    layouts=LAYOUTS,
    data=data,
)
'''

_SETTINGS = """# Settings of a run: meshdsl train {file}:{name} --config {settings}
# `--print-config` prints every setting. Options on the command line override this file.

layout = "both"

[train]
steps = 300
eval_every = 100

[config]
hidden = 128
"""


def model_text(file: str, name: str, settings: str) -> str:
    """The model file, which defines the workload `name`."""
    return _MODEL.format(file=file, name=name, settings=settings)


def settings_text(file: str, name: str, settings: str) -> str:
    """The settings of a run of it."""
    return _SETTINGS.format(file=file, name=name, settings=settings)
