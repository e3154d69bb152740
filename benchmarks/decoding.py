"""Tokens per second of decoding: python -m benchmarks.decoding [--rounds 11] [--length 64] [--beam 4]

Greedy search, and both forms of beam search, of models/seq2seq.py (or, with --experts, models/moe_transformer.py) with
random parameters; nothing ends early. A JSON line for each: time in turn with the others, places x sequences a second,
the bytes of the decoder's cache, and what XLA takes beside arguments and results. Ratios are to the flat form.
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
from models import moe_transformer, seq2seq


def searches(beam: int) -> dict[str, Any]:
    """Each search by name; no sequence ends early, since no token is its end."""
    never = {"end": -1}
    width = md.Dim("beam", beam)
    made = {
        form: functools.partial(md.nn.decode.beam_search, beam=width, form=form, **never) for form in md.nn.decode.FORMS
    }
    return {**made, "greedy": functools.partial(md.nn.decode.greedy, **never)}


def compiled(workload: md.Workload, decoder: Any, search: Any) -> tuple[Callable[[], object], int]:
    """One blocking run of a search, on random parameters and sources, and its temporary bytes."""
    model = decoder(workload.config, search)
    params, _ = workload.init(md.random.key(0))
    spec = workload.inputs(workload.config)["source"]
    ids = np.random.default_rng(0).integers(3, 259, [d.size for d in spec.shape])
    args = params, {"source": md.tensor(ids.astype(np.int32), spec.shape)}

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
        made = {name: compiled(sized, decoder, search) for name, search in searches(args.beam).items()}
        config = sized.config
        for name, figures in ratio.measure({name: run for name, (run, _) in made.items()}, args.rounds).items():
            beams = 1 if name == "greedy" else args.beam
            places = config.batch * length
            line = {
                "search": name, "experts": args.experts, "layers": config.layers, "batch": config.batch,
                "length": length, "beam": beams, "tokens_per_second": round(places / figures["wall_seconds"], 1),
                "tokens_per_cpu_second": round(places / figures["cpu_seconds"], 1),
                "cache_bytes": 2 * 4 * config.layers * places * beams * config.heads * config.d_head,
                "temp_bytes": made[name][1],
            }  # fmt: skip
            print(json.dumps({"figure": "decoding", **line, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
