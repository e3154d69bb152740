"""Parts of decoder-only models: their batch, their loss, attention with or without a cache, and decoding.

A model is a network: a function `(tokens, cache, position) -> (logits, cache)`. Without a cache, it computes the logits
of every position. With one, `tokens` are a prompt or one token of each sequence, from index `position` on; their keys
and values are written into the cache, and they attend to everything before them in it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import meshdsl as md

__all__ = [
    "Attend", "Attention", "Block", "Config", "Empty", "Layer", "Network", "Options", "Stack", "gated", "inputs",
    "linear", "logits", "loss", "network", "stacked", "workload",
]  # fmt: skip

Cache = dict[str, md.Tensor]
Attend = Callable[[md.Tensor], md.Tensor]
Block = Callable[[md.Tensor, Attend], md.Tensor]  # one layer
Network = Callable[..., tuple[md.Tensor, Any]]
Empty = Callable[[tuple[md.Dim, ...]], Any]  # an empty cache for the dims of a batch and the memory


def inputs(config: Any) -> dict[str, object]:
    """The specs of a batch: tokens and the tokens that follow them, and of packed rows their documents' numbers."""
    spec = md.spec([md.Dim("batch", config.batch), md.Dim("length", config.length)], "int32")
    return dict.fromkeys(("tokens", "targets", *(["segments"] if getattr(config, "packed", False) else [])), spec)


def linear(
    x: md.Tensor,
    name: str,
    over: Sequence[md.Dim],
    into: Sequence[md.Dim],
    precision: md.nn.Precision,
    bias: str | None = None,
) -> md.Tensor:
    """x w, plus a bias if it has a name.

    If dims of the result compete for a mesh axis, the batch is sharded, then the first dim of `into`: a layout that
    maps both to one axis stores the weight sharded, and gathers it for use.
    """
    w = md.param(name, [*over, *into], init=md.init.lecun(fan_in=over), dtype=precision.param)
    y = precision.einsum(x, w, out=[*(d for d in x.dims if d not in over), *into])
    if bias is not None:
        y = y + md.cast(md.param(bias, into, init=md.init.zeros(), dtype=precision.param), y.dtype)
    return md.cast(md.prefer(y, "batch", into[0]), precision.compute)


def gated(
    x: md.Tensor,
    hidden: md.Dim,
    precision: md.nn.Precision,
    activation: Callable[[md.Tensor], md.Tensor] = md.silu,
    name: str = "feed_forward",
) -> md.Tensor:
    """(activation(x w_gate) * (x w_in)) w_out."""
    wide = x.dims[-1]
    with md.scope(name):
        gate = activation(linear(x, "w_gate", [wide], [hidden], precision))
        x = gate * linear(x, "w_in", [wide], [hidden], precision)
        return linear(x, "w_out", [hidden], [wide], precision)


def logits(
    x: md.Tensor, table: md.Tensor, wide: md.Dim, vocab: md.Dim, precision: md.nn.Precision, tied: bool
) -> md.Tensor:
    """The output layer [batch, length, vocab]: x times the table of the embedding if `tied`, or a weight of its own."""
    if not tied:
        return linear(x, "unembed", [wide], [vocab], precision)
    return md.prefer(precision.einsum(x, table, out=[*(d for d in x.dims if d != wide), vocab]), "batch", vocab)


@dataclass(frozen=True)
class Options:
    """Sizes and options of a stack of layers; the defaults fit a laptop."""

    batch: int = 8
    layers: int = 2
    d_model: int = 64
    eps: float = 1e-5  # of the norms
    remat: bool | str = False
    learning_rate: float = 3e-4
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"
    products: str = ""  # "float8": products in 8 bits

    @property
    def precision(self) -> md.nn.Precision:
        """The dtypes as a value."""
        dtypes = self.param_dtype, self.compute_dtype, self.reduce_dtype
        return md.nn.Precision(*dtypes, products=self.products or None)


@dataclass(frozen=True)
class Config(Options):
    """Sizes and options of a Transformer for text; the defaults fit a laptop."""

    length: int = 64
    vocab: int = 256
    heads: int = 4
    d_ff: int = 128
    packed: bool = False  # rows hold several documents, which do not see each other: the input `segments`

    def dims(self) -> tuple[md.Dim, md.Dim, md.Dim, md.Dim, md.Dim]:
        """The dims vocab, model, heads, d_ff and layer."""
        sizes = {"vocab": self.vocab, "model": self.d_model, "heads": self.heads, "d_ff": self.d_ff}
        vocab, model, heads, d_ff = (md.Dim(name, size) for name, size in sizes.items())
        return vocab, model, heads, d_ff, md.Dim("layer", self.layers)


