"""Parts of image classifiers: their batch, their loss, and the labels of a Hugging Face config.json.

The running statistics of a stateful classifier are parameters without a gradient: the loss returns their new values,
and a training step stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import meshdsl as md

__all__ = [
    "StatefulNetwork", "batch_norm", "inputs", "loss", "settings", "stateful_workload", "to_hub", "workload",
]  # fmt: skip

Values = dict[str, md.Tensor]
StatefulNetwork = Callable[[Values], tuple[md.Tensor, Any]]  # batch -> logits, and nested dicts of the statistics


def inputs(config: Any) -> dict[str, object]:
    """The specs of a batch: images [batch, height, width, color], and their classes [batch]."""
    sizes = {"batch": config.batch, "height": config.size, "width": config.size, "color": config.color}
    image = [md.Dim(name, size) for name, size in sizes.items()]
    return {"image": md.spec(image, config.compute_dtype), "targets": md.spec(image[0], "int32")}


def loss(logits_of: Callable[..., md.Tensor], targets: str = "targets") -> Callable[..., md.train.Metric]:
    """The loss function: mean cross entropy, in nats; targets of -100 are ignored."""

    def cross_entropy(params: dict[str, md.Tensor], batch: dict[str, md.Tensor]) -> md.train.Metric:
        return mean_loss(logits_of(params, batch), batch[targets])

    return cross_entropy


def mean_loss(logits: md.Tensor, targets: md.Tensor) -> md.train.Metric:
    """The mean cross entropy of the targets that are not -100, in nats."""
    return md.train.mean(md.nn.softmax_cross_entropy(logits, targets, "classes"), targets != -100)


def workload(name: str, config: Any, model: Callable[[Any], md.Model], **more: Any) -> md.Workload:
    """The workload of a classifier whose images do not depend on each other, with Adam."""
    return md.Workload(
        name, config, model=model, inputs=inputs, loss=lambda config: loss(model(config)),
        optimizer=lambda config: md.optim.adam(config.learning_rate), **more,
    )  # fmt: skip


def batch_norm(
    x: md.Tensor, over: tuple[str, ...], training: bool, precision: md.nn.Precision
) -> tuple[md.Tensor, dict[str, Any]]:
    """Batch norm whose running statistics are the parameters `norm/mean` and `norm/var`, and their new values."""
    kept = [d for d in x.dims if d.name not in over]
    mean = md.param("norm/mean", kept, init=md.init.zeros(), dtype=precision.param)
    var = md.param("norm/var", kept, init=md.init.ones(), dtype=precision.param)
    state = {"mean": mean, "var": var}
    x, state = md.nn.batch_norm(x, over, state, training=training, unbiased=True, precision=precision)
    return x, {"norm": state}


def stateful_workload(
    name: str, config: Any, network: Callable[[Any, bool], StatefulNetwork], *, optimizer: Any, **more: Any
) -> md.Workload:
    """The workload of a classifier with `batch_norm`; the second argument of `network` is true for training."""

    def loss(config: Any, training: bool = True) -> Callable[..., tuple[md.train.Metric, Values, Values]]:
        """Mean cross entropy in nats, no metrics, and the new running statistics by path."""
        run = md.model(network(config, training))

        def cross_entropy(params: Values, batch: Values) -> tuple[md.train.Metric, Values, Values]:
            logits, statistics = run(params, batch)
            return mean_loss(logits, batch["targets"]), {}, dict(_paths(statistics))

        return cross_entropy

    def frozen(path: str) -> bool:
        return path.endswith(("/norm/mean", "/norm/var"))

    return md.Workload(
        name, config, model=lambda config: md.model(lambda batch: network(config, False)(batch)[0]), inputs=inputs,
        loss=loss, eval_loss=partial(loss, training=False),
        optimizer=lambda config: md.optim.with_frozen(optimizer(config), frozen), **more,
    )  # fmt: skip


def _paths(tree: dict[str, Any], scope: str = "") -> Iterator[tuple[str, md.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{scope}{name}/")
        else:
            yield scope + name, value


def settings(hub: md.HubConfig) -> dict[str, int]:
    """The number of classes: transformers writes a label for each, and nothing for its default, two."""
    labels = hub.values.get("id2label")
    return {"classes": len(labels) if isinstance(labels, dict) and labels else hub.size("num_labels", 2)}


def to_hub(config: Any) -> dict[str, Any]:
    """Labels without a meaning, by which transformers counts the classes."""
    names = [f"LABEL_{i}" for i in range(config.classes)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
