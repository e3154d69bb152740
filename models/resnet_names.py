"""The names of a ResNet's tensors and options in a Hugging Face directory."""

from __future__ import annotations

from typing import Any

import meshdsl as md
from meshdsl.models import classification

__all__ = ["HUGGING_FACE"]

Lines = dict[str, tuple[str, str]]
_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def _conv(path: str, name: str, over: str, output: str, into: str = "") -> Lines:
    """The lines of a convolution [over, made], and of its norm [into]."""
    kernel = {f"{path}/conv/w": (f"{name}.convolution.weight", f"{output}, {over}, height_window, width_window")}
    return kernel | {f"{path}/norm/{k}": (f"{name}.normalization.{v}", into or output) for k, v in _NORM.items()}


def _block(i: int, path: str, name: str, over: str) -> Lines:
    """The lines of a block of stage i, of both kinds; each model has those of one kind."""
    basic = _conv(f"{path}/conv_1", f"{name}.layer.0", over, f"narrow{i}", f"middle{i}")
    basic |= _conv(f"{path}/conv_2", f"{name}.layer.1", f"middle{i}", f"stage{i}")
    basic |= _conv(f"{path}/shortcut", f"{name}.shortcut", over, f"stage{i}")
    bottleneck = _conv(f"{path}/reduce", f"{name}.layer.0", over, f"narrow{i}")
    bottleneck |= _conv(f"{path}/conv", f"{name}.layer.1", f"narrow{i}", f"mixed{i}", f"middle{i}")
    return basic | bottleneck | _conv(f"{path}/expand", f"{name}.layer.2", f"middle{i}", f"stage{i}")


def _tensors() -> Lines:
    tensors = _conv("stem", "resnet.embedder.embedder", "color", "stage0")
    for stage in range(1, 5):
        layers = f"resnet.encoder.stages.{stage - 1}.layers"
        tensors |= _block(stage, f"stage{stage}/first", f"{layers}.0", f"stage{stage - 1}")
        tensors |= _block(stage, f"stage{stage}/rest", f"{layers}.{{layer{stage}+1}}", f"stage{stage}")
    return tensors | {
        "dense/w": ("classifier.1.weight", "classes, features"),
        "dense/b": ("classifier.1.bias", "classes"),
    }


def _settings(hub: md.HubConfig) -> dict[str, Any]:
    sizes = {"widths": hub.sizes("hidden_sizes", (256, 512, 1024, 2048)), "depths": hub.sizes("depths", (3, 4, 6, 3))}
    return classification.settings(hub) | sizes | {"block": hub.only("layer_type", "bottleneck", "basic")}


def _to_hub(config: Any) -> dict[str, Any]:
    sizes = {"hidden_sizes": list(config.widths), "depths": list(config.depths), "layer_type": config.block}
    return classification.to_hub(config) | sizes


HUGGING_FACE = md.HuggingFace(
    _tensors(),
    {"num_channels": "color", "embedding_size": "stem"},
    fixed={
        "model_type": "resnet", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    defaults={"num_channels": 3, "embedding_size": 64},
    settings=_settings,
    config=_to_hub,
    base="resnet",
    ignored=("*.num_batches_tracked",),
    architecture="ResNetForImageClassification",
)  # fmt: skip
