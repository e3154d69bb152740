"""Random training steps: a model, its optimizer and its batches, each a function of a `Model`'s fields and seed.

A `Model` is a list of blocks over activations [batch length model]. An `exact` one computes with whole numbers and
piecewise linear functions, and its optimizer subtracts the gradient, so its state has the same bits in any order of
sums. `recompute` and `parts` (micro-batches) are knobs of the step, so they belong to the plan and not to the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import meshdsl as md

STEPS = 3
DISTINCT = 4
FLOATS = {  # dtype of a model -> (parameters, operands of products, tolerance relative to the largest value)
    "float64": ("float64", "float64", 1e-10),
    "float32": ("float32", "float32", 2e-3),
    "mixed": ("float32", "bfloat16", 0.2),
}
FLOATS |= {  # widths_law.py: parameters / operands of products; activations are at least float32
    f"{param}/{compute}": (param, compute, 0.0)
    for param in ("float32", "bfloat16", "float16", "float64")
    for compute in ("float32", "bfloat16", "float16")
}
RECOMPUTED = ("none", "nothing", "collectives", "products", "names:kept", "offload")


def _zeros(params: Any) -> dict[str, Any]:
    return {"sums": jax.tree.map(lambda p: md.zeros(p.dims, p.dtype), params)}


def _subtract_signs(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
    """The signs of sums of gradients keep the weights small."""
    sums = jax.tree.map(lambda s, g: s + g, state["sums"], grads)
    return jax.tree.map(lambda p, s: p - md.sign(s), params, sums), {"sums": sums}


# A gradient of exactly 0 may be 1e-17 where sums have another order, and Adam divides by no less than this.
EPS = 1e-4
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: md.optim.sgd(0.1),
    "momentum": lambda: md.optim.momentum(0.05, nesterov=True),
    "adam": lambda: md.optim.adam(1e-2, eps=EPS),
    "adamw": lambda: md.optim.adamw(1e-2, eps=EPS),
    "clipped": lambda: md.optim.with_clipping(md.optim.adam(1e-2, eps=EPS), 0.05),
    "lars": lambda: md.optim.lars(0.1),
    "lamb": lambda: md.optim.lamb(0.05),
    "adafactor": lambda: md.optim.adafactor(0.05, min_dim_to_factor=2),
    "muon": lambda: md.optim.muon(0.05, others=md.optim.adam(0.05, eps=EPS), eps=EPS),
    "averaged": lambda: md.optim.with_average(md.optim.momentum(0.05), 0.5),
    "frozen": lambda: md.optim.with_frozen(md.optim.adam(1e-2, eps=EPS), lambda path: path == "start/w"),
    "accumulated": lambda: md.optim.with_accumulation(md.optim.sgd(0.1), 2),
}
EXACT_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: md.optim.sgd(1.0),
    "averaged": lambda: md.optim.with_average(md.optim.sgd(1.0), 0.5),
    "summed": lambda: md.optim.Optimizer(_zeros, _subtract_signs),
}
SIZES = {
    "batch": (2, 3, 4, 6, 8), "length": (1, 2, 3, 4, 6), "model": (2, 4, 6, 8, 10), "io": (1, 3, 4, 5),
    "hidden": (1, 2, 3, 5, 8), "heads": (1, 2, 3, 4), "head": (2, 4), "experts": (2, 3, 4), "inner": (1, 3, 4),
    "vocab": (3, 5, 8, 11), "layer": (1, 2, 3, 4), "kernel": (1, 2, 3), "group": (1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A random model and its training step. Its `repr` reproduces it."""

    seed: int
    blocks: tuple[str, ...]
    start: str  # of STARTS
    end: str  # of ENDS
    optimizer: str
    exact: bool = False
    dtype: str = "float64"
    form: str = "step"  # or "loop": one call does all steps, in a loop
    extra: str = ""  # what else a step returns: "norm" of the gradients, "grads", "summary" of new parameters
    batch: int = 0  # rows of a batch, which repeat `DISTINCT` ones; 0: drawn
    data: str = ""  # the dtype of inputs that are numbers; "": that of the parameters
    loss: str = ""  # the dtype of the loss; "": that of the activations

    @property
    def tolerance(self) -> float:
        return 0.0 if self.exact else FLOATS[self.dtype][2]


