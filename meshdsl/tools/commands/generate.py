"""`meshdsl generate`: continues prompts with a model's weights, under any layout."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from . import devices
from .common import OK, command, integer, positive, print_json
from .weights import checkpoints_of, device_options, hub_directory, params_of_run, settings_of_run

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "continue prompts of token ids, with the weights of a run or of a Hugging Face directory"
    parser = command(commands, "generate", run, about, workload=False)
    parser.add_argument("model", metavar="MODEL", help="llama, transformer:lm, or file.py:name")
    parser.add_argument("--params", required=True, metavar="DIR", help="the directory of a run, or hf:DIR")
    parser.add_argument(
        "--prompt-ids",
        required=True,
        action="append",
        type=_ids,
        metavar="IDS",
        help="token ids such as 1,2,3; may be repeated, with equal lengths",
    )
    parser.add_argument("--tokens", type=positive, default=16, metavar="N", help="tokens to generate (default 16)")
    parser.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="sample at this temperature (default: the likeliest token)",
    )
    parser.add_argument("--seed", type=integer, metavar="N", help="seed of the samples (default 0)")
    parser.add_argument("--layout", metavar="RULES", help="rules, or the name of a layout of the model")
    parser.add_argument("--mesh", metavar="AXES", help="axes such as 'rows:2;cols:4'")
    device_options(parser)


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part.strip()) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"must be token ids such as 1,2,3, got {text[:60]!r}")
    return [int(part) for part in parts]


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:60]!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """Generate and print a line of ids for each prompt."""
    import meshdsl as md

    from ...train import UsageError, load, mesh_and_layout

    if options.seed is not None and options.temperature is None:
        raise UsageError("--seed has no effect without --temperature: the likeliest token is taken")
    source = options.model
    workload = load(source)
    if workload.decoder is None:
        raise UsageError(f"{workload.name} has no decoder; give one: md.Workload(decoder=...)")
    mesh, layout = mesh_and_layout(workload, options.layout, options.mesh)
    devices.check(options, mesh)
    devices.start(options, mesh)
    workload, params = _weights(options.params, source, workload, mesh, layout)
    prompt = _prompt(options.prompt_ids, workload.config.vocab)
    sampled = () if options.temperature is None else (md.random.key(options.seed or 0),)
    search = functools.partial(
        md.nn.decode.generate, tokens=md.Dim("token", options.tokens), temperature=options.temperature or 1.0
    )
    tokens = md.compile(workload.decoder(workload.config, search), mesh, layout)(params, prompt, *sampled).numpy()
    if options.json:
        print_json({"command": "generate", "model": source, "prompts": options.prompt_ids, "tokens": tokens.tolist()})
    else:
        print("\n".join(",".join(map(str, row)) for row in tokens.tolist()))
    return OK


def _weights(text: str, source: str, workload: Any, mesh: Any, layout: Any) -> tuple[Any, Any]:
    """The workload with the sizes of its weights, and the parameters under the layout."""
    import meshdsl as md

    directory = hub_directory(text)
    if directory is not None:
        return md.import_hugging_face(directory, workload, mesh, layout)
    checkpoints, step = checkpoints_of(text, None)
    workload = settings_of_run(source, checkpoints, step, []).workload
    return workload, params_of_run(checkpoints, step, workload, mesh=mesh, layout=layout)


def _prompt(rows: list[list[int]], vocab: int) -> Any:
    """The prompts [batch, length]; raises `UsageError` for ids that the model lacks and for different lengths."""
    import numpy as np

    import meshdsl as md

    from ...train import UsageError

    outside = sorted({token for row in rows for token in row if token >= vocab})
    if outside:
        raise UsageError(f"--prompt-ids has {outside[0]}, and the model has {vocab} tokens, from 0 to {vocab - 1}")
    if len({len(row) for row in rows}) > 1:
        raise UsageError(f"prompts must have equal lengths, got {', '.join(str(len(row)) for row in rows)}")
    return md.tensor(np.asarray(rows, np.int32), "batch length")
