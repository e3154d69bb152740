"""`meshdsl init`: writes a model file and the settings of a run, to start from; their texts are in `templates/`."""

from __future__ import annotations

import argparse
import keyword
from pathlib import Path
from string import Template
from typing import Any

from ...errors import UsageError
from .common import OK, answer, command, out_file, write

_TEMPLATES = Path(__file__).with_name("templates")


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
    for path, template in ((model, "model.txt"), (settings, "settings.txt")):
        text = Template((_TEMPLATES / template).read_text(encoding="utf-8"))
        write(path, text.substitute(file=model, name=name, settings=settings))
    text = (
        f"wrote {model} and {settings}; now:\n\n"
        f"  meshdsl list {model}:{name}\n"
        f"  meshdsl train {model}:{name} --config {settings}\n"
        f"  meshdsl compare {model}:{name} --layout data --layout both"
    )
    answer(options, {"command": "init", "model": str(model), "settings": str(settings), "workload": name}, text)
    return OK


_TAKEN = {"Config", "LAYOUTS", "inputs", "model", "loss", "data", "md", "np", "annotations", "Callable", "dataclass"}