def draw_model(seed: int) -> Model:
    """A random model; a quarter of them compute in less than 64 bits, with an optimizer that does not divide."""
    rng = random.Random(seed)
    exact = rng.random() < 0.35
    dtype = rng.choice(["float64"] * 6 + ["float32", "mixed"])
    choosing = ("chosen", "experts", "masked", "pooled")  # a rounding error of 32 bits may choose another way
    known = EXACT_BLOCKS if exact else BLOCKS if dtype == "float64" else BLOCKS.keys() - choosing
    linear = ("sgd", "momentum", "averaged")
    optimizers = ["averaged", "sgd", "summed", "summed"] if exact else [*OPTIMIZERS] if dtype == "float64" else linear
    return Model(
        seed,
        tuple(rng.choice(sorted(known)) for _ in range(rng.choice([1, 1, 2, 3]))),
        rng.choice(sorted(STARTS)),
        rng.choice(["sum", "targets"] if exact else sorted(ENDS)),
        rng.choice(optimizers),
        exact,
        "float64" if exact else dtype,
        rng.choice(["step"] * 5 + ["loop"]),
        rng.choice(["", "", "grads", "summary"] if exact else ["", "", "norm", "grads", "summary"]),
    )


class Forward:
    """One application of a model: its blocks, with parameters named after their place."""

    def __init__(self, model: Model, recompute: str):
        rng = random.Random(f"{model.seed} sizes")
        self.model, self.recompute = model, recompute
        self.size = {name: rng.choice(sizes) for name, sizes in SIZES.items()}
        self.size["batch"] = model.batch or self.size["batch"]
        self.param_dtype, self.compute, _ = FLOATS[model.dtype]
        self.reduce = "float32" if self.param_dtype.endswith("16") else self.param_dtype
        self.precision = md.nn.Precision(self.param_dtype, self.compute, self.reduce)

    def dims(self, text: str) -> list[md.Dim]:
        """Dims by name; `hidden2:hidden` has the size of `hidden`."""
        pairs = (word.partition(":") for word in text.split())
        return [md.Dim(name, self.size[of or name.rstrip("0123456789")]) for name, _, of in pairs]

    def weight(self, name: str, dims: str) -> md.Tensor:
        return md.param(name, self.dims(dims), init=md.init.zeros(), dtype=self.param_dtype)

    def dot(self, *xs: md.Tensor, out: str) -> md.Tensor:
        """The product of operands in the compute dtype."""
        return md.einsum(*(md.cast(x, self.compute) for x in xs), out=out, dtype=self.reduce)

    def bound(self, x: md.Tensor) -> md.Tensor:
        """Keep the numbers of an exact model small enough to be exact."""
        return md.clip(x, -3, 3) if self.model.exact else x

    def bend(self, x: md.Tensor) -> md.Tensor:
        return md.relu(x) if self.model.exact else md.tanh(x)

    def loss(self, batch: dict[str, md.Tensor]) -> md.Tensor:
        """The sum over the batch of a loss."""
        with md.scope("start"):
            h = STARTS[self.model.start](self, batch)
        for i, name in enumerate(self.model.blocks):
            with md.scope(f"block{i}"):
                block = (EXACT_BLOCKS if self.model.exact else BLOCKS)[name]

                def run(h: md.Tensor, block: Any = block) -> md.Tensor:
                    return md.name(h + block(self, self.bound(h)), "kept")

                h = (run if self.recompute == "none" else md.checkpoint(run, self.recompute))(h)
        with md.scope("end"):
            return ENDS[self.model.end](self, h, batch)


def _embed(f: Forward, batch: dict[str, md.Tensor]) -> md.Tensor:
    return md.cast(md.take(f.weight("w", "vocab model"), batch["ids"], "vocab"), f.reduce)


