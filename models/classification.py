"""Parts of image classifiers: their batch, their loss, and the labels of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdsl as md

__all__ = ["inputs", "loss", "settings", "to_hub", "workload"]


def inputs(config: Any) -> dict[str, object]:
    """The specs of a batch: images [batch, height, width, color], and their classes [batch]."""
    sizes = {"batch": config.batch, "height": config.size, "width": config.size, "color": config.color}
    image = [md.Dim(name, size) for name, size in sizes.items()]
    return {"image": md.spec(image, config.compute_dtype), "targets": md.spec(image[0], "int32")}


def loss(logits_of: Callable[..., md.Tensor]) -> Callable[..., md.Tensor]:
    """The loss function: mean cross entropy, in nats."""

    def cross_entropy(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.Tensor:
        return md.mean(md.nn.softmax_cross_entropy(logits_of(params, batch), batch["targets"], "classes"))

    return cross_entropy


def workload(name: str, config: Any, model: Callable[[Any], md.Model], **more: Any) -> md.Workload:
    """The workload of a classifier whose images do not depend on each other, with Adam."""
    return md.Workload(
        name, config, model=model, inputs=inputs, loss=lambda config: loss(model(config)),
        optimizer=lambda config: md.optim.adam(config.learning_rate), mean_over=lambda config: "batch", **more,
    )  # fmt: skip


def settings(hub: md.HubConfig) -> dict[str, int]:
    """The number of classes: transformers writes a label for each, and nothing for its default, two."""
    labels = hub.values.get("id2label")
    return {"classes": len(labels) if isinstance(labels, dict) and labels else hub.size("num_labels", 2)}


def to_hub(config: Any) -> dict[str, Any]:
    """Labels without a meaning, by which transformers counts the classes."""
    names = [f"LABEL_{i}" for i in range(config.classes)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
