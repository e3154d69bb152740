"""Tokens per second of decoding: python -m benchmarks.decoding [--rounds 11] [--length 64] [--beam 4]

Runs greedy search and both forms of beam search on models/seq2seq.py (with --experts: models/moe_transformer.py) with
random parameters; no sequence ends early. Prints a JSON line for each: times of interleaved runs, positions x sequences
per second, bytes of the decoder's cache, and XLA's temporary bytes. Ratios are relative to the flat form.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import meshdsl as md
from benchmarks import hlo, ratio
from meshdsl.models import moe_transformer, seq2seq


def searches(beam: int) -> dict[str, Any]:
    """Each search by name. No sequence ends early, because no token is the end token."""
    no_end = {"end": -1}
    width = md.Dim("beam", beam)
    runs = {
        form: functools.partial(md.nn.decode.beam_search, beam=width, form=form, **no_end)
        for form in md.nn.decode.FORMS
    }
    return {**runs, "greedy": functools.partial(md.nn.decode.greedy, **no_end)}


def compiled(workload: md.Workload, decoder: Any, search: Any) -> tuple[Callable[[], object], int]:
    """A function that runs a search once, with random parameters and sources, and the search's temporary bytes."""
    model = decoder(workload.config, search)
    params, _ = workload.init(md.random.key(0))
    spec = workload.inputs(workload.config)["source"]
    ids = np.random.default_rng(0).integers(3, 259, [d.size for d in spec.dims])
    args = params, {"source": md.tensor(ids.astype(np.int32), spec.dims)}

    def decoding(params: Any, batch: Any) -> Any:
        return model(params, batch)

    run = md.compile(decoding, "one:1", "").lower(*args).compile()
    arrays = [x.array for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, md.Tensor))]

    def once() -> object:
        return jax.block_until_ready(run(*arrays))

    return once, hlo.summary(run)["temp_bytes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    workload, decoder = seq2seq.seq2seq, seq2seq.decoder
    if args.experts:
        workload, decoder = (
            moe_transformer.moe.replace(experts=args.experts, expert_hidden=512),
            moe_transformer.decoder,
        )
    for length in args.length:
        sized = workload.replace(batch=args.batch, length=length, layers=args.layers)
        runs = {name: compiled(sized, decoder, search) for name, search in searches(args.beam).items()}
        config = sized.config
        for name, figures in ratio.measure({name: run for name, (run, _) in runs.items()}, args.rounds).items():
            beams = 1 if name == "greedy" else args.beam
            positions = config.batch * length
            line = {
                "search": name, "experts": args.experts, "layers": config.layers, "batch": config.batch,
                "length": length, "beam": beams, "tokens_per_second": round(positions / figures["wall_seconds"], 1),
                "tokens_per_cpu_second": round(positions / figures["cpu_seconds"], 1),
                "cache_bytes": 2 * 4 * config.layers * positions * beams * config.heads * config.d_head,
                "temp_bytes": runs[name][1],
            }  # fmt: skip
            print(json.dumps({"figure": "decoding", **line, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