def _project(f: Forward, batch: dict[str, md.Tensor]) -> md.Tensor:
    return f.dot(batch["x"], f.weight("w", "io model"), out="batch length model") + f.weight("b", "model")


STARTS: dict[str, Callable[[Forward, dict[str, md.Tensor]], md.Tensor]] = {"embed": _embed, "project": _project}


def _dense(f: Forward, h: md.Tensor) -> md.Tensor:
    inner = f.bend(f.dot(h, f.weight("w", "model hidden"), out="batch length hidden") + f.weight("b", "hidden"))
    return f.dot(inner, f.weight("v", "hidden model"), out="batch length model")


def _tied(f: Forward, h: md.Tensor) -> md.Tensor:
    """One weight is used twice."""
    w = f.weight("w", "model hidden")
    return f.dot(f.bound(f.dot(h, w, out="batch length hidden")), w, out="batch length model")


def _convolution(f: Forward, h: md.Tensor) -> md.Tensor:
    w = f.weight("w", "kernel model model2:model")
    y = md.conv(h, w, window={"length": "kernel"}, out="batch length model2")
    return md.rename(y, model2="model")


def _layers(f: Forward, h: md.Tensor) -> md.Tensor:
    """A loop over layers, whose body is recomputed by the backward pass or not."""

    def body(h: md.Tensor, row: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, None]:
        w, b = row
        y = f.dot(h, w, out="batch length model2")
        return f.bound(md.rename(y, model2="model") + b), None

    rows = f.weight("w", "layer model model2:model"), f.weight("b", "layer model")
    again = body if f.recompute in ("none", "names:kept") else md.checkpoint(body, f.recompute)
    return md.scan(again, h, rows, over="layer")[0]


def _shifts(f: Forward, h: md.Tensor) -> md.Tensor:
    """Neighbours along the length: shifted, padded, summed up."""
    before = md.shift(h, "length", 1) * f.weight("w", "model")
    low = md.pad(h, "length", 1, 0)
    return before + md.slice(low, "length", 0, f.size["length"]) - md.cumsum(h, "length", exclusive=True)


def _pooled(f: Forward, h: md.Tensor) -> md.Tensor:
    """A gate per sequence, from its largest values."""
    return md.max(h, "length") * f.weight("w", "model") + h


def _chosen(f: Forward, h: md.Tensor) -> md.Tensor:
    """Each token times the matrix of one expert: the largest of some whole numbers chooses it."""
    gates = f.dot(md.stop_gradient(h), f.weight("gate", "model experts"), out="batch length experts")
    one_hot = md.one_hot(md.argmax(gates, "experts"), f.dims("experts")[0], h.dtype)
    sent = md.prefer(f.dot(h, one_hot, out="experts batch length model"), "experts")
    inner = md.relu(f.dot(sent, f.weight("w", "experts model inner"), out="experts batch length inner"))
    y = f.dot(inner, f.weight("v", "experts inner model"), out="experts batch length model")
    return md.sum(md.prefer(y, "experts"), "experts")


def _norm(f: Forward, h: md.Tensor) -> md.Tensor:
    norm = md.nn.layer_norm if f.model.seed % 2 else md.nn.rms_norm
    return norm(h, "model", precision=f.precision)


def _attention(f: Forward, h: md.Tensor) -> md.Tensor:
    h = md.nn.layer_norm(h, precision=f.precision)
    q = f.dot(h, f.weight("q", "model heads head"), out="batch length heads head")
    k = f.dot(h, f.weight("k", "model heads head"), out="batch length heads head")
    v = f.dot(h, f.weight("v", "model heads head"), out="batch length heads head")
    y = md.attention(q, *(md.rename(x, length="memory") for x in (k, v)), causal=f.model.seed % 3 > 0)
    return f.dot(y, f.weight("o", "heads head model"), out="batch length model")


