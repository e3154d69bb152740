"""Many languages to English, with experts and without: python -m benchmarks.translation [--steps 600] [--directory DIR]

Trains `models/translation.py` once for each number of experts (0 is the dense model of equal compute), the same batches
and steps for all, and scores the translations of held-out messages. JSON lines: training's records, then a score for
each language, the average over languages, and that of copying the source. With a directory each model is saved every
50 steps, and a run that was stopped goes on from where it was, to the same results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import meshdsl as md
from models import translation

Record = dict[str, Any]


def trained(
    workload: md.Workload, directory: Path, mesh: md.Mesh, layout: md.Layout, steps: int, seed: int = 0, every: int = 50
) -> Iterator[Record | dict[str, md.Tensor]]:
    """Train from the newest checkpoint in the directory; yields records, and the parameters last."""
    config = dataclasses.asdict(workload.config)
    key, batches, specs = md.random.key(seed), workload.data(workload.config, seed), workload.inputs(workload.config)
    params_spec, state_spec, _ = workload.specs()
    init = md.compile(lambda key: dict(zip(("params", "state"), workload.init(key), strict=True)), mesh, layout)
    update = md.compile(workload.train_step(), mesh, layout, donate=(0, 1))
    judged = workload.replace(train=False) if hasattr(workload.config, "train") else workload
    judge = md.compile(judged.eval_step(), mesh, layout)

    def tensors(split: str, step: int) -> dict[str, md.Tensor]:
        return {name: md.tensor(x, specs[name].shape) for name, x in batches(split, step).items()}

    with md.Checkpoints(directory, keep=1) as checkpoints:
        step = checkpoints.latest() or 0
        if step:
            like = {"params": params_spec, "state": state_spec}
            found = checkpoints.restore(step, like=like, mesh=mesh, layout=layout)
            if found.config != config:
                raise md.MeshdslError(f"{directory} holds another model: {found.config}\n  give another --directory")
            tree = found.tree
        else:
            tree = init(key)
        params, state = tree["params"], tree["state"]
        size = sum(p.array.size for p in params.values())
        yield {"event": "start", "step": step, "parameters": size, "data": batches.describe(), "config": config}
        began, first = time.perf_counter(), None
        while step < steps:
            step += 1
            params, state, metrics = update(params, state, tensors("train", step), md.random.fold_in(key, step))
            if first is None:
                metrics["loss"].numpy()
                first = time.perf_counter() - began
            if step % every == 0 or step == steps:
                values = {name: round(float(x.numpy()), 4) for name, x in metrics.items()}
                held_out = judge(params, tensors("held_out", 0))
                values |= {f"held_out_{name}": round(float(x.numpy()), 4) for name, x in held_out.items()}
                seconds = round(time.perf_counter() - began, 2)
                yield {"event": "step", "step": step, **values, "seconds": seconds, "first_step": round(first, 2)}
                checkpoints.save(step, {"params": params, "state": state}, config=config)
        yield params


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 0])
    parser.add_argument("--layers", type=int, nargs="*", default=[translation.Config.layers])
    parser.add_argument("--directory", type=Path, help="where checkpoints are kept; default: nowhere")
    parser.add_argument("--pairs", type=int, default=512, help="held-out pairs to translate")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--mesh", default="rows:1")
    parser.add_argument("--layout", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other values of the config")
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
                params: Any = None
                for record in trained(workload, folder, mesh, layout, args.steps, args.seed):
                    if "event" in record:
                        say(**labels, **record)
                    else:
                        params = record
                pairs = translation.text_of(workload.config).pairs["held_out"][: args.pairs]
                if not copied:
                    average = translation.scores(pairs, [pair.text for pair in pairs])["average"]
                    say(figure="translation", event="copying", **dataclasses.asdict(average))
                    copied = True
                began = time.perf_counter()
                made = translation.translate(params, workload.config, pairs, mesh, layout, args.beam)
                seconds = round(time.perf_counter() - began, 2)
                for language, score in translation.scores(pairs, made).items():
                    say(**labels, event="score", language=language, **dataclasses.asdict(score), seconds=seconds)
                examples = [
                    {**dataclasses.asdict(pair), "made": text} for pair, text in list(zip(pairs, made, strict=True))[:8]
                ]
                say(**labels, event="examples", examples=examples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
