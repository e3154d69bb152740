"""Exported directories give the logits of the imported ones in `transformers`.

    .venv/bin/python -m tests.models.references.round_trip FOLDER
    hf/bin/python tests/models/references/round_trip.py FOLDER

The first, in meshdsl's environment, imports every reference and exports it twice, with the files of its base and alone.
The second, in an environment with `torch` and any release of `transformers`, prints the largest errors of logits, in
float32, of the reference itself and of both exports. The references are of transformers 5; 4 misreads some of them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def write(folder: Path) -> None:
    """Export each reference to NAME.base and NAME.own."""
    import meshdsl as md
    from meshdsl.train import load

    for config in sorted(HERE.glob("*/config.json")):
        workload, params = md.import_hugging_face(config.parent, load(str(config)))
        md.export_hugging_face(params, workload, folder / f"{config.parent.name}.base", base=config.parent)
        md.export_hugging_face(params, workload, folder / f"{config.parent.name}.own")


def read(folder: Path) -> None:
    """Print a row of a table for each reference: the largest errors of logits, as far as a directory is read."""
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    newest = int(transformers.__version__.partition(".")[0]) > 4
    experts = {"experts_implementation": "eager"} if newest else {}
    print(f"| transformers {transformers.__version__} | reference | export with its base | export alone |")
    print("|---|--:|--:|--:|")
    for base in sorted(config.parent for config in HERE.glob("*/config.json")):
        expected = load_file(base / "reference.safetensors")
        made = getattr(transformers, json.loads((base / "config.json").read_text())["architectures"][0])
        cells: list[str] = []
        for directory in (base, folder / f"{base.name}.base", folder / f"{base.name}.own"):
            try:
                model = made.from_pretrained(directory, attn_implementation="eager", **experts).eval().float()
                with torch.no_grad():
                    logits = model(**{ours: expected[name] for name, ours in _inputs(expected).items()}).logits
            except Exception as error:
                cells.append(f"not read: {type(error).__name__}")
                continue
            cells.append(f"{(logits - expected.get('evaluated', expected['logits'])).abs().max():.0e}")
        print(f"| {base.name} | {' | '.join(cells)} |", flush=True)


def _inputs(expected: Mapping[str, Any]) -> dict[str, str]:
    """The names of the inputs in the reference, and those of the model's arguments."""
    if "image" in expected:
        return {"image": "pixel_values"}
    return {"source": "input_ids", "tokens": "decoder_input_ids"} if "source" in expected else {"tokens": "input_ids"}


if __name__ == "__main__":
    here = Path(sys.argv[1])
    if importlib.util.find_spec("transformers") is None:
        write(here)
    else:
        read(here)
