"""`meshdsl generate`: continues prompts of text or token ids with a model's weights, under any layout."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Annotated, Any

import meshdsl as md

from ...errors import UsageError
from ...errors.values import Bounds
from .common import OK, answer, command, integer, options_of, positive, printable, say, typed
from .weights import base_of_run, checkpoints_of, hub_directory, layout_options, params_of_run, settings_of_run, started

_IDS = Annotated[
    list[Annotated[int, Bounds(0, 10**9)]], lambda ids: None if ids else "must be token ids such as 1,2,3, got none"
]


def add(commands: Any) -> None:
    """Add the subcommand and its options."""
    about = "continue prompts of text or of token ids, with the weights of a run or of a Hugging Face directory"
    parser = command(commands, "generate", run, about, workload=False)
    parser.add_argument("model", metavar="MODEL", help="llama, transformer:lm, or file.py:name")
    option = options_of(parser)
    option("--params DIR", "the directory of a run, or hf:DIR", required=True)
    prompts = parser.add_mutually_exclusive_group(required=True)
    option = options_of(prompts)
    option("--prompt TEXT", "text, for --tokenizer; may be repeated", action="append")
    option("--prompt-ids IDS", "token ids such as 1,2,3; may be repeated", typed(_IDS), action="append")
    option = options_of(parser)
    option(
        "--tokenizer FILE",
        "the tokenizer of --prompt (default: tokenizer.json of hf:DIR); needs the extra `tokenizers`",
    )
    option("--end TOKEN", "with --prompt: stop after this token, such as '</s>'")
    option("--tokens N", "tokens to generate (default 16)", positive, default=16)
    option(
        "--temperature T",
        "sample at this temperature (default: the likeliest token)",
        typed(Annotated[float, Bounds(0, 1e6, above=True)]),
    )
    option("--seed N", "seed of the samples (default 0)", integer)
    layout_options(parser)


def run(options: argparse.Namespace) -> int:
    """Generate and print each prompt's text with its continuation, or the ids of the continuation."""
    from ...train import load

    if options.seed is not None and options.temperature is None:
        raise UsageError("--seed has no effect without --temperature: the likeliest token is taken")
    source = options.model
    workload = load(source)
    if workload.decoder is None:
        raise UsageError(f"{workload.name} has no decoder; give one: md.Workload(decoder=...)")
    tokenizer, prompts, end = _prompts(options)
    mesh, layout = started(options, workload)
    workload, params = _weights(options.params, source, workload, mesh, layout)
    _check_positions(options, workload, prompts)
    _check_ids(prompts, workload.config.vocab, "--prompt-ids" if tokenizer is None else "the tokenizer's --prompt")
    search = functools.partial(
        md.nn.decode.generate,
        tokens=md.Dim("token", options.tokens),
        temperature=options.temperature or 1.0,
        end=end,
        padding=end or 0,
    )
    compiled = md.compile(workload.decoder(workload.config, search), mesh, layout)
    sampled = () if options.temperature is None else (md.random.key(options.seed or 0),)
    tokens = _continued(lambda prompt: compiled(params, prompt, *sampled), prompts)
    record = {"command": "generate", "model": source, "prompts": options.prompt or options.prompt_ids, "tokens": tokens}
    if tokenizer is None:
        lines = [",".join(map(str, row)) for row in tokens]
    else:
        lines = record["texts"] = _texts(tokenizer, prompts, tokens, end)
    answer(options, record, "\n".join(map(printable, lines)))
    return OK


