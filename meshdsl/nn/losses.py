"""Losses. The class dim may be sharded, and is not gathered."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import meshdsl as md

from .precision import DimLike, dim_of

Targets = list[tuple[md.Tensor, md.Dim]]
_seen: contextvars.ContextVar[Targets | None] = contextvars.ContextVar("targets", default=None)


@contextlib.contextmanager
def targets_seen() -> Iterator[Targets]:
    """The targets of the losses that are traced in this context, each with the dim of its classes."""
    seen: Targets = []
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
    gathered for use. A target without a class, below 0 or from the size of `over`, has a loss of log(sum(exp(logits)))
    minus the largest logit, and a gradient as if it were masked out; `meshdsl train` and `meshdsl.train.train` refuse
    batches with targets from the size of `over`.
    """
    classes = dim_of(logits, over)
    if targets.dtype.kind not in "iu":
        raise md.ShapeError(
            f"the targets of softmax_cross_entropy are integers, the numbers of the classes; got {targets.type}\n"
            f"  for probabilities: -md.sum(targets * md.log_softmax(logits, {classes.name!r}), {classes.name!r})"
        )
    if (seen := _seen.get()) is not None:
        seen.append((targets, classes))
    if not 0 <= label_smoothing <= 1:
        raise md.ShapeError(f"label_smoothing is from 0 to 1, got {label_smoothing}")
    if logits.dtype.itemsize < 4:
        logits = md.cast(logits, "float32")
    order = (classes,) if prefer is None else (dim_of(logits, prefer), classes)
    logits = md.prefer(logits, *order)
    shift = md.stop_gradient(md.max(logits, classes))
    shifted = logits - shift
    is_target = md.prefer(md.one_hot(targets, classes, bool), *order)
    sums = [md.sum(md.exp(shifted), classes), md.sum(md.where(is_target, shifted, 0), classes)]
    if label_smoothing:
        sums.append(md.sum(shifted, classes))
    total, target, *rest = md.unstack(md.stack(sums, "sums"), "sums")  # stacked, so that one all-reduce finishes them
    log_total = md.log(total)
    for logit_sum in rest:
        target = (1 - label_smoothing) * target + (label_smoothing / classes.size) * logit_sum
    loss = log_total - target
    return loss + z_loss * md.square(log_total + shift) if z_loss else loss