@dataclass(frozen=True)
class Attention:
    """Attention. `group.size` query heads share each of the `heads` key and value heads."""

    model: md.Dim
    heads: md.Dim
    head: md.Dim
    precision: md.nn.Precision
    group: md.Dim | None = None
    biases: bool = False
    speeds: Sequence[float] | None = None  # of rotary positions; None: no rotary positions
    window: int | None = None
    causal: bool = True
    scale: float | None = None  # of the scores; None: 1 / sqrt(head)
    soft_cap: float | None = None  # of the scores
    eps: float | None = None  # of RMS norms of each query and key, before their rotation; None: no norms
    scale_offset: float = 0.0  # of these norms
    length: str = "length"
    name: str = "attention"

    def __call__(
        self,
        x: md.Tensor,
        cache: Cache | None = None,
        position: md.Tensor | int = 0,
        bias: md.Tensor | None = None,
        segments: md.Tensor | None = None,
    ) -> tuple[md.Tensor, Cache | None]:
        """Self-attention [batch, length, model], and the cache with the keys and values of x from `position` on."""
        q, kept = self.queries(x, position), self.keys(x, position)
        if cache is not None:
            kept = {**cache, **{name: md.nn.write_cache(cache[name], new, position) for name, new in kept.items()}}
        offset = None if cache is None else position
        y = self.attend(q, kept, causal=self.causal, window=self.window, offset=offset, bias=bias, segment_ids=segments)
        return y, None if cache is None else kept

    def queries(self, x: md.Tensor, position: md.Tensor | int = 0) -> md.Tensor:
        """Queries for each position of x, [..., heads, group, head] or [..., heads, head]."""
        return self._rotated(self._normed(self._projected(x, "q", self._query_dims), "norm_q"), position)

    def keys(self, x: md.Tensor, position: md.Tensor | int = 0) -> Cache:
        """Keys "k" and values "v" for each position of x, [..., heads, head]."""
        k, v = (self._projected(x, kind, [self.heads, self.head]) for kind in ("k", "v"))
        return {"k": self._rotated(self._normed(k, "norm_k"), position), "v": v}

    def attend(self, q: md.Tensor, kept: Cache, **options: Any) -> md.Tensor:
        """The layer's result for these queries, keys and values; the options are those of `md.attention`."""
        y = md.attention(
            q, kept["k"], kept["v"], scale=self.scale, soft_cap=self.soft_cap, length=self.length, **options
        )
        if options.get("bias") is not None:
            y = md.prefer(y, "batch", self.heads)  # a bias that is stored sharded by heads does not shard y
        with md.scope(self.name):
            return linear(y, "wo", self._query_dims, [self.model], self.precision, "bo" if self.biases else None)

    @property
    def _query_dims(self) -> list[md.Dim]:
        return [self.heads, *([self.group] if self.group else []), self.head]

    def _projected(self, x: md.Tensor, kind: str, into: Sequence[md.Dim]) -> md.Tensor:
        with md.scope(self.name):
            return linear(x, f"w{kind}", [self.model], into, self.precision, f"b{kind}" if self.biases else None)

    def _normed(self, y: md.Tensor, name: str) -> md.Tensor:
        if self.eps is None:
            return y
        with md.scope(self.name):
            return md.nn.rms_norm(
                y, self.head, eps=self.eps, name=name, scale_offset=self.scale_offset, precision=self.precision
            )

    def _rotated(self, y: md.Tensor, position: md.Tensor | int) -> md.Tensor:
        if self.speeds is None:
            return y
        length = self.length if self.length in [d.name for d in y.dims] else None
        return md.nn.rotary(y, length, self.head, offset=position, speeds=self.speeds)

    def cache(self, layer: md.Dim, dims: Sequence[md.Dim]) -> Cache:
        """Keys and values of zeros for every layer, [layer, batch, memory, heads, head]."""
        zero = md.cast(0, self.precision.compute)
        return {kind: md.broadcast(zero, [layer, *dims, self.heads, self.head]) for kind in ("k", "v")}


def workload(name: str, config: Any, network: Callable[[Any], tuple[Network, Empty]], **more: Any) -> md.Workload:
    """The workload of a network: logits, loss, Adam, and decoding with a cache."""

    def model(config: Any) -> md.Model:
        run = network(config)[0]
        if not getattr(config, "packed", False):
            return md.model(lambda batch: run(batch["tokens"])[0])
        return md.model(lambda batch: run(batch["tokens"], segments=batch["segments"])[0])

    def decoder(config: Any, search: Callable[..., Any]) -> Callable[..., md.Tensor]:
        run, empty = network(config)
        step = md.model(run)
        return lambda params, prompt, *key: search(functools.partial(step, params), empty, prompt, *key)

    return md.Workload(
        name, config, model=model, inputs=inputs, loss=lambda config: loss(model(config)), decoder=decoder,
        optimizer=lambda config: md.optim.adam(config.learning_rate), **more,
    )  # fmt: skip