def _multi_head(f: Forward, h: md.Tensor) -> md.Tensor:
    heads, head = f.dims("heads head")
    positions = "rotary" if f.model.seed % 2 else "none"
    return md.nn.multi_head_attention(h, heads, head, causal=True, positions=positions, precision=f.precision)


def _experts(f: Forward, h: md.Tensor) -> md.Tensor:
    expert, inner = md.Dim("expert", f.size["experts"]), f.dims("inner")[0]
    rng = random.Random(f"{f.model.seed} router")
    router, dispatch = rng.choice(["top2", "switch"]), rng.choice(["index", "einsum", "auto"])
    how = {"capacity_factor": rng.choice([0.5, 1.0, 2.0]), "dispatch": dispatch, "train": False}
    y, _ = md.nn.moe_layer(md.tanh(h), expert, inner, router=router, precision=f.precision, **how)
    return y  # the balance loss is a mean over the batch, so that of a micro-batch is another


def _gated(f: Forward, h: md.Tensor) -> md.Tensor:
    return md.nn.feed_forward(h, f.dims("hidden")[0], activation="silu", gated=True, precision=f.precision)


def _recurrent(f: Forward, h: md.Tensor) -> md.Tensor:
    """A linear recurrence along the length."""
    decay = md.sigmoid(f.weight("a", "model"))
    a = md.broadcast(decay, h.dims)
    return md.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, h), "length")[1]


def _masked(f: Forward, h: md.Tensor) -> md.Tensor:
    """A branch on a weight, which no part of a batch changes."""
    scale = f.weight("w", "model")
    return md.cond(md.sum(scale) > 0, lambda h, w: h * w, lambda h, w: md.tanh(h + w), h, scale)


EXACT_BLOCKS: dict[str, Callable[[Forward, md.Tensor], md.Tensor]] = {
    "chosen": _chosen, "convolution": _convolution, "dense": _dense, "layers": _layers, "shifts": _shifts,
    "tied": _tied,
}  # fmt: skip
BLOCKS = EXACT_BLOCKS | {
    "attention": _attention, "experts": _experts, "gated": _gated, "masked": _masked, "multi_head": _multi_head,
    "norm": _norm, "pooled": _pooled, "recurrent": _recurrent,
}  # fmt: skip


def _targets(f: Forward, h: md.Tensor, batch: dict[str, md.Tensor]) -> md.Tensor:
    """The sum of every token's value at its target, and of all values."""
    logits = f.dot(h, f.weight("w", "model vocab"), out="batch length vocab")
    is_target = md.one_hot(batch["targets"], f.dims("vocab")[0], h.dtype)
    return md.sum(logits * is_target) - md.sum(f.bound(h))


def _entropy(f: Forward, h: md.Tensor, batch: dict[str, md.Tensor]) -> md.Tensor:
    logits = f.dot(h, f.weight("w", "model vocab"), out="batch length vocab") + f.weight("b", "vocab")
    return md.sum(md.nn.softmax_cross_entropy(logits, batch["targets"])) / f.size["length"]


def _squares(f: Forward, h: md.Tensor, batch: dict[str, md.Tensor]) -> md.Tensor:
    return md.sum(md.square(md.mean(h, "length") - 1))


def _sum(f: Forward, h: md.Tensor, batch: dict[str, md.Tensor]) -> md.Tensor:
    return md.sum(f.bound(h) * f.weight("w", "model"))


ENDS: dict[str, Callable[[Forward, md.Tensor, dict[str, md.Tensor]], md.Tensor]] = {
    "entropy": _entropy, "squares": _squares, "sum": _sum, "targets": _targets,
}  # fmt: skip


