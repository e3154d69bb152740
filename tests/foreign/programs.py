"""Right programs of `jax.shard_map` at small sizes: how to build each from its module, or from one with a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

HANDWRITTEN = Path(__file__).parents[2] / "benchmarks" / "handwritten"
OURS = Path(__file__).parent


class Built(NamedTuple):
    """A step to verify, its arguments, and the same step on one device, if it is written down."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    reference: Callable[..., Any] | None = None


class Program(NamedTuple):
    path: Path
    axes: list[str]
    functions: list[str] | None  # those in which faults are made
    leaves: int
    build: Callable[[Any], Built]


def _mapped(f: Any, sizes: dict[str, int], ins: Any, outs: Any, check: bool = True) -> Any:
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check)


def two_layer(name: str) -> Callable[[Any], Built]:
    def build(module: Any) -> Built:
        module.BATCH, module.IO, module.HIDDEN = 8, 16, 16
        layout = module.LAYOUTS[name]
        ins = ({n: layout.spec(n) for n in module.PARAMETERS}, layout.spec("x"), layout.spec("target"))
        step = _mapped(getattr(module, name), layout.mesh, ins, (ins[0], P()))
        a = module.arrays()
        return Built(step, ({n: a[n] for n in module.PARAMETERS}, a["x"], a["target"]), module.whole)

    return build


def language_model(name: str) -> Callable[[Any], Built]:
    def build(module: Any) -> Built:
        small = {"batch": 4, "length": 3, "model": 8, "heads": 4, "head": 3, "d_ff": 12, "layer": 2, "vocab": 16}
        module.SIZES.update(small)
        for dim, size in small.items():
            setattr(module, {"layer": "LAYERS"}.get(dim, dim.upper()), size)
        specs = module._state_specs()
        at = module.spec(module.TOKENS)
        step = _mapped(getattr(module, name), {"rows": 2, "cols": 4}, (specs, at, at), (specs, P()))
        a = module.arrays()
        state = module.initial_state({n: a[n] for n in module.DIMS})
        return Built(step, (state, a["tokens"], a["targets"]), module.whole_step)

    return build


def sharded_update(name: str) -> Callable[[Any], Built]:
    def build(module: Any) -> Built:
        module.SIZES, module.BATCH = {"w1": (8, 16), "w2": (16, 8), "w3": (8, 16)}, 8
        state = module.arrays()[0]
        rng = np.random.default_rng(1)
        x, target = (rng.standard_normal((8, n)).astype(np.float32) for n in (8, 16))
        weights = {n: P("all") if name == "sharded" else P() for n in module.SIZES}
        specs = {"params": weights, "m": weights, "v": weights, "step": P()}
        step = _mapped(getattr(module, name), {"all": 4}, (specs, P("all"), P("all")), (specs, P()))
        return Built(step, (state, x, target))

    return build


def moe_layer(module: Any) -> Built:
    module.GROUPS, module.TOKENS, module.MODEL, module.HIDDEN, module.EXPERTS, module.CAPACITY = 4, 6, 5, 7, 4, 3
    module.N = 4 * 6 * 5
    a = module.arrays()
    specs = {n: module.SPECS[n] for n in module.STATE}
    step = _mapped(module.device, {"rows": 4}, (specs, module.SPECS["target"]), (specs, P()))
    reference = lambda state, target: module.whole(state, target, False)  # noqa: E731
    return Built(step, ({n: a[n] for n in module.STATE}, a["target"]), reference)


def halo(module: Any) -> Built:
    module.BATCH, module.HEIGHT, module.WIDTH, module.IN, module.OUT = 2, 8, 5, 3, 2
    a = module.arrays()
    step = _mapped(module.device, {"rows": 2, "cols": 4}, tuple(module.SPECS.values()), module.SPECS["x"])
    return Built(step, (a["x"], a["w"]), module.whole)


def attention(name: str) -> Callable[[Any], Built]:
    def build(module: Any) -> Built:
        module.BATCH, module.LENGTH, module.HEADS, module.HEAD, module.SCALE = 2, 8, 4, 3, 0.7
        attend = module.METHODS[name]

        def whole(q: Any, k: Any, v: Any) -> Any:
            scores = module._scores(q, k)
            if name == "all_to_all":
                allowed = np.arange(module.LENGTH)[:, None] >= np.arange(module.LENGTH)
                scores = jax.numpy.where(allowed, scores, -np.inf)
            return jax.numpy.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, -1), v)

        def step(attend: Any, total: Any) -> Any:
            def run(q: Any, k: Any, v: Any, weights: Any) -> Any:
                loss = lambda *xs: jax.numpy.sum(weights * jax.numpy.square(attend(*xs)))  # noqa: E731
                value, grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
                return (*grads, total(value))

            return run

        at = module.SPLIT
        summed = lambda x: jax.lax.psum(x, "rows")  # noqa: E731
        mapped = _mapped(step(attend, summed), {"rows": 4}, (at,) * 4, (at, at, at, P()))
        q, k, v = module.arrays().values()
        return Built(mapped, (q, k, v, k * q), step(whole, lambda x: x))

    return build