class Sizes(Protocol):
    """The fields of a config that `stacked` reads."""

    @property
    def remat(self) -> bool | str: ...

    @property
    def precision(self) -> md.nn.Precision: ...

    def dims(self) -> tuple[md.Dim, md.Dim, md.Dim, md.Dim, md.Dim]:
        """The dims vocab and model, two others, and layer."""
        ...


class Layer(Protocol):
    """Attention or its replacement; with a cache, it returns the new one."""

    def __call__(self, x: md.Tensor, cache: Any = None, position: Any = 0) -> tuple[md.Tensor, Any]: ...

    def cache(self, layer: md.Dim, dims: Sequence[md.Dim]) -> Any: ...


@dataclass(frozen=True)
class Stack:
    """Layers that are one loop over `layer`; with several blocks, a trip is a layer of each: `sub_0`, `sub_1`, ..."""

    layer: md.Dim
    blocks: Sequence[tuple[Layer, Block]]

    def run(
        self, x: md.Tensor, caches: Any, position: md.Tensor | int, remat: bool | str, segments: md.Tensor | None = None
    ) -> tuple[md.Tensor, list[Any]]:
        """The result of all layers, and the new caches of each block."""

        packed: dict[str, Any] = {} if segments is None else {"segments": segments}

        def trip(x: md.Tensor, caches: Any = None) -> tuple[md.Tensor, list[Any]]:
            kept: list[Any] = []
            for n, (attention, block) in enumerate(self.blocks):

                def attend(x: md.Tensor, n: int = n, attention: Layer = attention) -> md.Tensor:
                    y, new = attention(x, None if caches is None else caches[n], position, **packed)
                    kept.append(new)
                    return y

                with md.scope(f"sub_{n}") if len(self.blocks) > 1 else contextlib.nullcontext():
                    x = block(x, attend)
            return x, kept

        with md.scope(self.layer.name):
            return md.layers(trip, md.prefer(x, "batch"), over=self.layer, xs=caches, remat=remat, collect=True)

    def cache(self, dims: Sequence[md.Dim]) -> list[Any]:
        """Empty caches of each block."""
        return [attention.cache(self.layer, dims) for attention, _ in self.blocks]


def stacked(
    config: Sizes, attention: Layer, block: Block, norm: Callable[[md.Tensor], md.Tensor], **options: Any
) -> tuple[Network, Empty]:
    """The network of equal layers, and its empty cache; the options are those of `network`."""
    return network(config, [Stack(config.dims()[-1], [(attention, block)])], norm, **options)


def network(
    config: Sizes,
    stacks: Sequence[Stack],
    norm: Callable[[md.Tensor], md.Tensor],
    *,
    tied: bool,
    place: Callable[[md.Tensor, md.Tensor], md.Tensor] | None = None,
) -> tuple[Network, Empty]:
    """The network of embedding, layers, norm and output layer, and its empty cache.

    `place(x, positions)` adds learned positions to the embedding of tokens.
    """
    (vocab, wide, *_), precision = config.dims(), config.precision

    def run(
        tokens: md.Tensor, cache: Any = None, position: md.Tensor | int = 0, segments: md.Tensor | None = None
    ) -> tuple[md.Tensor, Any]:
        x, table = md.nn.embedding(tokens, vocab, wide, precision=precision)
        length = next((d for d in tokens.dims if d.name == "length"), None)
        if place is not None:
            at = md.cast(position, "int32") if length is None else md.iota(length) + position
            x = place(x, at if segments is None or length is None else _restarting(segments, length))
        kept: list[Any] = []
        for n, stack in enumerate(stacks):
            x, new = stack.run(x, None if cache is None else cache[n], position, config.remat, segments)
            kept.append(new)
        return logits(norm(x), table, wide, vocab, precision, tied), kept

    return run, lambda dims: [stack.cache(dims) for stack in stacks]


def _restarting(segments: md.Tensor, length: md.Dim) -> md.Tensor:
    """The position of each token in its document."""
    first = segments != md.shift(segments, length, 1, fill=-1)
    start = md.cummax(md.where(first, md.broadcast(md.iota(length), segments.dims), 0), length)
    return md.iota(length) - start


def loss(logits_of: md.Model) -> Callable[..., md.train.Metric]:
    """The loss function: mean cross entropy of the next token, in nats; targets of -100 are ignored."""

    def mean_loss(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.train.Metric:
        each = md.nn.softmax_cross_entropy(logits_of(params, batch), batch["targets"], prefer="batch")
        return md.train.mean(each, batch["targets"] != -100)

    return mean_loss
