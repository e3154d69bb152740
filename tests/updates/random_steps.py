"""Random training steps, sharded against replicated: `python -m tests.updates.random_steps --cases 300`.

The law: a layout that is legal when every device updates all weights is legal when updates are sharded, and gives the
same bits. Numbers are small whole ones in float64, so every sum is exact. Steps draw dense layers, biases that are
added before or after the batch is summed, gathered tables, convolutions and loops over layers; momentum, clipping by
the global norm and averages; and branches that read updated values, select them, or contain the update. One exception:
where no weight at all can be sharded, or gathered again, the option has no effect, which is an error. The last line is
JSON; the exit status is 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshdsl as md
import tests.conftest  # noqa: F401 - eight CPU devices and 64-bit types, as in the tests

MESHES = ("x:2", "x:3", "x:4", "x:8", "x:2 y:2", "x:4 y:2", "x:2 y:3", "x:2 y:2 z:2")
SIZES = (1, 2, 3, 4, 5, 6, 8)
NOTHING = "nothing to shard"
RIGHT = ("equal", "illegal", NOTHING)
# reasons why no weight can be sharded
GOOD = ("gradient is not a sum over devices", "the layout splits it", "is split over")


@dataclass(frozen=True)
class Case:
    """A step with its arguments, and what of it is compiled."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: str
    layouts: tuple[md.Layout, ...]  # the first legal one counts
    update: md.WeightUpdate

    def compiled(self, layout: md.Layout, update: md.WeightUpdate | None = None) -> md.Compiled:
        machine = "tpu-v5e" if update is not None and update.mode == "auto" else None
        return md.compile(self.step, self.mesh, layout, weight_update=update or "replicated", machine=machine)


