"""Losses and metrics of data that is read in parts: micro-batches, evaluation batches, the blocks of devices.

A mean of means is not the mean, unless every part has the same number of terms. A `Metric` therefore keeps what parts
can be joined by: sums and counts are added, and divided once, after the last part.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshdsl as md

_NUMBER = int | float | np.number
_OVER_PARTS = "micro__parts"  # a private dim


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "count"], meta_fields=["how", "number", "scale"]
)
@dataclass(frozen=True)
class Term:
    """A number of one part of the data, and how the numbers of parts are joined.

    `how` is "sum", "maximum", "minimum", or "same" for a number that all parts have. A sum may be divided by a count,
    which is added up too: a tensor (`count`) or a number known before (`number`).
    """

    how: str
    value: Any
    count: Any = None
    number: Any = None
    scale: float = 1.0

    def result(self) -> md.Tensor:
        """The joined number: the sum divided by its count, 0 if that is 0."""
        return self.share(1, self.count)

    def share(self, parts: int, count: md.Tensor | None) -> md.Tensor:
        """The share of one of `parts` parts in the result, if `count` is the count of all parts."""
        value = md.cast(self.value, "float32") if self.value.dtype.kind in "biu" else self.value
        if count is not None:
            count = md.cast(count, value.dtype)
            value = value / md.where(count == 0, 1, count)
        elif (number := (self.number or 1) * parts) != 1:
            value = value / number
        return value if self.scale == 1 else value * self.scale

    def part(self, index: md.Tensor | None, parts: int) -> Term:
        """The term of one of so many parts in a form that is added up; `whole` reverses it."""
        if self.how == "sum":
            return self
        if self.how == "same" or index is None:
            return dataclasses.replace(self, value=self.value / parts)
        own = md.iota(md.Dim(_OVER_PARTS, parts)) == index
        return dataclasses.replace(self, value=md.where(own, self.value, 0))

    def whole(self, parts: int) -> Term:
        """The term of all parts, from the sum of the terms of its parts."""
        if self.how == "sum":
            return dataclasses.replace(self, number=None if self.number is None else self.number * parts)
        extreme = {"maximum": md.max, "minimum": md.min}.get(self.how)
        return self if extreme is None else dataclasses.replace(self, value=extreme(self.value))

    def joined(self, other: Term) -> Term:
        """The term of two parts, on the host, in at least float64."""
        add: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "maximum": np.maximum, "minimum": np.minimum}
        join = add.get(self.how, lambda _, last: last)
        count = None if self.count is None else np.add(_double(self.count), _double(other.count))
        number = None if self.number is None or other.number is None else self.number + other.number
        value = join(_double(self.value), _double(other.value))
        return dataclasses.replace(self, value=value, count=count, number=number)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["terms"], meta_fields=["then", "plain"])
@dataclass(frozen=True)
class MetricTerms:
    """The terms of a metric, which pass through compiled functions, and the function of their results.

    Without a function, the metric is the sum of the results. `plain` is true for a tensor that was returned as it is:
    its mean over parts is a guess.
    """

    terms: tuple[Term, ...]
    then: Callable[..., md.Tensor] | None = None
    plain: bool = False

    def result(self) -> md.Tensor:
        """The metric of all the data that has been joined."""
        results = [term.result() for term in self.terms]
        return functools.reduce(operator.add, results) if self.then is None else self.then(*results)

    def of_terms(self, change: Callable[[Term], Term]) -> MetricTerms:
        """The same metric of changed terms."""
        return dataclasses.replace(self, terms=tuple(map(change, self.terms)))

    def joined(self, other: MetricTerms) -> MetricTerms:
        """The metric of two parts, on the host."""
        return dataclasses.replace(self, terms=tuple(a.joined(b) for a, b in zip(self.terms, other.terms, strict=True)))

    def share(self, parts: int, counts: Sequence[Any]) -> md.Tensor:
        """The share of one of `parts` parts in a loss; `counts` are the counts of its terms in all parts."""
        if self.then is not None or any(term.how in ("maximum", "minimum") for term in self.terms):
            what = "a function of sums" if self.then else f"a {next(t.how for t in self.terms if t.how != 'sum')}"
            raise md.ShapeError(
                f"the loss is {what}, so micro-batches do not add up to its gradient\n"
                "  return a sum of md.train.mean(total, count) and md.train.total(x), or use no micro-batches"
            )
        shares = [term.share(parts, count) for term, count in zip(self.terms, counts, strict=True)]
        return functools.reduce(operator.add, shares)


@dataclass(frozen=True, eq=False)
class Metric:
    """A loss or metric with its reduction: `mean`, `total`, `maximum`, `minimum`, `norm`, `same` or `combine`.

    >>> import meshdsl as md
    >>> losses = md.tensor([1.0, 2.0, 6.0], "batch")
    >>> md.train.mean(losses) + 0.5 * md.train.mean(md.square(losses), count=2)
    metric(float32[], 13.25)

    It is accepted where a tensor is, with the value of the data that is here. Metrics are added to each other and
    multiplied by numbers; anything else that is computed from one is a plain tensor. `.value` is that tensor.
    """

    sums: MetricTerms

    @functools.cached_property
    def value(self) -> md.Tensor:
        """The metric of the data that is here, a tensor without dims."""
        return self.sums.result()

    def __md_tensor__(self) -> md.Tensor:
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sums":  # copies ask for them before there are any
            raise AttributeError(name)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return f"metric{repr(self.value).removeprefix('tensor')}"

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def _plus(self, other: Metric, sign: int) -> Metric:
        for metric in (self, other):
            if metric.sums.then is not None:
                raise md.ShapeError(
                    "a metric that is a function of sums is not added to a loss\n"
                    "  use md.train.combine(function, metric, ...), whose function gets the values of several metrics"
                )
        signed = tuple(dataclasses.replace(t, scale=sign * t.scale) for t in other.sums.terms)
        return Metric(MetricTerms((*self.sums.terms, *signed)))

    def __add__(self, other: Any) -> Any:
        other = same(other) if isinstance(other, _NUMBER) and not self.sums.then else other
        return self._plus(other, 1) if isinstance(other, Metric) else self.value + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, _NUMBER) or self.sums.then:
            return self.value * _value(other)
        return Metric(self.sums.of_terms(lambda t: dataclasses.replace(t, scale=float(other) * t.scale)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / other) if isinstance(other, _NUMBER) and other else self.value / _value(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __neg__(self) -> Any:
        return self * -1


Then = Callable[[md.Tensor], md.Tensor] | None


def mean(total: Any, count: Any = None, *, then: Then = None) -> Metric:
    """The mean `total / count` of all the data: over micro-batches, both are added up and divided once.

    >>> import meshdsl as md
    >>> losses, real = md.tensor([1.0, 2.0, 6.0], "batch"), md.tensor([True, True, False], "batch")
    >>> md.train.mean(losses), md.train.mean(losses, real), md.train.mean(losses, count=2)
    (metric(float32[], 3.), metric(float32[], 1.5), metric(float32[], 4.5))
    >>> md.train.mean(losses, then=md.exp)
    metric(float32[], 20.0855)

    `total` is summed over its dims, in at least float32. `count` is a tensor, which is summed too, or the number of
    terms in this part of the data, by default the number of elements of `total`. A tensor of booleans is a mask:
    elements of `total` where it is false are neither added nor counted. The mean is 0 where the count is 0. Counts have
    no gradient. `then` is applied to the mean of all data: `md.exp` for a perplexity. Raises `ShapeError` for a mask
    with dims that `total` lacks, unless `total` is a sum already, without dims.
    """
    x, number, count = _tensor("mean", total), None, _value(count)
    if isinstance(count, md.Tensor):
        if count.dtype.kind == "b" and x.dims:
            if extra := {*count.dims} - {*x.dims}:
                raise md.ShapeError(
                    f"the mask of md.train.mean is {count.type}, and {x.type} has no {', '.join(map(str, extra))}\n"
                    "  a mask has dims of the terms; sum both first if it counts something else"
                )
            count = md.broadcast(count, x.dims) if len(count.dims) < len(x.dims) else count
            x = md.where(count, _wide(x), 0)
        count = _sum(md.stop_gradient(count) if count.dtype.kind == "f" else count)
    else:
        number = x.size if count is None else count
        if isinstance(number, bool) or not isinstance(number, _NUMBER) or not number > 0:
            raise md.ShapeError(f"the count of md.train.mean is a tensor or a number above 0, got {number!r}")
    return _metric(Term("sum", _sum(x), None if number else count, number), then)


def total(x: Any, *, then: Then = None) -> Metric:
    """The sum of x over all its dims and all the data.

    >>> import meshdsl as md
    >>> md.train.total(md.tensor([1.0, 2.0], "batch"))
    metric(float32[], 3.)

    `then` is applied to the sum of all data, such as `md.sqrt`.
    """
    return _metric(Term("sum", _sum(_tensor("total", x))), then)


def norm(x: Any) -> Metric:
    """The Euclidean norm of all elements of x in all the data.

    >>> import meshdsl as md
    >>> md.train.norm(md.tensor([3.0, 4.0], "batch"))
    metric(float32[], 5.)
    """
    return total(md.square(_tensor("norm", x)), then=md.sqrt)


def maximum(x: Any, *, then: Then = None) -> Metric:
    """The largest element of x in all the data. A metric only: no loss in micro-batches is a maximum.

    >>> import meshdsl as md
    >>> md.train.maximum(md.tensor([1.0, 7.0], "batch"))
    metric(float32[], 7.)
    """
    return _metric(Term("maximum", md.max(_tensor("maximum", x))), then)


def minimum(x: Any, *, then: Then = None) -> Metric:
    """The least element of x in all the data; see `maximum`.

    >>> import meshdsl as md
    >>> md.train.minimum(md.tensor([1.0, 7.0], "batch"))
    metric(float32[], 1.)
    """
    return _metric(Term("minimum", md.min(_tensor("minimum", x))), then)


def same(x: Any) -> Metric:
    """A number that does not depend on the data, such as a penalty on weights: every part has it, and it counts once.

    >>> import meshdsl as md
    >>> w, losses = md.tensor([3.0], "io"), md.tensor([1.0, 2.0], "batch")
    >>> md.train.mean(losses) + 0.01 * md.train.same(md.sum(md.square(w)))
    metric(float32[], 1.59)

    Raises `ShapeError` for a tensor with dims.
    """
    x = _tensor("same", x)
    if x.dims:
        raise md.ShapeError(f"md.train.same takes a number without dims, got {x.type}\n  reduce it with md.sum")
    return _metric(Term("same", x), None)


def combine(function: Callable[..., md.Tensor], *metrics: Metric) -> Metric:
    """A function of several metrics, computed from their values of all the data.

    >>> import meshdsl as md
    >>> hits, found, real = (md.train.total(md.tensor(n, "batch")) for n in ([1.0, 2.0], [2.0, 2.0], [1.0, 4.0]))
    >>> md.train.combine(lambda hits, found, real: 2 * hits / (found + real), hits, found, real)
    metric(float32[], 0.6667)

    Raises `ShapeError` for anything else than metrics.
    """
    if not metrics or not all(isinstance(m, Metric) for m in metrics):
        raise md.ShapeError("md.train.combine takes a function and metrics, such as md.train.total(x)")
    parts = [m.sums for m in metrics]

    def combined(*results: md.Tensor) -> md.Tensor:
        each = iter(results)
        values: list[md.Tensor] = []
        for sums in parts:
            own = [next(each) for _ in sums.terms]
            values.append(functools.reduce(operator.add, own) if sums.then is None else sums.then(*own))
        return function(*values)

    return Metric(MetricTerms(tuple(term for sums in parts for term in sums.terms), combined))


def sums_of(x: Any) -> MetricTerms:
    """The terms of a loss or metric; of a plain tensor, its mean over parts."""
    return x.sums if isinstance(x, Metric) else MetricTerms((Term("sum", x, number=1),), plain=True)


def on_host(sums: MetricTerms) -> float:
    """The metric of terms that were joined on the host."""
    widest = jax.dtypes.canonicalize_dtype("float64")
    return float(jax.tree.map(lambda x: md.tensor(np.asarray(_double(x), widest)), sums).result().numpy())


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Metric) else x


def _double(x: Any) -> Any:
    return np.asarray(x.numpy() if isinstance(x, md.Tensor) else x, np.float64)


def _metric(term: Term, then: Then) -> Metric:
    return Metric(MetricTerms((term,), then))


def _tensor(name: str, x: Any) -> md.Tensor:
    x = _value(x)
    if not isinstance(x, md.Tensor | _NUMBER):
        raise md.ShapeError(f"md.train.{name} takes a tensor, got {type(x).__name__}")
    return x if isinstance(x, md.Tensor) else md.cast(float(x), "float32")


def _sum(x: md.Tensor) -> md.Tensor:
    return md.sum(_wide(x)) if x.dims else _wide(x)


def _wide(x: md.Tensor) -> md.Tensor:
    """Booleans as int32, whose sum is exact, and other numbers as floats of at least 32 bits."""
    if x.dtype.kind == "b":
        return md.cast(x, "int32")
    return md.cast(x, "float32") if x.dtype.kind in "iu" or x.dtype.itemsize < 4 else x
