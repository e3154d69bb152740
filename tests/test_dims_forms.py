"""Wherever dims are taken, every form is: a `Dim`, a name, text with sizes, several of them as text or as a sequence.

The table has every public parameter of dims. Each call is traced once with each form; all traces are the same graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import meshdsl as md
from meshdsl.trace import trace
from tests.test_public_names import REFERENCE

X = md.spec("a:4 b:6")
IMAGE = md.spec("n:2 h:4 w:4 c:6")
SEQ = md.spec("n:2 length:4 model:8")
IDS = md.spec("a:4", "int32")
MATRIX = md.spec("a:4 b:4")
Q, K = md.spec("n:2 length:4 g:3 head:8"), md.spec("n:2 memory:5 g:3 head:8")
KEY = md.random.key(0)
A, B = md.dims("a:4 b:6")
CACHE = {kind: md.spec("n:2 memory:5 heads:2 head:4") for kind in ("k", "v")}
TOKEN = md.tensor([[1, 2]], "n length")


def greedy(**dims: Any) -> Any:
    step = lambda tokens, cache, position, mask: (md.one_hot(tokens % 5, "vocab:5"), cache)  # noqa: E731
    return md.nn.decode.greedy(step, lambda dims: (), dims.get("batch", "n:2"), dims.get("length", "length:3"))


def sample(**dims: Any) -> Any:
    step = lambda tokens, cache, position, mask: (md.one_hot(tokens % 5, "vocab:5"), cache)  # noqa: E731
    return md.nn.decode.sample(step, lambda dims: (), dims.get("batch", "n:2"), dims.get("length", "length:3"), KEY)


def beams(**dims: Any) -> Any:
    step = lambda tokens, cache, position, mask: (md.one_hot(tokens % 5, "vocab:5"), cache)  # noqa: E731
    given = {"batch": "n:2", "length": "length:3", "beam": "beam:2", **dims}
    return md.nn.decode.beam_search(step, lambda dims: (), given["batch"], given["length"], given["beam"])


def summed(y: Any) -> Any:
    return y.sum(-1)


def double(y: Any) -> Any:
    return y * 2.0


def local(x: Any, **options: Any) -> Any:
    return md.local(double, x, **{"out": "a b", **options})


def moe(x: Any, **dims: Any) -> Any:
    given = {"experts": "expert:2", "hidden": "inner:6", "tokens": "length", "over": "model", **dims}
    return md.nn.moe_layer(x, given.pop("experts"), given.pop("hidden"), router="switch", **given)[0]


def sent(x: Any, nodes: Any) -> Any:
    return moe(x, experts="expert:4", dispatch=md.nn.moe.TokenExchange("index", nodes=nodes))


def routed(function: Any, gates: Any, **dims: Any) -> Any:
    return function(gates, router="switch", **{"tokens": "t", "experts": "e", "capacity": "s:2", **dims})


ONE, MANY, NEW, NEWS = "one", "several", "one new", "several new"
Row = tuple[str, str, str, Callable[..., Any], tuple[Any, ...]]

# parameter, kind, the dims as text with sizes, the call, and the types of its other arguments
ROWS: list[tuple[str, str, str, Callable[..., Any], tuple[Any, ...]]] = [
    *((f"{name}.over", MANY, "a:4 b:6", lambda d, x, f=name: getattr(md, f)(x, d), (X,))
      for name in ("sum", "mean", "max", "min", "prod", "logsumexp", "var", "norm", "softmax", "log_softmax", "std",
                   "median", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum", "nanvar")),
    ("quantile.over", MANY, "a:4 b:6", lambda d, x: md.quantile(x, 0.3, d), (X,)),
    ("bincount.over", MANY, "a:4", lambda d, i: md.bincount(i, "n:3", over=d), (IDS,)),
    ("bincount.into", NEW, "n:3", lambda d, i: md.bincount(i, d), (IDS,)),
    ("histogram.over", MANY, "a:4", lambda d, x: md.histogram(x, "n:3", 0, 1, d), (X,)),
    ("histogram.bins", NEW, "n:3", lambda d, x: md.histogram(x, d, 0, 1), (X,)),
    *((f"{name}.into", NEW, "n:3", lambda d, x, i, f=name: getattr(md, f)(x, i, d), (X, IDS))
      for name in ("segment_sum", "segment_max", "segment_min")),
    *((f"{name}.over", ONE, "b:6", lambda d, x, i, f=name: getattr(md, f)(x, i, 1.0, d), (X, IDS))
      for name in ("scatter_set", "scatter_max", "scatter_min", "scatter_mul")),
    ("searchsorted.over", ONE, "b:6", lambda d, x, v: md.searchsorted(x, v, d), (X, md.spec("n:2"))),
    *((f"{name}.dim", ONE, "a:4", lambda d, x, f=name: getattr(md, f)(x, d, 2), (X,))
      for name in ("repeat", "tile", "resize")),
    *((f"fft.{name}.over", MANY, "a:4 b:6", lambda d, x, f=name: getattr(md.fft, f)(x, d), (X,))
      for name in ("fft", "ifft")),
    *((f"fft.{name}.over", ONE, "b:6", lambda d, x, f=name: getattr(md.fft, f)(x, d), (X,))
      for name in ("rfft", "irfft", "fftshift", "ifftshift")),
    *((f"fft.{name}.dim", NEW, "a:4", lambda d, f=name: getattr(md.fft, f)(d), ()) for name in ("fftfreq", "rfftfreq")),
    *((f"linalg.{name}.{p}", ONE, text, lambda d, x, f=name, p=p, more=more: getattr(md.linalg, f)(
        x, *more[:-1], **{"rows": "a", "columns": "b", p: d}, **more[-1]), (MATRIX,))
      for name, *more in (("cholesky", {}), ("det", {}), ("diagonal", {}), ("inv", {}), ("pinv", {}), ("slogdet", {}),
                          ("trace", {}), ("eigh", {"rank": "r"}), ("qr", {"rank": "r"}), ("svd", {"rank": "r"}),
                          ("matrix_power", {"n": 2}), ("solve", md.ones("a:4"), {}),
                          ("solve_triangular", md.ones("a:4"), {}))
      for p, text in (("rows", "a:4"), ("columns", "b:4"))),
    *((f"linalg.eye.{p}", NEW, text, lambda d, p=p: md.linalg.eye(**{"rows": "a:4", "columns": "b:6", p: d}), ())
      for p, text in (("rows", "a:4"), ("columns", "b:6"))),
    *((f"Tensor.{name}.over", MANY, "a:4 b:6", lambda d, x, f=name: getattr(x, f)(d), (X,))
      for name in ("sum", "mean", "max", "min", "prod", "std", "var")),
    *((f"{name}.over", MANY, "a:4 b:6", lambda d, x, f=name: getattr(md, f)(x > 0, d), (X,))
      for name in ("all", "any")),
    *((f"Tensor.{name}.over", MANY, "a:4 b:6", lambda d, x, f=name: getattr(x > 0, f)(d), (X,))
      for name in ("all", "any")),
    *((f"{name}.over", ONE, "b:6", lambda d, x, f=name: getattr(md, f)(x, d), (X,))
      for name in ("argmax", "argmin", "argsort", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")),
    ("accumulate.over", ONE, "a:4", lambda d, x: md.accumulate(lambda y: md.sum(y, "a"), x, 2, d), (X,)),
    ("arange.dim", NEW, "n:4", lambda d: md.arange(d), ()),
    ("associative_scan.over", ONE, "a:4", lambda d, x: md.associative_scan(lambda p, q: p + q, x, over=d), (X,)),
    *((f"{name}.over", ONE, "head:8", lambda d, q, k, f=name: _in(f)(q, k, k, over=d), (Q, K))
      for name in ("attention", "nn.attention")),
    *((f"{name}.length", ONE, "length:4", lambda d, q, k, f=name: _in(f)(q, k, k, length=d), (Q, K))
      for name in ("attention", "nn.attention")),
    *((f"{name}.memory", ONE, "memory:5", lambda d, q, k, f=name: _in(f)(q, k, k, memory=d), (Q, K))
      for name in ("attention", "nn.attention")),
    ("broadcast.dims", MANY, "a:4 b:6", lambda d, x: md.broadcast(x, d), (X,)),
    ("broadcast.dims", NEWS, "a:4 b:6 z:2", lambda d, x: md.broadcast(x, d), (X,)),
    ("concat.over", ONE, "a:4", lambda d, x: md.concat([x, x], d), (X,)),
    ("conv.out", NEWS, "n:2 h:4 w:4 f:5",
     lambda d, x, w: md.conv(x, w, window={"h": "kh", "w": "kw"}, out=d), (IMAGE, md.spec("kh:3 kw:3 c:6 f:5"))),
    ("dot.over", MANY, "a:4 b:6", lambda d, x: md.dot(x, x, d), (X,)),
    ("dynamic_slice.dim", ONE, "a:4", lambda d, x: md.dynamic_slice(x, d, 1, 2), (X,)),
    ("dynamic_update_slice.dim", ONE, "a:4", lambda d, x: md.dynamic_update_slice(x, x, d, 0), (X,)),
    ("einsum.out", MANY, "b:6 a:4", lambda d, x: md.einsum(x, x, out=d), (X,)),
    ("flatten.dims", MANY, "a:4 b:6", lambda d, x: md.flatten(x, d, "ab"), (X,)),
    ("flatten.into", NEW, "ab:24", lambda d, x: md.flatten(x, "a b", d), (X,)),
    ("fresh_dim.dim", NEW, "a:4", lambda d, x: md.zeros(md.fresh_dim(d, "a b")), (X,)),
    ("fresh_dim.taken", MANY, "a:4 b:6", lambda d, x: md.zeros([md.fresh_dim("a:4", d), md.fresh_dim("b:6", d)]), (X,)),
    ("full.dims", NEWS, "a:4 b:6", lambda d: md.full(d, 2.0), ()),
    ("grouped_dot.by", ONE, "e:3", lambda d, x, w, i: md.grouped_dot(x, w, i, by=d, over="b"),
     (X, md.spec("e:3 b:6 f:2"), IDS)),
    ("grouped_dot.over", ONE, "b:6", lambda d, x, w, i: md.grouped_dot(x, w, i, by="e", over=d),
     (X, md.spec("e:3 b:6 f:2"), IDS)),
    *((f"init.{name}.fan_in", ONE, "a:4",
       lambda d, f=name: md.model(lambda: md.param("w", "a:4 b:6", init=_initializer(f, d))).init(KEY), ())
      for name in ("he", "lecun")),
    ("init.glorot.fan_in", MANY, "a:4 b:6", lambda d: _made(md.init.glorot(d, "b")), ()),
    ("init.glorot.fan_out", MANY, "a:4 b:6", lambda d: _made(md.init.glorot("a", d)), ()),
    ("init.variance_scaling.fan_in", MANY, "a:4 b:6", lambda d: _made(md.init.variance_scaling(1.0, fan_in=d)), ()),
    ("init.variance_scaling.fan_out", MANY, "a:4 b:6", lambda d: _made(md.init.variance_scaling(1.0, fan_out=d)), ()),
    ("iota.dim", NEW, "n:4", lambda d: md.iota(d), ()),
    ("linspace.dim", NEW, "n:4", lambda d: md.linspace(d, 0.0, 1.0), ()),
    ("layers.over", NEW, "layer:3", lambda d, x: _model(lambda x: md.layers(_layer, x, over=d), x), (X,)),
    ("local.out", MANY, "a:4 b:6", lambda d, x: local(x, out=d), (X,)),
    ("local.whole", MANY, "a:4 b:6", lambda d, x: local(x, whole=d), (X,)),
    ("local.split", MANY, "a:4 b:6", lambda d, x: local(x, split=d), (X,)),
    ("local.contract", MANY, "b:6", lambda d, x: md.local(summed, x, out="a", contract=d), (X,)),
    ("max_pool.window", ONE, "h:4", lambda d, x: md.max_pool(x, window={_key(d): 2}), (IMAGE,)),
    ("avg_pool.window", ONE, "h:4", lambda d, x: md.avg_pool(x, window={_key(d): 2}, stride={_key(d): 2}), (IMAGE,)),
    ("conv.window", ONE, "h:4", lambda d, x, w: md.conv(
        x, w, window={_key(d): "kh", "w": "kw"}, out="n h w f", stride={_key(d): 2}, dilation={_key(d): 1},
        base_dilation={_key(d): 1}), (IMAGE, md.spec("kh:3 kw:3 c:6 f:5"))),
    ("one_hot.dim", NEW, "n:4", lambda d, i: md.one_hot(i, d), (IDS,)),
    ("ones.dims", NEWS, "a:4 b:6", lambda d: md.ones(d), ()),
    ("zeros.dims", NEWS, "a:4 b:6", lambda d: md.zeros(d), ()),
    ("pad.dim", ONE, "a:4", lambda d, x: md.pad(x, d, 1, 1), (X,)),
    ("param.dims", NEWS, "a:4 b:6", lambda d: md.model(lambda: md.param("w", d)).init(KEY), ()),
    ("prefer.dims", ONE, "a:4", lambda d, x: md.prefer(x, d), (X,)),
    ("inverse_index.over", ONE, "a:4", lambda d, i: md.inverse_index(i, over=d, into="s:4"), (IDS,)),
    ("inverse_index.into", NEWS, "s:2 u:3", lambda d, i: md.inverse_index(i, over="a", into=d), (IDS,)),
    ("put_add.over", ONE, "b:6", lambda d, x, i: md.put_add(x, i, md.ones("a:4"), d), (md.spec("b:6"), IDS)),
    ("ragged.dim", ONE, "b:6", lambda d, x: md.ragged(x, md.full("a:4", 2, "int32"), d), (X,)),
    ("random.bernoulli.dims", NEWS, "a:4 b:6", lambda d: md.random.bernoulli(KEY, 0.5, d), ()),
    *((f"random.{name}.dims", NEWS, "a:4 b:6", lambda d, f=name: getattr(md.random, f)(KEY, d), ())
      for name in ("bits", "gumbel", "normal", "uniform", "exponential", "laplace", "rademacher")),
    *((f"random.{name}.dims", NEWS, "a:4 b:6", lambda d, f=name, p=p: getattr(md.random, f)(KEY, *p, d), ())
      for name, *p in (("gamma", 2.0), ("beta", 2.0, 3.0), ("poisson", 3.0), ("t", 5.0))),
    ("random.dirichlet.dims", NEWS, "n:3", lambda d, x: md.random.dirichlet(KEY, md.exp(md.sum(x, "a")), "b", d), (X,)),
    ("random.dirichlet.over", ONE, "b:6", lambda d, x: md.random.dirichlet(KEY, x, d), (X,)),
    ("random.categorical.dims", NEWS, "n:3", lambda d, x: md.random.categorical(KEY, x, "b", d), (X,)),
    ("random.categorical.over", ONE, "b:6", lambda d, x: md.random.categorical(KEY, x, d), (X,)),
    ("random.choice.dim", NEW, "n:3", lambda d, x: md.random.choice(KEY, x, "b", d), (X,)),
    ("random.choice.over", ONE, "b:6", lambda d, x: md.random.choice(KEY, x, d, "n:3"), (X,)),
    ("random.truncated_normal.dims", NEWS, "a:4 b:6", lambda d: md.random.truncated_normal(KEY, -1.0, 1.0, d), ()),
    ("random.randint.dims", NEWS, "a:4 b:6", lambda d: md.random.randint(KEY, d, 0, 5), ()),
    ("random.permutation.x", NEW, "n:4", lambda d: md.random.permutation(KEY, d), ()),
    ("random.permutation.over", ONE, "a:4", lambda d, x: md.random.permutation(KEY, x, d), (X,)),
    ("random.split.n", NEW, "n:4", lambda d: md.random.split(KEY, d), ()),
    ("rename.new", ONE, "z:4", lambda d, x: md.rename(x, a=d), (X,)),
    ("reshape.dims", NEWS, "p:8 q:3", lambda d, x: md.reshape(x, d), (X,)),
    ("reverse.dim", ONE, "a:4", lambda d, x: md.reverse(x, d), (X,)),
    ("roll.dim", ONE, "a:4", lambda d, x: md.roll(x, d, 1), (X,)),
    ("scan.over", ONE, "a:4", lambda d, x: md.scan(lambda c, y: (c + y, c), md.zeros("b:6"), x, over=d), (X,)),
    ("shard.split", ONE, "a:4", lambda d, x: md.shard(x, {_key(d): ()}), (X,)),
    ("shift.dim", ONE, "a:4", lambda d, x: md.shift(x, d, 1), (X,)),
    ("slice.dim", ONE, "a:4", lambda d, x: md.slice(x, d, 1, 2), (X,)),
    ("spec.dims", NEWS, "a:4 b:6", lambda d: md.zeros(md.spec(d).dims), ()),
    ("dims.text", NEWS, "a:4 b:6", lambda d: md.zeros(md.dims(d)), ()),
    ("squeeze.dims", MANY, "p:1 q:1", lambda d, x: md.squeeze(x, d), (md.spec("a:4 p:1 q:1"),)),
    ("stack.dim", NEW, "z:2", lambda d, x: md.stack([x, x], d), (X,)),
    ("take.over", ONE, "b:6", lambda d, x, i: md.take(x, i, d), (md.spec("b:6"), IDS)),
    ("tensor.dims", MANY, "a:1 b:2", lambda d: md.tensor([[1.0, 2.0]], d), ()),
    ("top_k.over", ONE, "b:6", lambda d, x: md.top_k(x, d, "k:2"), (X,)),
    ("top_k.k", NEW, "k:2", lambda d, x: md.top_k(x, "b", d), (X,)),
    ("transpose.dims", MANY, "b:6 a:4", lambda d, x: md.transpose(x, d), (X,)),
    *((f"{name}.rows", ONE, "a:4", lambda d, x, f=name: getattr(md, f)(x, d, "b"), (X,)) for name in ("tril", "triu")),
    *((f"{name}.columns", ONE, "b:6", lambda d, x, f=name: getattr(md, f)(x, "a", d), (X,))
      for name in ("tril", "triu")),
    ("unflatten.dim", ONE, "b:6", lambda d, x: md.unflatten(x, d, "p:2 q:3"), (X,)),
    ("unflatten.into", NEWS, "p:2 q:3", lambda d, x: md.unflatten(x, "b", d), (X,)),
    ("unstack.dim", ONE, "a:4", lambda d, x: md.unstack(x, d), (X,)),
    ("vmap.over", MANY, "a:4 b:6", lambda d, x: md.vmap(lambda y: y * 2, over=d)(x), (X,)),
    ("nn.Precision.einsum.out", MANY, "b:6 a:4", lambda d, x: md.nn.Precision().einsum(x, x, out=d), (X,)),
    ("nn.Precision.grouped_dot.by", ONE, "e:3",
     lambda d, x, w, i: md.nn.Precision().grouped_dot(x, w, i, d, "b"), (X, md.spec("e:3 b:6 f:2"), IDS)),
    ("nn.Precision.grouped_dot.over", ONE, "b:6",
     lambda d, x, w, i: md.nn.Precision().grouped_dot(x, w, i, "e", d), (X, md.spec("e:3 b:6 f:2"), IDS)),
]  # fmt: skip


def _results(record: Any) -> list[md.Tensor]:
    """The tensors of an assignment or a routing."""
    fields = record._asdict() if hasattr(record, "_asdict") else vars(record)
    return [x for x in fields.values() if isinstance(x, md.Tensor)]


def _in(name: str) -> Callable[..., Any]:
    value: Any = md
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _key(d: Any) -> Any:
    """A dim as the key of a mapping: a sequence of one is no key."""
    return d if isinstance(d, str | md.Dim) else d[0]


def _initializer(name: str, d: Any) -> Any:
    return getattr(md.init, name)(d)


def _made(init: Any) -> Any:
    return md.model(lambda: md.param("w", "a:4 b:6", init=init)).init(KEY)


def _layer(x: md.Tensor) -> md.Tensor:
    return x * md.param("w", "b:6")


def _model(function: Callable[..., Any], *xs: Any) -> Any:
    """Parameters and results of a model, as a function of its inputs."""
    model = md.model(function)
    params = model.init(KEY, *xs)
    return params, model(params, *xs)


def layer(name: str, kind: str, text: str, call: Callable[..., Any], *ins: Any) -> Any:
    return f"nn.{name}", kind, text, lambda d, *xs: _model(lambda *xs: call(d, *xs), *xs), ins


MHA, NN = md.nn.multi_head_attention, md.nn
ROWS += [
    layer("attention_to.heads", NEW, "heads:2", lambda d, x, c: NN.attention_to(x, c, d, "head:4"), SEQ, CACHE),
    layer("attention_to.head", NEW, "head:4", lambda d, x, c: NN.attention_to(x, c, "heads:2", d), SEQ, CACHE),
    layer("attention_to.over", ONE, "model:8",
          lambda d, x, c: NN.attention_to(x, c, "heads:2", "head:4", over=d), SEQ, CACHE),
    layer("attention_to.memory", ONE, "memory:5",
          lambda d, x, c: NN.attention_to(x, c, "heads:2", "head:4", memory=d), SEQ, CACHE),
    layer("attention_to.group", NEW, "group:3",
          lambda d, x, c: NN.attention_to(x, c, "heads:2", "head:4", group=d), SEQ, CACHE),
    *(layer(f"cached_attention.{p}", NEW if p in ("heads", "head", "group") else ONE, text, lambda d, x, c, p=p:
            NN.cached_attention(x, c, **{"heads": "heads:2", "head": "head:4", "position": 1,
                                         "mask": md.iota("memory:5") <= 1, p: d}), md.spec("n:2 model:8"), CACHE)
      for p, text in (("heads", "heads:2"), ("head", "head:4"), ("over", "model:8"), ("memory", "memory:5"),
                      ("group", "group:3"))),
    layer("keys_and_values.heads", NEW, "heads:2", lambda d, x: NN.keys_and_values(x, d, "head:4"), SEQ),
    layer("keys_and_values.head", NEW, "head:4", lambda d, x: NN.keys_and_values(x, "heads:2", d), SEQ),
    layer("keys_and_values.over", ONE, "model:8", lambda d, x: NN.keys_and_values(x, "heads:2", "head:4", over=d), SEQ),
    layer("batch_norm.over", MANY, "n:2 h:4", lambda d, x: NN.batch_norm(x, d), IMAGE),
    layer("causal_conv.over", ONE, "model:8", lambda d, x: NN.causal_conv(x, 2, d), SEQ),
    layer("causal_conv.along", ONE, "length:4", lambda d, x: NN.causal_conv(x, 2, "model", d), SEQ),
    layer("conv.window", ONE, "h:4", lambda d, x: NN.conv(x, {_key(d): 3, "w": 3}, "c", "f:2"), IMAGE),
    layer("conv.over", ONE, "c:6", lambda d, x: NN.conv(x, {"h": 3, "w": 3}, d, "f:2"), IMAGE),
    layer("conv.into", NEW, "f:2", lambda d, x: NN.conv(x, {"h": 3, "w": 3}, "c", d), IMAGE),
    *(("nn.decode.greedy." + p, NEW, text, lambda d, p=p: greedy(**{p: d}), ())
      for p, text in (("batch", "n:2"), ("length", "length:3"))),
    *(("nn.decode.sample." + p, NEW, text, lambda d, p=p: sample(**{p: d}), ())
      for p, text in (("batch", "n:2"), ("length", "length:3"))),
    *(("nn.decode.beam_search." + p, NEW, text, lambda d, p=p: beams(**{p: d}), ())
      for p, text in (("batch", "n:2"), ("length", "length:3"), ("beam", "beam:2"))),
    ("nn.decode.generate.tokens", NEW, "t:3", lambda d: md.nn.decode.generate(
        lambda ids, cache, position: (md.one_hot(ids % 5, "vocab:5"), cache), lambda dims: (), TOKEN, tokens=d), ()),
    ("nn.decode.generate.length", ONE, "length:2", lambda d: md.nn.decode.generate(
        lambda ids, cache, position: (md.one_hot(ids % 5, "vocab:5"), cache), lambda dims: (), TOKEN, tokens="t:3",
        length=d), ()),
    *(layer(f"{name}.over", MANY, "length:4 model:8", lambda d, x, f=name: getattr(NN, f)(x, d, "out:3"), SEQ)
      for name in ("dense", "linear")),
    *(layer(f"{name}.into", NEWS, "heads:2 head:4", lambda d, x, f=name: getattr(NN, f)(x, "model", d), SEQ)
      for name in ("dense", "linear")),
    layer("dropout.shared", MANY, "length:4 model:8", lambda d, x: NN.dropout(x, 0.5, KEY, shared=d), SEQ),
    layer("embedding.rows", NEW, "vocab:9", lambda d, i: NN.embedding(i, d, "model:3"), IDS),
    layer("embedding.into", NEW, "model:3", lambda d, i: NN.embedding(i, "vocab:9", d), IDS),
    layer("feed_forward.hidden", NEW, "inner:3", lambda d, x: NN.feed_forward(x, d), SEQ),
    layer("feed_forward.over", MANY, "length:4 model:8", lambda d, x: NN.feed_forward(x, "inner:3", d), SEQ),
    layer("group_norm.over", ONE, "c:6", lambda d, x: NN.group_norm(x, 2, d), IMAGE),
    layer("group_norm.along", MANY, "h:4 w:4", lambda d, x: NN.group_norm(x, 2, "c", d), IMAGE),
    *(layer(f"{name}.{p}", NEW if p == "into" else ONE, text,
            lambda d, x, f=name, p=p: getattr(NN, f)(x, **{"into": "out:3", p: d}), SEQ)
      for name in ("gru", "lstm") for p, text in (("into", "out:3"), ("over", "model:8"), ("along", "length:4"))),
    *(layer(f"{name}.over", MANY, "length:4 model:8", lambda d, x, f=name: getattr(NN, f)(x, d), SEQ)
      for name in ("layer_norm", "rms_norm")),
    layer("learned_positions.over", ONE, "length:4", lambda d, x: NN.learned_positions(x, d), SEQ),
    layer("learned_positions.into", ONE, "model:8", lambda d, x: NN.learned_positions(x, "length", d), SEQ),
    *(layer(f"multi_head_attention.{p}", NEW if p in ("heads", "head", "group") else ONE, text,
            lambda d, x, p=p: MHA(x, **{"heads": "heads:2", "head": "head:4", p: d}), SEQ)
      for p, text in (("heads", "heads:2"), ("head", "head:4"), ("group", "group:3"), ("over", "model:8"),
                      ("length", "length:4"))),
    layer("multi_head_attention.memory_length", ONE, "memory:5",
          lambda d, x, m: MHA(x, "heads:2", "head:4", memory=m, memory_length=d), SEQ, md.spec("n:2 memory:5 model:8")),
    layer("relative_bias.heads", NEW, "heads:2", lambda d: NN.relative_bias(d, "memory:5", "length:4")),
    layer("relative_bias.keys", NEW, "memory:5", lambda d: NN.relative_bias("heads:2", d, "length:4")),
    layer("relative_bias.queries", NEW, "length:4", lambda d: NN.relative_bias("heads:2", "memory:5", d)),
    layer("rotary.over", ONE, "length:4", lambda d, x: NN.rotary(x, d, "model"), SEQ),
    layer("rotary.head", ONE, "model:8", lambda d, x: NN.rotary(x, "length", d), SEQ),
    layer("softmax_cross_entropy.over", ONE, "b:6", lambda d, x, i: NN.softmax_cross_entropy(x, i, d), X, IDS),
    layer("softmax_cross_entropy.prefer", ONE, "a:4",
          lambda d, x, i: NN.softmax_cross_entropy(x, i, "b", prefer=d), X, IDS),
    *(layer(f"state_space.{p}", NEW if p == "states" else ONE, text,
            lambda d, x, p=p: NN.state_space(x, **{"states": "states:3", p: d}), SEQ)
      for p, text in (("states", "states:3"), ("over", "model:8"), ("along", "length:4"))),
    *(layer(f"{name}.{p}", NEW if p in ("experts", "hidden") else ONE, text,
            lambda d, x, p=p: moe(x, **{p: d}), SEQ)
      for name in ("moe_layer", "moe.moe_layer")
      for p, text in (("experts", "expert:2"), ("hidden", "inner:6"), ("tokens", "length:4"), ("over", "model:8"))),
    layer("moe.TokenExchange.__init__.nodes", NEW, "node:2", lambda d, x: sent(x, d), SEQ),
    ("nn.moe.by_node.node", NEW, "node:3", lambda d, g: _results(
        NN.moe.by_node(routed(NN.moe.assign, g), d).to_nodes), (md.spec("t:4 e:3"),)),
    *((f"nn.moe.{name}.{p}", NEW if p == "capacity" else ONE, text,
       lambda d, g, f=name, p=p: _results(routed(getattr(NN.moe, f), g, **{p: d})), (md.spec("t:4 e:3"),))
      for name in ("assign", "route") for p, text in (("tokens", "t:4"), ("experts", "e:3"), ("capacity", "s:2"))),
    *(layer(f"selective_scan.{p}", ONE, text, lambda d, x, a, b, p=p: NN.selective_scan(x, x, a, b, b, **{p: d}), SEQ,
            md.spec("model:8 state:3"), md.spec("n:2 length:4 state:3"))
      for p, text in (("along", "length:4"), ("over", "model:8"))),
    layer("write_cache.length", ONE, "length:2", lambda d, old, new: NN.write_cache(old, new, 0, length=d),
          md.spec("head:3 memory:5"), md.spec("length:2 head:3")),
    layer("write_cache.memory", ONE, "memory:5", lambda d, old, new: NN.write_cache(old, new, 0, memory=d),
          md.spec("head:3 memory:5"), md.spec("length:2 head:3")),
]  # fmt: skip


def forms(kind: str, text: str) -> Iterator[Any]:
    """The ways to write these dims; names alone only if the call knows their sizes."""
    dims = md.dims(text)
    names = [d.name for d in dims]
    yield dims
    yield text.replace(" ", ", ")
    if len(dims) == 1:
        yield dims[0]
    if "new" not in kind:
        yield "; ".join(names)
        yield names
    if kind in (MANY, NEWS):
        yield dict.fromkeys(dims)
        yield [dims[0], *text.split()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_form_of_dims_gives_the_same_graph(row: Any) -> None:
    _, kind, text, call, ins = row
    flat, tree = jax.tree.flatten(ins)
    graphs = {}
    for form in forms(kind, text):
        graph, _, _ = trace(lambda *xs, form=form: call(form, *jax.tree.unflatten(tree, xs)), flat)
        graphs.setdefault(str(graph), form)
    assert len(graphs) == 1, graphs


# Parameters of other kinds: fields of records that meshdsl builds, functions and mappings
NO_DIMS = {
    "dims.of",     "Tensor.__init__.dims", "nn.moe.Assignment.__init__.tokens", "nn.moe.Assignment.__init__.experts",
    "nn.moe.Assignment.__init__.capacity", "Sharding.axes.dim", "nn.decode.generate.empty", "Layout.__init__.rules",
    "import_orbax.dims", "import_safetensors.dims", "conv.stride", "conv.dilation", "conv.base_dilation",
    "avg_pool.stride", "max_pool.stride", "avg_pool.padding", "max_pool.padding", "conv.padding", "nn.conv.stride",
    "nn.conv.padding", "nn.conv.dilation", "Program.is_padded.dim", "Imported.joined.shapes", "Sharding.along.dims",
}  # fmt: skip


def parameters() -> Iterator[str]:
    """The public parameters whose annotation is of dims."""
    for name in (name for name in REFERENCE if name not in md._ALSO and not name.startswith("hub.")):
        value = _in(name)
        members = vars(value).items() if isinstance(value, type) else [("", value)]
        for member, function in members:
            if callable(function) and (not member.startswith("_") or member == "__init__"):
                for p in inspect.signature(function).parameters.values():
                    if "Dim" in str(p.annotation):
                        yield ".".join(part for part in (name, member, p.name) if part)


def test_the_table_has_every_public_parameter_of_dims() -> None:
    assert set(parameters()) - NO_DIMS == {row[0] for row in ROWS} - {"local.out"}
    assert len(ROWS) > 180
