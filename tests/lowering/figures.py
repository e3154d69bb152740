"""Steps of well-known models, to count what is sent: ResNet-18 with batch norm, Mamba, a Llama-like one and GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import meshdsl as md
from meshdsl.models import transformer

__all__ = ["Figure", "figures"]

Figure = tuple[str, Callable[..., Any], tuple[Any, ...], str, str]  # name, step, its arguments, mesh, layout
BLOCKS = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]  # channels and stride


def resnet18(image: md.Tensor) -> md.Tensor:
    """Logits of images, with batch norm as users write it, by `md.mean` and `md.var` (He et al., 2016)."""

    def conv(x: md.Tensor, name: str, into: md.Dim, n: int, stride: int) -> md.Tensor:
        size = md.dims(f"kh:{n} kw:{n}")
        pads = {"height": (n // 2, n // 2), "width": (n // 2, n // 2)}
        with md.scope(name):
            w = md.param("w", [*size, x.dims[-1], into], init=md.init.he(fan_in=[*size, x.dims[-1]]))
            out = ["batch", "height", "width", into]
            y = md.conv(x, w, {"height": "kh", "width": "kw"}, out, stride=stride, padding=pads)
            over = "batch height width"
            y = (y - md.mean(y, over)) / md.sqrt(md.var(y, over) + 1e-5)
            return y * md.param("scale", into, init=md.init.ones()) + md.param("bias", into, init=md.init.zeros())

    x = md.relu(conv(image, "stem", md.Dim("c", 64), 7, 2))
    x = md.max_pool(x, {"height": 3, "width": 3}, stride=2, padding={"height": (1, 1), "width": (1, 1)})
    for i, (channels, stride) in enumerate(BLOCKS):
        middle, into = md.dims(f"middle{i}:{channels} c{i}:{channels}")
        with md.scope(f"block{i}"):
            y = conv(md.relu(conv(x, "a", middle, 3, stride)), "b", into, 3, 1)
            same = stride == 1 and x.dims[-1].size == channels
            skip = md.rename(x, **{x.dims[-1].name: into.name}) if same else conv(x, "project", into, 1, stride)
        x = md.relu(y + skip)
    return md.nn.dense(md.mean(x, "height width"), x.dims[-1], md.Dim("class", 1000))


def mamba(layers: int = 4, width: int = 256, state: int = 16) -> md.Model:
    """Selective state spaces in a scan over layers, each with a scan over the length (Gu and Dao, 2023)."""
    model, inner, n = md.dims(f"model:{width} inner:{2 * width} state:{state}")

    def weight(name: str, *dims: md.Dim) -> md.Tensor:
        return md.param(name, dims, init=md.init.lecun(fan_in=dims[:1]))

    def block(x: md.Tensor) -> md.Tensor:
        y = md.nn.rms_norm(x, model)
        batch, length, _ = x.dims
        u = md.silu(md.einsum(y, weight("w_in", model, inner), out=[batch, length, inner]))
        gate = md.silu(md.einsum(y, weight("w_gate", model, inner), out=[batch, length, inner]))
        step = md.softplus(md.einsum(y, weight("w_step", model, inner), out=[batch, length, inner]))
        b, c = (md.einsum(y, weight(name, model, n), out=[batch, length, n]) for name in ("w_b", "w_c"))
        decay = md.exp(weight("decay", inner, n))

        def outer(x: md.Tensor, y: md.Tensor) -> md.Tensor:
            return md.einsum(x, y, out=[batch, inner, n])

        def advance(h: md.Tensor, row: Any) -> Any:
            u, step, b, c = row
            h = h * md.exp(-outer(step, decay)) + outer(step * u, b)
            return h, md.einsum(h, c, out=[batch, inner])

        start = md.broadcast(md.cast(0.0, x.dtype), [batch, inner, n])
        _, z = md.scan(advance, start, (u, step, b, c), over=length)
        z = md.transpose(z, [batch, length, inner]) * gate
        return x + md.einsum(z, weight("w_out", inner, model), out=[batch, length, model])

    def logits(tokens: md.Tensor) -> md.Tensor:
        x, table = md.nn.embedding(tokens, md.Dim("vocab", 1024), model)
        with md.scope("layer"):
            x = md.layers(block, x, over=md.Dim("layer", layers))
        return md.einsum(md.nn.rms_norm(x, model), table, out=[*tokens.dims, md.Dim("vocab", 1024)])

    return md.model(logits)


def _gradient(model: md.Model, x: Any, target: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: Any, x: md.Tensor, target: md.Tensor) -> md.Tensor:
        logits = model(params, x)
        return md.mean(md.nn.softmax_cross_entropy(logits, target, logits.dims[-1]))

    return md.grad(loss), (model.specs(x), x, target)


def _train_step(**changes: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    workload = transformer.lm.replace(**changes)
    return workload.train_step(), workload.specs()


LLAMA = {
    "layers": 4, "d_model": 1024, "heads": 4, "queries_per_key": 4, "d_head": 64, "d_ff": 2816, "length": 1024,
    "vocab": 32000, "gated": True, "activation": "silu", "norm": "rms", "positions": "rotary",
}  # fmt: skip
GPT2 = {
    "layers": 12, "d_model": 768, "heads": 12, "d_head": 64, "d_ff": 3072, "length": 1024, "vocab": 50304,
    "activation": "gelu", "tied": True,
}  # fmt: skip


def figures() -> Iterator[Figure]:
    """Every step under its layouts."""
    image, label = md.spec("batch:32 height:256 width:256 color:3"), md.spec("batch:32", "int32")
    tokens = md.spec("batch:16 length:512", "int32")
    model = "vocab:cols; d_ff:cols; heads:cols"
    yield "resnet18", *_gradient(md.model(resnet18), image, label), "rows:8", "batch:rows"
    yield "mamba", *_gradient(mamba(), tokens, tokens), "rows:2 cols:4", "batch:rows; length:cols; vocab:cols"
    yield "mamba", *_gradient(mamba(), tokens, tokens), "rows:2 cols:4", "batch:rows; inner:cols; vocab:cols"
    for layout in ("batch:rows; model:cols", f"batch:rows; {model}", f"batch:rows; length:cols; {model}"):
        yield "llama", *_train_step(**LLAMA), "rows:2 cols:4", layout
    for layout in (f"batch:rows; {model}", f"batch:rows; length:cols; {model}"):
        yield "gpt2", *_train_step(**GPT2), "rows:2 cols:4", layout
