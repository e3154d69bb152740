"""The law of aliases: `python -m tests.compile.aliases --cases 2000 --seed 1`; its last line is JSON.

One tensor is in several places of a call: of a state, of several arguments, donated or not, as itself, as a second
tensor of its array, or as one shard of it. The call gives the results of separate tensors, or `ShapeError` if a donated
place shares its array; tensors that are not donated keep their values. The state of every optimizer is donated beside
its parameters. A fault kills the process, so the tests run this in one of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices, as in the tests

DIMS = "batch:6 io:4"
MESHES = [
    ("p:1", ""),
    ("p:2", ""),
    ("p:2", "batch:p"),
    ("p:4", "batch:p"),
    ("p:2 q:2", "batch:p io:q"),
    ("p:8", "io:p"),
]
OPTIMIZERS = {
    "sgd": md.optim.sgd(0.1),
    "momentum": md.optim.momentum(0.1),
    "adam": md.optim.adam(0.1),
    "adamw": md.optim.adamw(0.1),
    "adafactor": md.optim.adafactor(0.1),
    "lamb": md.optim.lamb(0.1),
    "lars": md.optim.lars(0.1),
    "muon": md.optim.muon(0.1),
    "average": md.optim.with_average(md.optim.sgd(0.1)),
    "accumulation": md.optim.with_accumulation(md.optim.momentum(0.1), 2),
    "clipping": md.optim.with_clipping(md.optim.adam(0.1), 1.0),
}


def step(state: Any, x: md.Tensor, y: md.Tensor) -> Any:
    return {"a": state["a"] * 2 + x, "b": state["b"] + y}, x + 1, y - state["a"]


@functools.cache
def on(mesh: str, layout: str) -> md.Compiled:
    return md.compile(lambda x: x * 1, mesh, layout)


@functools.cache
def stepping(mesh: str, layout: str, donate: tuple[int, ...]) -> md.Compiled:
    return md.compile(step, mesh, layout, donate=donate)


def pool(mesh: str, layout: str, values: np.ndarray) -> dict[str, md.Tensor]:
    """Tensors that share memory, or do not."""
    tensor = md.tensor(values, DIMS)
    placed = on(mesh, layout)(tensor)
    made = {
        "one device": tensor,
        "placed": placed,
        "elsewhere": on("r:3", "batch:r")(tensor),
        "copy": on(mesh, layout)(tensor),
        "array": md.tensor(placed.array, DIMS),
    }
    shards = placed.stored.addressable_shards
    replicated = len(shards) > 1 and placed.stored.is_fully_replicated
    return {**made, "shard": md.tensor(shards[0].data, DIMS)} if replicated else made


def case(rng: random.Random) -> str:
    """Make one call; returns "equal" or "refused", or the arguments and what is wrong."""
    mesh, layout = rng.choice(MESHES)
    donate = tuple(n for n in range(3) if rng.random() < 0.5)
    values = np.arange(24, dtype="float32").reshape(6, 4)
    tensors = pool(mesh, layout, values)
    places = [rng.choice(list(tensors)) for _ in range(4)]
    a, b, x, y = (tensors[place] for place in places)
    donated = {place for place, n in zip(places, (0, 0, 1, 2), strict=True) if n in donate}
    shared = {"placed", "array", "shard"}  # the memory of one of them is that of the others
    gone = donated | (shared if donated & shared else set())
    about = f"{mesh} {layout} donate={donate} {places}"
    compiled = stepping(mesh, layout, donate)
    args: Any = ({"a": a, "b": b}, x, y)
    call: Any = compiled
    if rng.random() < 0.4:
        about += " jaxified"
        call, args = md.jaxify(compiled, *args), jax.tree.map(lambda t: t.array, args)
    try:
        results = jax.tree.leaves(jax.tree.map(np.asarray, call(*args)))
    except md.ShapeError as error:
        arrays = [tensors[place].stored for place in places]
        alias = len({id(array) for array in arrays}) < len(arrays)
        return "refused" if alias and donate and "are the same array" in str(error) else f"{about}: {error}"
    fresh = md.tensor(values, DIMS)
    wanted = [t.numpy() for t in jax.tree.leaves(step({"a": fresh, "b": fresh}, fresh, fresh))]
    if not all(np.array_equal(got, right) for got, right in zip(results, wanted, strict=True)):
        return f"{about}: other results"
    changed = any(not np.array_equal(t.numpy(), values) for name, t in tensors.items() if name not in gone)
    return f"{about}: an argument that was not donated has changed" if changed else "equal"


def training(name: str, mesh: str, layout: str) -> str:
    """Three donated steps of one optimizer whose state was made by a call of `init` outside of `md.compile`."""
    optimizer = OPTIMIZERS[name]
    params = md.compile(lambda key: {"w": md.random.normal(key, DIMS)}, mesh, layout)(md.random.key(0))
    state, grads = optimizer.init(params), {"w": md.tensor(jnp.ones((6, 4)), DIMS)}
    update = md.compile(
        lambda params, state, grads: optimizer.update(grads, state, params), mesh, layout, donate=(0, 1)
    )
    try:
        for _ in range(3):
            params, state = update(params, state, grads)
    except md.ShapeError as error:
        return f"{name} {mesh} {layout}: {error}"
    return "trained"


def main() -> int:
    parser = argparse.ArgumentParser(description="one tensor in several places of a call")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--optimizers", type=int, default=len(OPTIMIZERS))
    options = parser.parse_args()
    rng, counts, failures = random.Random(options.seed), Counter[str](), 0
    made = (case(rng) for _ in range(options.cases))
    trained = (training(name, *rng.choice(MESHES)) for name in rng.sample(list(OPTIMIZERS), options.optimizers))
    for outcome in (*made, *trained):
        if outcome in ("equal", "refused", "trained"):
            counts[outcome] += 1
        else:
            failures += 1
            print(outcome)
    print(json.dumps({"seed": options.seed, **counts, "failures": failures}))
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
