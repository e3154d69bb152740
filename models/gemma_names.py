"""The tables of Gemma 2 and 3: names of tensors, kinds of layers, and keys of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdsl.models import llama

__all__ = ["KEYS", "tensors", "types", "written"]

KEYS = {key: name for key, name in llama.HUGGING_FACE.keys.items() if key != "tie_word_embeddings"} | {
    "sliding_window": "window", "query_pre_attn_scalar": "scalar",
}  # fmt: skip


def written(config: Any) -> dict[str, Any]:
    """Keys of config.json that transformers checks: the kinds of layers, and a scale that is an integer there."""
    scale = int(config.scalar) if config.scalar == int(config.scalar) else config.scalar
    return {"layer_types": types(config.layers, config.period), "query_pre_attn_scalar": scale}


def types(layers: int, period: int) -> list[str]:
    """The key `layer_types` of config.json: the last layer of a period has no window."""
    return ["full_attention" if (n + 1) % period == 0 else "sliding_attention" for n in range(layers)]


def tensors(config: Any, norms: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """The lines of the table: those of each block of a period, of the rest, and of what surrounds the layers.

    `norms` are what has a norm in attention: "q", "k".
    """
    period = config.period
    blocks = {f"layer/sub_{n}": f"model.layers.{{{period}*layer+{n}}}" for n in range(period)}
    blocks["rest"] = f"model.layers.{{rest+{config.periods[0] * period}}}"
    lines = {path: line for path, line in llama.TENSORS.items() if "layer/" not in path}
    for path, name in blocks.items():
        for key, (tensor, axes) in llama.TENSORS.items():
            if key.startswith("layer/") and "norm" not in key:
                lines[path + key.removeprefix("layer")] = tensor.replace("model.layers.{layer}", name), axes
        for n, kind in enumerate(("input", "post_attention", "pre_feedforward", "post_feedforward"), 1):
            lines[f"{path}/norm_{n}/scale"] = f"{name}.{kind}_layernorm.weight", "model"
        for x in norms:
            lines[f"{path}/attention/norm_{x}/scale"] = f"{name}.self_attn.{x}_norm.weight", "head"
    return lines
