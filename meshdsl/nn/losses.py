"""Losses. The class dim may be sharded, and is not gathered."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import meshdsl as md

from .precision import DimLike, dim_of


class Targets(NamedTuple):
    """The targets of a loss, the dim of their classes, and the target that is ignored."""

    targets: md.Tensor
    classes: md.Dim
    ignore: int | None


_seen: contextvars.ContextVar[list[Targets] | None] = contextvars.ContextVar("targets", default=None)


@contextlib.contextmanager
def targets_seen() -> Iterator[list[Targets]]:
    """The targets of the losses that are traced in this context."""
    seen: list[Targets] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def softmax_cross_entropy(
    logits: md.Tensor,
    targets: md.Tensor,
    over: DimLike = "vocab",
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore: int | None = -100,
    prefer: DimLike | None = None,
) -> md.Tensor:
    """-log softmax(logits)[target] for each target; the result has the dims of the logits without `over`.

    >>> import meshdsl as md
    >>> logits = md.tensor([[0.0, 0.0], [0.0, 100.0]], "batch vocab")
    >>> md.nn.softmax_cross_entropy(logits, md.tensor([0, 1], "batch"))
    tensor(float32[batch=2], [0.6931 0.    ])

    Logits sharded over `over` are not gathered. Devices all-reduce the maximum, then one stacked tensor with the sum of
    exponentials and the target's logit (Megatron-LM, Shoeybi et al., 2019, section 3). With `label_smoothing` s, the
    target distribution is s / size for every class plus 1 - s for the target (Szegedy et al., 2016, section 7).
    `z_loss` is the weight of an added term log(sum(exp(logits))) ** 2 (Mesh-TensorFlow; de Brebisson and Vincent,
    2016). Computed in float32, or in the dtype of the logits if that is wider. Where a layout maps `over` and another
    dim to one axis, `over` is sharded, or `prefer` if it is given: the batch, where weights are stored sharded and
    gathered for use.

    Where a target is `ignore`, the loss and its gradient are exactly 0, also if logits there are infinite or NaN. A
    mean over all targets would still count them; `meshdsl.train.mean(losses, targets != -100)` does not. With
    `ignore=None`, no target is ignored. Any other target below 0 or from the size of `over` has no class:
    `meshdsl train` and `meshdsl.train.train` refuse batches with one. Elsewhere nothing looks at the values of targets;
    its loss is then that of a target with the largest logit, and its gradient that of log(sum(exp(logits))).
    """
    classes = dim_of(logits, over)
    if targets.dtype.kind not in "iu":
        raise md.ShapeError(
            f"the targets of softmax_cross_entropy are integers, the numbers of the classes; got {targets.type}\n"
            f"  for probabilities: -md.sum(targets * md.log_softmax(logits, {classes.name!r}), {classes.name!r})"
        )
    if (seen := _seen.get()) is not None:
        seen.append(Targets(targets, classes, ignore))
    if not 0 <= label_smoothing <= 1:
        raise md.ShapeError(f"label_smoothing is from 0 to 1, got {label_smoothing}")
    if logits.dtype.itemsize < 4:
        logits = md.cast(logits, "float32")
    order = (classes,) if prefer is None else (dim_of(logits, prefer), classes)
    logits = md.prefer(logits, *order)
    shift = md.stop_gradient(md.max(logits, classes))
    shifted = logits - shift
    ignored = _ignored(targets, ignore)
    if ignored is not None:  # here, and not only at the end: 0 times an infinite gradient is NaN
        everywhere = md.prefer(md.broadcast(targets, logits.dims), *order)  # one gather of targets, for the classes too
        shifted = md.where(everywhere == ignore, 0, shifted)
    is_target = md.prefer(md.one_hot(targets, classes, bool), *order)
    sums = [md.sum(md.exp(shifted), classes), md.sum(md.where(is_target, shifted, 0), classes)]
    if label_smoothing:
        sums.append(md.sum(shifted, classes))
    stacked = md.fresh_dim(md.Dim("loss__sums", len(sums)), logits.dims)
    total, target, *rest = md.unstack(md.stack(sums, stacked), stacked)  # stacked, so that one all-reduce finishes them
    log_total = md.log(total)
    for logit_sum in rest:
        target = (1 - label_smoothing) * target + (label_smoothing / classes.size) * logit_sum
    loss = log_total - target
    if z_loss:
        loss = loss + z_loss * md.square(log_total + shift)
    return loss if ignored is None else md.where(ignored, 0, loss)


def _ignored(targets: md.Tensor, ignore: int | None) -> md.Tensor | None:
    """True for the targets that are ignored; None if the dtype of the targets has no such number."""
    limits = np.iinfo(targets.dtype)
    return None if ignore is None or not limits.min <= ignore <= limits.max else targets == ignore
