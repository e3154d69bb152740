"""Translation to English with and without experts: python -m benchmarks.translation [--steps 600] [--directory DIR]

Trains `models/translation.py` for each number of experts (0 is the dense model of equal compute) on the same batches,
and scores the translations of held-out messages. Prints JSON lines: the records of training, then the score of each
language, the average over languages, and the average for copying the source. With a directory, each model is saved
every 50 steps; a stopped run resumes from there with equal results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import meshdsl as md
from meshdsl.models import translation
from meshdsl.train import Keeping, train

EVERY = 50  # steps between two evaluations and two checkpoints


def trained(
    workload: md.Workload, directory: Path, plan: md.Plan, steps: int, seed: int, say: Any
) -> dict[str, md.Tensor]:
    """Trains from the newest checkpoint in the directory, prints the records, and returns the parameters."""
    config = {"config": dataclasses.asdict(workload.config)}
    keep = Keeping(md.Checkpoints(directory, keep=1), every=EVERY, config=config, wait=True)
    for record in train(workload, plan, steps=steps, seed=seed, eval_every=EVERY, eval_batches=4, keep=keep):
        if record["event"] == "resume" and record["changed"]:
            raise md.MeshdslError(f"{directory} holds another model: {'; '.join(record['changed'])}")
        if record["event"] != "step" or record["step"] % EVERY == 0:
            say(**record)
    params, _, _ = workload.specs()
    return md.Checkpoints(directory).restore(like={"params": params}, mesh=plan.mesh, layout=plan.layout).tree["params"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 0])
    parser.add_argument("--layers", type=int, nargs="*", default=[translation.Config.layers])
    parser.add_argument("--directory", type=Path, help="directory for checkpoints; default: a temporary one")
    parser.add_argument("--pairs", type=int, default=512, help="held-out pairs to translate")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--mesh", default="rows:1")
    parser.add_argument("--layout", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further values of the config")
    args = parser.parse_args()
    if jax.default_backend() == "cpu":
        with contextlib.suppress(RuntimeError):
            md.host_devices(md.Mesh(args.mesh).size)
    mesh, layout = md.Mesh(args.mesh), md.Layout(args.layout)
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}

    def say(**record: Any) -> None:
        print(json.dumps(record), flush=True)

    copied = False
    with tempfile.TemporaryDirectory() as scratch:
        for layers in args.layers:
            for experts in args.experts:
                workload = translation.translation.replace(experts=experts, layers=layers, **changes)
                labels = {"figure": "translation", "experts": experts, "layers": layers}
                folder = (args.directory or Path(scratch)) / f"experts_{experts}_layers_{layers}"
                params = trained(
                    workload, folder, md.Plan(mesh, layout), args.steps, args.seed, functools.partial(say, **labels)
                )
                pairs = translation.text_of(workload.config).pairs["held_out"][: args.pairs]
                if not copied:
                    average = translation.scores(pairs, [pair.text for pair in pairs])["average"]
                    say(figure="translation", event="copying", **dataclasses.asdict(average))
                    copied = True
                started = time.perf_counter()
                translations = translation.translate(params, workload.config, pairs, mesh, layout, args.beam)
                seconds = round(time.perf_counter() - started, 2)
                for language, score in translation.scores(pairs, translations).items():
                    say(**labels, event="score", language=language, **dataclasses.asdict(score), seconds=seconds)
                examples = [
                    {**dataclasses.asdict(pair), "made": text}
                    for pair, text in list(zip(pairs, translations, strict=True))[:8]
                ]
                say(**labels, event="examples", examples=examples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