def gpipe(module: Any) -> Built:
    from models import llama  # noqa: F401 - only the names of its parameters are used

    rng = np.random.default_rng(0)
    d, n, h, f, v, layers = 8, 2, 4, 6, 12, 4
    sizes = {
        "embed": (v, d), "unembed": (d, v), "norm/scale": (d,), "layer/norm_1/scale": (layers, d),
        "layer/norm_2/scale": (layers, d), "layer/attention/wq": (layers, d, n, 1, h),
        "layer/attention/wk": (layers, d, n, h), "layer/attention/wv": (layers, d, n, h),
        "layer/attention/wo": (layers, n, 1, h, d), "layer/feed_forward/w_gate": (layers, d, f),
        "layer/feed_forward/w_in": (layers, d, f), "layer/feed_forward/w_out": (layers, f, d),
    }  # fmt: skip
    params = {name: 0.5 * rng.standard_normal(s).astype(np.float32) for name, s in sizes.items()}
    zeros = {name: np.zeros_like(x) for name, x in params.items()}
    state = (params, {"m": zeros, "v": {k: x.copy() for k, x in zeros.items()}, "step": np.int32(0)})
    tokens = rng.integers(0, v, (4, 3), dtype=np.int32)
    targets = rng.integers(0, v, (4, 3), dtype=np.int32)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("stages") if "layer/" in jax.tree_util.keystr(path) else P(), state
    )
    step = lambda *xs: module.step(*xs, microbatches=2, attend=module.attention)  # noqa: E731
    return Built(_mapped(step, {"stages": 4}, (specs, P(), P()), (specs, P()), False), (state, tokens, targets))


def written(name: str, sizes: dict[str, int], ins: Any, outs: Any, shapes: Any, check: bool = True) -> Program:
    """A function of `written.py`, with normal numbers for its arguments: shapes, or ranges of integers with a shape."""

    def build(module: Any) -> Built:
        rng = np.random.default_rng(0)

        def drawn(shape: Any) -> Any:
            if isinstance(shape[0], str):
                return rng.integers(0, int(shape[0]), shape[1:], dtype=np.int32)
            return rng.standard_normal(shape).astype(np.float32)

        args = jax.tree.map(drawn, shapes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int | str))
        return Built(_mapped(getattr(module, name), sizes, ins, outs, check), tuple(args))

    inside = {"megatron": ["enter", "leave", "block", "megatron", "<lambda>"], "recurrent": ["_cell", "recurrent"]}
    return Program(OURS / "written.py", list(sizes), inside.get(name, [name]), 3, build)


_MEGATRON = {
    "scale_1": (4,), "scale_2": (4,), "q": (4, 4, 3), "k": (4, 4, 3), "v": (4, 4, 3), "o": (4, 3, 4), "up": (4, 8),
    "down": (8, 4),
}  # fmt: skip
_MEGATRON_AT = {
    "scale_1": P(), "scale_2": P(), "q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"),
    "o": P("model"), "up": P(None, "model"), "down": P("model"),
}  # fmt: skip
_LAYERS = [((8, 8), (8,)), ((8, 4), (4,))]
_LAYERS_AT = [(P("data"), P()), (P("data"), P())]

PROGRAMS: dict[str, Program] = {
    **{f"two_layer.{n}": Program(HANDWRITTEN / "two_layer.py", axes, [n], 3, two_layer(n)) for n, axes in (
        ("data", ["all"]), ("model", ["all"]), ("data_model", ["rows", "cols"]),
        ("three_d", ["rows", "cols", "planes"]),
    )},
    "language_model": Program(HANDWRITTEN / "language_model.py", ["rows", "cols"],
                              ["layer", "layer_backward", "cross_entropy", "handwritten_step"], 4,
                              language_model("handwritten_step")),
    "language_model.grad": Program(HANDWRITTEN / "language_model.py", ["rows", "cols"], ["jax_grad_step"], 4,
                                   language_model("jax_grad_step")),
    **{f"sharded_update.{n}": Program(HANDWRITTEN / "sharded_update.py", ["all"], [n], 3, sharded_update(n))
       for n in ("replicated", "sharded")},
    "moe_layer": Program(HANDWRITTEN / "moe_layer.py", ["rows"], None, 2, moe_layer),
    "halo": Program(HANDWRITTEN / "halo.py", ["rows", "cols"], None, 1, halo),
    "attention.ring": Program(HANDWRITTEN / "attention.py", ["rows"], ["_ring_forward", "_send", "_backward"], 1,
                              attention("ring")),
    "attention.all_to_all": Program(HANDWRITTEN / "attention.py", ["rows"], ["exchange"], 1, attention("all_to_all")),
    "gpipe": Program(HANDWRITTEN / "gpipe.py", ["stages"], None, 3, gpipe),
    "fsdp": written("fsdp", {"data": 4}, (_LAYERS_AT, P("data"), P("data")), (_LAYERS_AT, P()),
                    [_LAYERS, (8, 8), (8, 4)], False),
    "megatron": written("megatron", {"data": 2, "model": 2},
                        (_MEGATRON_AT, P("data", "model"), P("data", "model")), (_MEGATRON_AT, P()),
                        [_MEGATRON, (4, 6, 4), (4, 6, 4)], False),
    "ring_attention": written("ring_attention", {"ring": 4}, (P(None, "ring"),) * 3, P(None, "ring"),
                              [(2, 8, 2, 3)] * 3, False),
    "pipeline": written("pipeline", {"stage": 4}, (P("stage"), P()), P(), [(4, 5, 5), (3, 2, 5)], False),
    "experts": written("experts", {"expert": 4}, (P(), P("expert"), P("expert"), P("expert")), (P("expert"), P()),
                       [(5, 4), (4, 5, 6), (4, 6, 5), (8, 5)]),
    "vocabulary": written("vocabulary", {"data": 2, "model": 4}, (P("model"), P("data"), P("data")), P(),
                          [(16, 5), ("16", 4, 3), ("16", 4, 3)]),
    "statistics": written("statistics", {"data": 2, "model": 2}, (P("data", "model"), P("model")),
                          (P("data", "model"), P()), [(8, 6), (6, 4)]),
    "recurrent": written("recurrent", {"data": 2, "model": 2}, (P("model"), P(None, "data")), (P("model"), P()),
                         [(6, 6), (3, 4, 6)]),
}  # fmt: skip
