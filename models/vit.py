"""Vision Transformer: patches of an image as tokens of an encoder (Dosovitskiy et al., 2021).

    x = concat(class token, conv(image, kernel and stride of a patch)) + positions
    for each layer:  x = x + attention(norm(x));  x = x + gelu(norm(x) w_in + b_in) w_out + b_out
    logits = norm(x)[class token] w + b;  loss = mean over batch of the cross entropy

`length` is the class token and the patches, row by row. The layouts are those of models/llama.py; `context` shards the
rows of the image too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import meshdsl as md
from meshdsl.models import causal, classification

__all__ = ["LAYOUTS", "Config", "model", "vit", "vit_b16", "vit_h14", "vit_l16"]

_MODEL = "classes:cols; d_ff:cols; heads:cols"
LAYOUTS = {
    "empty": ("rows:8", ""),
    "data": ("rows:8", "batch:rows"),
    "zero": ("rows:8", "batch:rows; classes:rows; d_ff:rows; heads:rows"),
    "model": ("cols:2", _MODEL),
    "data_model": ("rows:4 cols:2", f"batch:rows; {_MODEL}"),
    "sequence": ("rows:4 cols:2", f"batch:rows; length:cols; {_MODEL}"),
    "context": ("rows:2 ring:4", "batch:rows; height:ring; length:ring"),
}


@dataclass(frozen=True)
class Config(causal.Options):
    """Sizes and options; the defaults fit a laptop."""

    size: int = 32  # height and width of an image
    color: int = 3
    patch: int = 8
    classes: int = 10
    heads: int = 4
    d_ff: int = 128
    eps: float = 1e-12


def model(config: Config) -> md.Model:
    """A model that computes the logits [batch, classes]."""
    wide, d_ff, classes = md.dims(f"model:{config.d_model} d_ff:{config.d_ff} classes:{config.classes}")
    heads, head = md.dims(f"heads:{config.heads} head:{config.d_model // config.heads}")
    layer, precision = md.Dim("layer", config.layers), config.precision
    attention = causal.Attention(wide, heads, head, precision, biases=True, causal=False)
    norm = partial(md.nn.layer_norm, over=wide, eps=config.eps, precision=precision)

    def block(x: md.Tensor) -> md.Tensor:
        x = x + attention(norm(x, name="norm_1"))[0]
        y = norm(x, name="norm_2")
        with md.scope("feed_forward"):
            y = md.gelu(causal.linear(y, "w_in", [wide], [d_ff], precision, "b_in"), approximate=False)
            return x + causal.linear(y, "w_out", [d_ff], [wide], precision, "b_out")

    def network(batch: dict[str, md.Tensor]) -> md.Tensor:
        x = md.nn.conv(
            batch["image"], {"height": config.patch, "width": config.patch}, "color", wide, stride=config.patch,
            padding="valid", name="patch", precision=precision,
        )  # fmt: skip
        x = md.flatten(md.transpose(x, ["batch", "height", "width", wide]), ["height", "width"], "length")
        first = md.param("class", [md.Dim("length", 1), wide], init=md.init.normal(0.02), dtype=precision.param)
        x = md.concat([md.broadcast(md.cast(first, x.dtype), [x.dims[0], *first.dims]), x], "length")
        x = md.nn.learned_positions(x, precision=precision)
        with md.scope("layer"):
            x = md.layers(block, md.prefer(x, "batch"), over=layer, remat=config.remat)
        x = md.reshape(md.slice(norm(x), "length", 0, 1), [x.dims[0], wide])
        return causal.linear(x, "w", [wide], [classes], precision, "b")

    return md.model(network)


_LAYER, _SELF = "vit.encoder.layer.{layer}", "vit.encoder.layer.{layer}.attention.attention"
_NORMS = (("norm_1", "layernorm_before"), ("norm_2", "layernorm_after"))
_QKV = (("q", "query"), ("k", "key"), ("v", "value"))
TENSORS = {
    "class": ("vit.embeddings.cls_token", "length, , model"),
    "positions": ("vit.embeddings.position_embeddings", ", length, model"),
    "patch/w": ("vit.embeddings.patch_embeddings.projection.weight", "model, color, height_window, width_window"),
    "patch/b": ("vit.embeddings.patch_embeddings.projection.bias", "model"),
    **{f"layer/{ours}/scale": (f"{_LAYER}.{theirs}.weight", "model") for ours, theirs in _NORMS},
    **{f"layer/{ours}/bias": (f"{_LAYER}.{theirs}.bias", "model") for ours, theirs in _NORMS},
    **{f"layer/attention/w{x}": (f"{_SELF}.{name}.weight", "heads head, model") for x, name in _QKV},
    **{f"layer/attention/b{x}": (f"{_SELF}.{name}.bias", "heads head") for x, name in _QKV},
    "layer/attention/wo": (f"{_LAYER}.attention.output.dense.weight", "model, heads head"),
    "layer/attention/bo": (f"{_LAYER}.attention.output.dense.bias", "model"),
    "layer/feed_forward/w_in": (f"{_LAYER}.intermediate.dense.weight", "d_ff, model"),
    "layer/feed_forward/b_in": (f"{_LAYER}.intermediate.dense.bias", "d_ff"),
    "layer/feed_forward/w_out": (f"{_LAYER}.output.dense.weight", "model, d_ff"),
    "layer/feed_forward/b_out": (f"{_LAYER}.output.dense.bias", "model"),
    "norm/scale": ("vit.layernorm.weight", "model"),
    "norm/bias": ("vit.layernorm.bias", "model"),
    "w": ("classifier.weight", "classes, model"),
    "b": ("classifier.bias", "classes"),
}
_KEYS = {
    "image_size": "size", "patch_size": "patch", "num_channels": "color", "hidden_size": "d_model",
    "num_hidden_layers": "layers", "num_attention_heads": "heads", "intermediate_size": "d_ff", "layer_norm_eps": "eps",
}  # fmt: skip
HUGGING_FACE = md.HuggingFace(
    TENSORS, _KEYS,
    fixed={"model_type": "vit", "hidden_act": "gelu", "qkv_bias": True},
    defaults={"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12},
    settings=classification.settings, config=classification.to_hub, base="vit",
    architecture="ViTForImageClassification",
)  # fmt: skip
vit = classification.workload("vit", Config(), model, layouts=LAYOUTS, hugging_face=HUGGING_FACE)
vit_b16 = vit.replace(size=224, patch=16, classes=1000, layers=12, d_model=768, heads=12, d_ff=3072)
vit_l16 = vit_b16.replace(layers=24, d_model=1024, heads=16, d_ff=4096)
vit_h14 = vit_b16.replace(patch=14, layers=32, d_model=1280, heads=16, d_ff=5120)