class Maker:
    """Draws a model, an optimizer and the branches beside it."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.size = {name: self.rng.choice(SIZES) for name in ("batch", "io", "hidden", "out", "vocab", "kk", "layer")}
        self.size["batch"] = self.rng.choice([4, 6, 8, 5])
        self.size["length"] = self.rng.choice([4, 6])
        self.many = self.rng.random() < 0.85  # examples; otherwise one, without the dim
        self.params: dict[str, md.Tensor] = {}

    def draw(self, dims: str) -> md.Tensor:
        shape = [md.Dim(name, self.size[name]) for name in dims.split()]
        return md.tensor(self.numbers.choice([-2.0, -1.0, 1.0, 2.0], [d.size for d in shape]), shape)

    def model(self) -> Callable[[Any, md.Tensor], md.Tensor]:
        """A function from parameters and a batch to the loss."""
        first = self.rng.choice(["dense", "dense", "table", "conv"])
        bias, pooled, layers, preferred = (self.rng.random() < p for p in (0.6, 0.4, 0.3, 0.2))
        head = self.rng.choice(["", "dense", "scale"])
        dims = {"dense": "io hidden", "table": "vocab hidden", "conv": "kk io hidden"}
        self.params["first"] = self.draw(dims[first])
        if bias:
            self.params["bias"] = self.draw("hidden")
        if layers:
            self.params["layers"] = self.draw("layer hidden next")
        if head:
            self.params["head"] = self.draw("hidden out" if head == "dense" else "hidden")
        if head == "dense" and self.rng.random() < 0.5:
            self.params["last"] = self.draw("out")

        def layer(h: md.Tensor, w: md.Tensor) -> Any:
            y = md.einsum(h, w, out=[*(d for d in h.dims if d.name != "hidden"), "next"])
            return md.rename(y, next="hidden") % 3.0, None

        def loss(params: Any, x: md.Tensor) -> md.Tensor:
            match first:
                case "dense":
                    h = md.einsum(x, params["first"], out=[*(d for d in x.dims if d.name != "io"), "hidden"])
                case "table":
                    h = md.take(params["first"], x, "vocab")
                case _:
                    out = [*(d for d in x.dims if d.name != "io"), "hidden"]
                    h = md.sum(md.conv(x, params["first"], window={"length": "kk"}, out=out), "length")
            if pooled and self.many:
                h = md.sum(h, "batch")
            h = md.prefer(h, "hidden") if preferred else h
            h = h + params["bias"] if bias else h
            if layers:
                h, _ = md.scan(layer, h, params["layers"], over=md.Dim("layer", self.size["layer"]))
            if head == "dense":
                h = md.einsum(h, params["head"], out=[*(d for d in h.dims if d.name != "hidden"), "out"])
                h = h + params["last"] if "last" in params else h
            elif head:
                h = h * params["head"]
            return md.sum(md.square(h))

        return loss

    def batch(self) -> md.Tensor:
        match self.params["first"].dims[0].name:
            case "vocab":
                shape = [md.Dim("batch", self.size["batch"])] if self.many else []
                return md.tensor(self.numbers.integers(0, self.size["vocab"], [d.size for d in shape], "int32"), shape)
            case "kk":
                return self.draw("batch length io" if self.many else "length io")
            case _:
                return self.draw("batch io" if self.many else "io")

    def optimizer(self) -> Callable[..., Any]:
        """A function from parameters, state and gradients to new ones, in whole numbers from -3 to 3."""
        momentum, clipped, averaged, restored = (self.rng.random() < p for p in (0.7, 0.3, 0.3, 0.2))

        def small(x: md.Tensor) -> md.Tensor:
            return x % 7.0 - 3.0

        def update(params: Any, state: Any, grads: Any) -> Any:
            state = dict(state)
            if clipped:
                norm = sum((md.sum(md.square(g)) for g in grads.values()), md.zeros("", "float64"))
                grads = {k: g * md.where(norm > 1e4, 1.0, 2.0) for k, g in grads.items()}
            step = grads
            if momentum:
                step = state["m"] = {k: small(2.0 * state["m"][k] + g) for k, g in grads.items()}
            new = {k: small(p - step[k]) for k, p in params.items()}
            if averaged:
                state["mean"] = {k: small(2.0 * state["mean"][k] + p) for k, p in new.items()}
            if restored:  # the weights before, if the new ones are large
                last, state["last"] = state["last"], new
                large = sum((md.sum(md.abs(p)) for p in new.values()), md.zeros("", "float64")) % 3.0 > 1
                new = md.cond(large, lambda new, last: last, lambda new, last: new, new, last)
            return new, state

        self.state = {key: {k: self.draw(" ".join(d.name for d in p.dims)) for k, p in self.params.items()}
                      for key, on in (("m", momentum), ("mean", averaged), ("last", restored)) if on}  # fmt: skip
        return update

    def case(self) -> Case:
        self.size["next"] = self.size["hidden"]
        loss, update = self.model(), self.optimizer()
        around = self.rng.choice([None, None, None, skipped, sometimes, switched])
        branches = [self.rng.choice(BESIDE) for _ in range(self.rng.choice([0, 1, 1, 2]))]
        chosen = [self.rng.choice(sorted(self.params)) for _ in branches]
        frequencies = [self.rng.choice([None, None, 0.01, 1.0]) for _ in branches]

        def step(params: Any, state: Any, x: md.Tensor, i: md.Tensor) -> Any:
            def trained(params: Any, state: Any) -> Any:
                value, grads = md.value_and_grad(loss)(params, x)
                return *update(params, state, grads), value

            results: list[md.Tensor] = []
            if around is not None:
                old = params, state, md.zeros("", "float64")
                new_params, new_state, value = around(i, trained, old)
            else:
                new_params, new_state, value = trained(params, state)
            for branch, name, often in zip(branches, chosen, frequencies, strict=True):
                results += branch(i, often, new_params, new_state, name, loss, x)
            return new_params, new_state, value, results

        def steps(params: Any, state: Any, x: md.Tensor, i: md.Tensor) -> Any:
            def one(carry: Any, _: None) -> Any:
                params, state, i = carry
                params, state, value, results = step(params, state, x, i)
                return (params, state, i + 1), (value, results)

            (params, state, _), values = md.scan(one, (params, state, i), None, over=md.Dim("step", 2))
            return params, state, values

        looped = self.rng.random() < 0.15
        params, state, x = dict(self.params), self.state, self.batch()
        mesh = self.rng.choice(MESHES)
        layouts = tuple(self.layout(mesh, x) for _ in range(4))
        mode = self.rng.choice(["sharded", "sharded", "sharded", "auto"])
        wanted = md.WeightUpdate(mode, regather=self.rng.random() < 0.2)
        return Case(steps if looped else step, (params, state, x), mesh, layouts, wanted)

    def layout(self, mesh: str, x: md.Tensor) -> md.Layout:
        """Rules that split the batch, mostly, and other dims over random axes, also over the same ones.

        Sometimes a weight, or one entry of the state, has a rule of its own.
        """
        axes = list(md.Mesh(mesh).axes)
        names = sorted({d.name for p in self.params.values() for d in p.dims} | {"length"} & {d.name for d in x.dims})
        rules = {"batch": self.rng.sample(axes, self.rng.randint(1, len(axes)))} if self.many else {}
        for name in self.rng.sample(names, min(len(names), self.rng.choice([0, 1, 1, 2] if self.many else [1, 2]))):
            rules[name] = [self.rng.choice(axes)]
        overrides: dict[str, dict[str, list[str]]] = {}
        if self.rng.random() < 0.2:
            key = self.rng.choice(sorted(self.params))
            where = self.rng.choice(["params", *(f"state/{name}" for name in self.state)])
            overrides[f"{where}/{key}"] = {self.rng.choice(self.params[key].dims).name: [self.rng.choice(axes)]}
        return md.Layout(rules, overrides=overrides)


def rarely(i: md.Tensor) -> md.Tensor:
    return i % 2 == 1


def summarised(i: Any, often: Any, params: Any, state: Any, name: str, loss: Any, x: Any) -> list[md.Tensor]:
    w = params[name]
    return [md.cond(rarely(i), lambda w: md.sum(md.abs(w)), lambda w: md.max(w), w, frequency=often)]


def sorted_out(i: Any, often: Any, params: Any, state: Any, name: str, loss: Any, x: Any) -> list[md.Tensor]:
    w = params[name]
    return [md.cond(rarely(i), lambda w: md.sort(w, w.dims[0]), lambda w: w - w, w, frequency=often)]


def exported(i: Any, often: Any, params: Any, state: Any, name: str, loss: Any, x: Any) -> list[md.Tensor]:
    values = [tree[name] for tree in (params, *state.values())]
    zeros = [md.zeros(v.dims, v.dtype) for v in values]
    return md.cond(rarely(i), lambda *xs: list(xs), lambda *xs: zeros, *values, frequency=often)


def evaluated(i: Any, often: Any, params: Any, state: Any, name: str, loss: Any, x: Any) -> list[md.Tensor]:
    return [md.cond(rarely(i), lambda p: loss(p, x), lambda p: md.sum(p[name]), params, frequency=often)]


def nested(i: Any, often: Any, params: Any, state: Any, name: str, loss: Any, x: Any) -> list[md.Tensor]:
    w = params[name]

    def yes(w: md.Tensor) -> md.Tensor:
        return md.cond(i > 2, lambda w: w + 1.0, lambda w: md.reverse(w, w.dims[0]), w)

    return [md.cond(rarely(i), yes, lambda w: w, w, frequency=often), md.sum(w)]


def skipped(i: Any, trained: Any, old: Any) -> Any:
    new = trained(*old[:2])
    return md.cond(new[2] < 1e4, lambda new, old: new, lambda new, old: (*old[:2], new[2]), new, old)


def sometimes(i: Any, trained: Any, old: Any) -> Any:
    return md.cond(i % 2 == 0, lambda: trained(*old[:2]), lambda: old)


def switched(i: Any, trained: Any, old: Any) -> Any:
    return md.switch(i, [lambda: trained(*old[:2]), lambda: old, lambda: trained(*trained(*old[:2])[:2])])


BESIDE = (summarised, sorted_out, exported, evaluated, nested)


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(x.numpy() if isinstance(x, md.Tensor) else x) for x in jax.tree.leaves(tree)]


def outcome(seed: int, devices: bool = False) -> tuple[str, Counter[str]]:
    """What became of a case, one of `RIGHT` or the difference; and a count of decisions.

    Steps run in the simulator, and with `devices` on devices too.
    """
    case, decisions = Maker(seed).case(), Counter[str]()
    arguments = [(*case.args, md.tensor(np.int32(i))) for i in (0, 1)]
    legal = next(
        ((layout, program) for layout in case.layouts if (program := legally(case, layout, arguments[0]))), None
    )
    if legal is None:
        return "illegal", decisions
    layout, plain = legal
    sharded = case.compiled(layout, case.update)
    try:
        program = sharded.program(*arguments[0])
    except md.LayoutError as error:
        reasons = str(error).splitlines()[1:-2]
        if "regather=True has no effect" in str(error):
            return NOTHING, decisions
        if NOTHING in str(error) and all(any(good in reason for good in GOOD) for reason in reasons):
            return NOTHING, decisions
        return f"refused: {case.mesh} {layout} {error}", decisions
    decisions.update("sharded" if d.sharded else d.reason.partition(" at ")[0] for d in sharded.weight_update.decisions)
    for args in arguments:
        right = md.simulate(plain, *jax.tree.leaves(args))
        runs = [md.simulate(program, *jax.tree.leaves(args))]
        if devices:
            runs += [leaves(case.compiled(layout)(*args)), leaves(sharded(*args))]
        for got in runs:
            if any(not np.array_equal(a, b) for a, b in zip(right, got, strict=True)):
                return f"different: {case.mesh} {layout}", decisions
    return "equal", decisions


def legally(case: Case, layout: md.Layout, args: Any) -> Any:
    """The replicated program under a layout; None if that is illegal."""
    try:
        return case.compiled(layout).program(*args)
    except md.LayoutError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--devices", type=int, default=0, help="run every so many cases on devices; 0: none")
    options = parser.parse_args()
    counts, decisions = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for seed in range(options.first, options.first + options.cases):
        try:
            found, decided = outcome(seed, bool(options.devices) and seed % options.devices == 0)
            decisions += decided
        except Exception:
            found = f"error: {traceback.format_exc(limit=-3)}"
        counts[found.partition(":")[0]] += 1
        if found not in RIGHT:
            print(f"{seed}: {found}", flush=True)
    wrong = sum(n for found, n in counts.items() if found not in RIGHT)
    seconds = round(time.perf_counter() - start)
    print(json.dumps({"cases": options.cases, **counts, "weights": decisions, "wrong": wrong, "seconds": seconds}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