def _prompts(options: argparse.Namespace) -> tuple[Any, list[list[int]], int | None]:
    """The tokenizer (None for ids), the ids of each prompt, and the id of `--end`."""
    from ...train.tokenizer import load_tokenizer, token_id

    if options.prompt is None:
        if options.tokenizer or options.end:
            raise UsageError(f"{'--tokenizer' if options.tokenizer else '--end'} has no effect without --prompt TEXT")
        return None, options.prompt_ids, None
    base = base_of_run(options.params)
    file = options.tokenizer or hub_directory(options.params) or base
    if file is None or not (options.tokenizer or (file / "tokenizer.json").is_file()):
        raise UsageError(
            f"--prompt needs --tokenizer FILE, because {options.params} has no tokenizer.json; "
            "or give token ids: --prompt-ids"
        )
    tokenizer = load_tokenizer(file)
    prompts = [tokenizer.encode(text).ids for text in options.prompt]
    if not all(prompts):
        raise UsageError(f"the tokenizer has no tokens for --prompt {options.prompt[prompts.index([])]!r}")
    return tokenizer, prompts, None if options.end is None else token_id(tokenizer, options.end)


def _continued(continuation: Callable[[Any], Any], prompts: list[list[int]]) -> list[list[int]]:
    """The ids after each prompt; prompts of one length run together, as [batch, length]."""
    import numpy as np

    from ...train import Progress

    tokens: dict[int, list[int]] = {}
    lengths = sorted({len(prompt) for prompt in prompts})
    progress = Progress(len(prompts), "generate")
    for length in lengths:
        progress.update(len(tokens), "compiling" if length == lengths[0] else "")
        rows = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        found = continuation(md.tensor(np.asarray([prompts[n] for n in rows], np.int32), "batch length"))
        tokens |= zip(rows, found.numpy().tolist(), strict=True)
    progress.clear()
    return [tokens[n] for n in range(len(prompts))]


def _texts(tokenizer: Any, prompts: list[list[int]], tokens: list[list[int]], end: int | None) -> list[str]:
    """Each prompt's text with its continuation, up to the token of `--end`."""
    cut = [row[: row.index(end)] if end in row else row for row in tokens]
    return [tokenizer.decode(prompt + row) for prompt, row in zip(prompts, cut, strict=True)]


def _check_positions(options: argparse.Namespace, workload: Any, prompts: list[list[int]]) -> None:
    """Raises `UsageError` for more positions than the model has: by its config.json, or its table of positions."""
    from ...train.weights.files import read_json

    directory = hub_directory(options.params) or base_of_run(options.params)
    values = {} if directory is None else read_json(directory / "config.json")
    limits = [values.get(key) for key in ("max_position_embeddings", "n_positions")]
    limits.append(getattr(workload.config, "positions", None))
    limit = min((n for n in limits if isinstance(n, int)), default=None)
    longest = max(map(len, prompts))
    if limit is not None and longest + options.tokens > limit:
        raise UsageError(
            f"a prompt of {longest} tokens and --tokens {options.tokens} take {longest + options.tokens} positions, "
            f"and the model has {limit}\n  give at most --tokens {max(limit - longest, 0)}, or a shorter prompt"
        )
    trained = getattr(workload.config, "length", None)
    if limit is None and trained is not None and longest + options.tokens > trained:
        say(f"note: {longest + options.tokens} positions; the model was trained with a length of {trained}")


def _check_ids(prompts: list[list[int]], vocab: int, which: str) -> None:
    """Raises `UsageError` for ids that the model lacks."""
    outside = sorted({token for row in prompts for token in row if token >= vocab})
    if outside:
        raise UsageError(f"{which} has {outside[0]}, and the model has {vocab} tokens, from 0 to {vocab - 1}")


def _weights(text: str, source: str, workload: Any, mesh: Any, layout: Any) -> tuple[Any, Any]:
    """The workload, with the sizes of the stored weights, and these weights as parameters under the layout."""
    directory = hub_directory(text)
    if directory is not None:
        return md.import_hugging_face(directory, workload, mesh, layout, dtype="stored")
    checkpoints, step = checkpoints_of(text, None)
    workload = settings_of_run(source, checkpoints, step, []).workload
    return workload, params_of_run(checkpoints, step, workload, mesh=mesh, layout=layout)