def step_of(model: Model, recompute: str = "none", parts: int = 1) -> Callable[[Any, Any, Any], Any]:
    """The training step `(params, state, batch) -> (params, state, metrics)`; of all steps if they are a loop.

    A loop takes batches stacked over `step`. With `parts`, the gradients are summed over so many parts of the batch.
    """
    applied = md.model(Forward(model, recompute).loss)
    optimizer = optimizer_of(model)

    def gradients(params: Any, batch: Any) -> tuple[md.Tensor, Any]:
        scale = 1 if model.exact else 1 / Forward(model, recompute).size["batch"]

        def loss(params: Any, batch: Any) -> md.Tensor:
            value = applied(params, batch) * scale
            return md.cast(value, model.loss) if model.loss else value

        if parts == 1:
            return md.value_and_grad(loss)(params, batch)
        return md.accumulate(lambda part: md.value_and_grad(loss)(params, part), batch, parts, "batch")

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = gradients(params, batch)
        params, state = optimizer.update(grads, state, params)
        metrics: dict[str, Any] = {"loss": value}
        if model.extra == "norm":
            metrics["norm"] = md.optim.global_norm(grads)
        if model.extra == "grads":
            metrics["grads"] = grads
        if model.extra == "summary":
            metrics["summary"] = {path: md.sum(x) for path, x in params.items()}
        return params, state, metrics

    def loop(params: Any, state: Any, batches: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            params, state = carry
            params, state, metrics = step(params, state, batch)
            return (params, state), metrics

        (params, state), metrics = md.scan(one, (params, state), batches, over=md.Dim("step", STEPS))
        return params, state, metrics

    return loop if model.form == "loop" else step


def optimizer_of(model: Model) -> Any:
    return (EXACT_OPTIMIZERS if model.exact else OPTIMIZERS)[model.optimizer]()


@lru_cache(maxsize=4)
def arguments(model: Model) -> tuple[Any, Any, tuple[Any, ...]]:
    """Initial parameters and state, and the batch of each call, as NumPy-backed tensors."""
    rng, forward = np.random.default_rng(model.seed), Forward(model, "none")

    def batch() -> dict[str, np.ndarray]:
        numbers = {"ids": (0, "vocab"), "targets": (0, "vocab"), "x": (-2, "")}
        found: dict[str, np.ndarray] = {}
        for name, (low, high) in numbers.items():
            dims = forward.dims("batch length io" if name == "x" else "batch length")
            low = 0 if model.data.startswith("u") else low
            x = rng.integers(low, forward.size[high] if high else 3, [d.size for d in dims])
            x = x[_repeated(len(x))] if model.batch else x
            found[name] = x.astype(np.dtype(model.data or FLOATS[model.dtype][0]) if name == "x" else "int32")
        return found

    used = ("x" if model.start == "project" else "ids", *(["targets"] if model.end in ("targets", "entropy") else []))
    batches = [{name: x for name, x in batch().items() if name in used} for _ in range(STEPS)]
    dims = {name: forward.dims("batch length io" if name == "x" else "batch length") for name in used}
    if model.form == "loop":
        step = md.Dim("step", STEPS)
        batches = [{name: np.stack([b[name] for b in batches]) for name in used}]
        named = [{name: md.tensor(x, [step, *dims[name]]) for name, x in b.items()} for b in batches]
    else:
        named = [{name: md.tensor(x, dims[name]) for name, x in b.items()} for b in batches]
    specs = md.model(forward.loss).specs({name: md.spec(dims[name], x.dtype) for name, x in named[0].items()})

    def values(shape: list[int]) -> np.ndarray:
        return rng.choice([-1, 0, 1, 1, 2], shape) if model.exact else rng.normal(size=shape) * 0.5

    params = {
        path: md.tensor(np.asarray(values([d.size for d in t.dims])).astype(t.dtype), t.dims)
        for path, t in specs.items()
    }
    state = optimizer_of(model).init(params)
    return params, state, tuple(named)


def _repeated(n: int) -> np.ndarray:
    """The row that each of n rows repeats; the sums of their gradients are no small multiples of powers of two."""
    return np.concatenate([np.arange(DISTINCT), np.random.default_rng(n).integers(DISTINCT, size=n)])[:n]


def leaves(x: Any) -> list[np.ndarray]:
    return [np.asarray(y.numpy()) for y in jax.tree.leaves(x)]
