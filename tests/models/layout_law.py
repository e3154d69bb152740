"""The Transformers under every layout equal the unsplit run: `python -m tests.models.layout_law`.

Three training steps of each model in float64, dropout and the noise of the gates included: loss, gradients and
parameters of every step are within TOLERANCE of those on one device. Every device is run in NumPy; with `--emitted`
JAX compiles each program for as many CPU devices, which takes a minute and more for each. A JSON line for each model
and layout has the largest differences, then a summary; the exit status is 1 if any is larger.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests
from meshdsl.models import gpt_moe, moe_transformer, seq2seq
from tests.nn.moe_reference import simulated

TOLERANCE = 1e-9
STEPS = 3
EXACT = {"param_dtype": "float64", "compute_dtype": "float64", "reduce_dtype": "float64"}
TINY = {"batch": 4, "length": 6, "vocab": 11, "layers": 2, "heads": 4, "d_head": 4, "d_ff": 10, "dropout": 0.2}
PLACES = {"source": 5}
# 128 is the least size that Adafactor factors; 6 experts divide by no mesh of 4 or 8.
EXPERTS = {"d_model": 128, "experts": 6, "expert_hidden": 128, "sequences": 2, "aux_weight": 0.1}
MODELS: dict[str, md.Workload] = {
    "seq2seq": seq2seq.seq2seq.replace(**TINY, **PLACES, **EXACT, d_model=8),
    "moe": moe_transformer.moe.replace(**TINY, **PLACES, **EXACT, **EXPERTS, remat=True),
    "gpt_moe": gpt_moe.gpt_moe.replace(
        **{**TINY, **EXACT, **EXPERTS, "d_model": 8, "router": "batch_prioritised", "layers": 4}
    ),
}
_MODEL = "vocab:cols; heads:cols; d_ff:cols; expert_hidden:cols"
_EXPERTS = "batch:rows; group:rows; expert:rows"
ALL = (  # mesh, layout; of a layout a model takes the rules for dims that it has
    ("rows:8", "batch:rows; group:rows; expert_group:rows"),  # data only
    ("rows:8", _EXPERTS),  # fewer experts than devices
    ("rows:2", _EXPERTS),  # more experts than devices
    ("rows:3", _EXPERTS),  # batch and groups do not divide
    ("rows:8", "expert:rows; d_ff:rows"),  # experts only
    ("cols:8", _MODEL),
    ("rows:4 cols:2", f"{_EXPERTS}; {_MODEL}"),
    ("rows:2 cols:4", f"{_EXPERTS}; length:cols; source:cols; {_MODEL}"),
    ("rows:2 cols:4", "batch:rows; group:rows; expert:cols; vocab:cols; heads:cols; d_ff:cols"),
    ("rows:2 cols:4", f"{_EXPERTS}; model:cols"),  # a weight's own dims split
    ("rows:4 cols:2", "length:rows; source:rows; heads:cols; vocab:cols"),
    ("rows:2 cols:4", "batch:rows+cols; group:rows+cols; expert:rows+cols"),  # both axes together
    ("rows:2 cols:2 planes:2", f"{_EXPERTS}; vocab:cols; expert_hidden:cols; d_ff:cols; heads:planes"),
    ("rows:2 cols:2 planes:2", f"{_EXPERTS}; length:planes; source:planes; {_MODEL}"),
    ("rows:4 cols:2", "vocab:rows; expert_hidden:rows; d_ff:cols; head:cols"),
)
_SPARSE = ("group", "expert", "expert_group", "expert_hidden")
_LACKS = {"seq2seq": _SPARSE, "moe": (), "gpt_moe": ("source",)}


def layouts(name: str) -> list[tuple[str, str]]:
    """Those of `ALL` that differ for a model, without rules for dims that it lacks."""
    found: dict[tuple[str, str], None] = {}
    for mesh, text in ALL:
        rules = [rule for rule in text.split("; ") if rule.partition(":")[0] not in _LACKS[name]]
        found[mesh, "; ".join(rules)] = None
    return [key for key in found if key[1]]


def batch_of(workload: md.Workload, step: int) -> dict[str, md.Tensor]:
    """Ids at random, padding among them."""
    rng = np.random.default_rng(step)

    def ids(spec: Any) -> md.Tensor:
        return md.tensor(rng.integers(0, workload.config.vocab, [d.size for d in spec.dims], np.int32), spec.dims)

    return {name: ids(spec) for name, spec in workload.inputs(workload.config).items()}


def trained(
    workload: md.Workload, mesh: str, layout: str, steps: int = STEPS, emitted: bool = False
) -> list[dict[str, np.ndarray]]:
    """After each step: its loss, its gradients and the new parameters, by path."""
    loss_of, optimizer = workload.loss(workload.config), workload.optimizer(workload.config)

    def loss(params: Any, *rest: Any) -> md.Tensor:
        result = loss_of(params, *rest)
        return result[0] if isinstance(result, tuple) else result

    def step(params: Any, state: Any, batch: Any, key: md.Tensor) -> Any:
        value, grads = md.value_and_grad(loss)(params, batch, key)
        params, state = optimizer.update(grads, state, params)
        return params, state, grads, value

    key = md.random.key(0)
    kept = jax.tree.leaves(simulated(workload.init, key))  # parameters, then the optimizer's state
    params, state = md.eval_shape(workload.init, key)
    compiled = md.compile(step, mesh, layout)
    program = compiled.program(params, state, batch_of(workload, 0), key)
    types = jax.tree.leaves((params, state), is_leaf=lambda x: hasattr(x, "shape"))
    found: list[dict[str, np.ndarray]] = []
    for i in range(steps):
        batch, key = batch_of(workload, i), md.random.key(i)
        if emitted:
            now = [md.tensor(x, t.dims) for x, t in zip(kept, types, strict=True)]
            structure = jax.tree.structure((params, state), is_leaf=lambda x: hasattr(x, "shape"))
            results = jax.tree.leaves(compiled(*jax.tree.unflatten(structure, now), batch, key))
            outs = [x.numpy() for x in results]
        else:
            outs = [np.asarray(x) for x in md.simulate(program, *kept, *jax.tree.leaves(batch), key)]
        kept, grads, value = outs[: len(kept)], outs[len(kept) : -1], outs[-1]
        paths = sorted(params)
        found.append(
            {"loss": value}
            | {f"gradient {path}": g for path, g in zip(paths, grads, strict=True)}
            | {f"parameter {path}": p for path, p in zip(paths, kept, strict=False)}
        )
    return found


@functools.cache
def unsplit(name: str, steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """The run on one device."""
    return trained(MODELS[name], "rows:1", "", steps)


def differences(name: str, mesh: str, layout: str, steps: int = STEPS, emitted: bool = False) -> dict[str, float]:
    """The largest difference of any step from the unsplit run, by kind: loss, gradient and parameter."""
    found = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    for wanted, got in zip(unsplit(name, steps), trained(MODELS[name], mesh, layout, steps, emitted), strict=True):
        assert wanted.keys() == got.keys()
        for path, value in wanted.items():
            kind = path.partition(" ")[0]
            apart = np.abs(got[path] - value).max()
            found[kind] = max(found[kind], float(apart) if np.isfinite(apart) else np.inf)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--emitted", action="store_true", help="compiled by JAX, instead of run in NumPy")
    options = parser.parse_args()
    if options.emitted:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the time to compile
    worst, wrong, cases = 0.0, 0, 0
    for name in options.models:
        for mesh, layout in layouts(name):
            start = time.perf_counter()
            found = differences(name, mesh, layout, emitted=options.emitted)
            seconds = round(time.perf_counter() - start, 1)
            cases, worst = cases + 1, max(worst, *found.values())
            wrong += max(found.values()) > TOLERANCE
            print(json.dumps({"model": name, "mesh": mesh, "layout": layout, **found, "seconds": seconds}), flush=True)
    print(json.dumps({"cases": cases, "steps": STEPS, "worst": worst, "tolerance": TOLERANCE, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
