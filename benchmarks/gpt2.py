"""GPT-2 as a user ports it: attention and layer norm written with `md` operations, not taken from `md.nn`."""

from __future__ import annotations

import math
from typing import Any

import meshdsl as md

__all__ = ["compiled"]

BATCH, LENGTH, MODEL, HEADS, HEAD, LAYERS, VOCAB = 16, 512, 768, 12, 64, 4, 8192
MESH, LAYOUT = "rows:2 cols:4", "batch:rows; heads:cols; d_ff:cols; vocab:cols"


def logits(tokens: md.Tensor) -> md.Tensor:
    batch, length = tokens.dims
    model, heads, head, d_ff = md.dims(f"model:{MODEL} heads:{HEADS} head:{HEAD} d_ff:{4 * MODEL}")
    vocab, memory = md.Dim("vocab", VOCAB), md.Dim("memory", LENGTH)

    def norm(x: md.Tensor, name: str) -> md.Tensor:
        scale, bias = md.param(f"{name}/scale", model), md.param(f"{name}/bias", model)
        y = x - md.mean(x, model)
        return y / md.sqrt(md.mean(y * y, model) + 1e-5) * scale + bias

    def linear(x: md.Tensor, name: str, dims: list[md.Dim], into: list[md.Dim]) -> md.Tensor:
        kept = [d for d in x.dims if d not in dims]
        w, bias = md.param(f"{name}/w", [*dims, *into]), md.param(f"{name}/b", into)
        return md.einsum(x, w, out=[*kept, *into]) + bias

    def block(x: md.Tensor) -> md.Tensor:
        y = norm(x, "ln_1")
        q, k, v = (linear(y, name, [model], [heads, head]) for name in ("q", "k", "v"))
        k, v = md.rename(k, length="memory"), md.rename(v, length="memory")
        scores = md.einsum(q, k, out=[batch, heads, length, memory]) / math.sqrt(HEAD)
        causal = md.broadcast(md.iota(length), [length, memory]) >= md.iota(memory)
        scores = md.where(causal, scores, -1e9)
        mixed = md.einsum(md.softmax(scores, memory), v, out=[batch, length, heads, head])
        x = x + linear(mixed, "proj", [heads, head], [model])
        y = md.gelu(linear(norm(x, "ln_2"), "fc", [model], [d_ff]))
        return x + linear(y, "out", [d_ff], [model])

    table = md.param("wte", [vocab, model])
    x = md.take(table, tokens, vocab) + md.param("wpe", [length, model])
    with md.scope("h"):
        x = md.layers(block, x, over=md.Dim("layer", LAYERS))
    return md.einsum(norm(x, "ln_f"), table, out=[batch, length, vocab])


def compiled() -> tuple[md.Compiled, Any, Any, Any]:
    """A step of gradient descent, and the specs of its arguments."""
    model = md.model(logits)

    def loss(params: Any, tokens: md.Tensor, targets: md.Tensor) -> md.Tensor:
        return md.mean(md.nn.softmax_cross_entropy(model(params, tokens), targets))

    def step(params: Any, tokens: md.Tensor, targets: md.Tensor) -> Any:
        value, grads = md.value_and_grad(loss)(params, tokens, targets)
        return {name: params[name] - 0.1 * grads[name] for name in params}, value

    tokens = md.spec(f"batch:{BATCH} length:{LENGTH}", "int32")
    return md.compile(step, MESH, LAYOUT, donate=0), model.specs(tokens), tokens, tokens
