"""`KernelProfile`: measured times of kernels on one device, by operations, local sizes and dtypes.

A kernel has a form and sizes. The form is its operations, the dtypes of its operands and which of their dims are equal;
numbers such as the factor of a product are left out, because they do not change the time. A kernel that was measured in
exactly these sizes takes the measured time. Between two measured sizes of one form, the logarithm of the time is linear
in the logarithm of the work (FLOPs if it has products, otherwise bytes). Other kernels have no time here.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..errors import UsageError
from ..errors.values import AboveZero, FromZero, Table, load_toml, read
from .machine_file import MachineError

KEYS = ("device", "platform", "jax", "date", "rounds")


@dataclass(frozen=True)
class Form:
    """The form and the sizes of one kernel."""

    text: str
    sizes: tuple[int, ...]  # of the dims in `text`, in its order


@dataclass(frozen=True)
class Point:
    """One measurement: the sizes of the kernel, its work, and the seconds that one run took."""

    sizes: tuple[int, ...]
    work: float
    seconds: float


@dataclass(frozen=True)
class _Kernel:
    """A table `[[kernel]]` of a profile."""

    form: str
    points: list[tuple[tuple[int, ...], FromZero, AboveZero]]


@dataclass(frozen=True)
class KernelProfile:
    """Measured kernels, and their origin: device, JAX version, date, and rounds of each measurement (a median)."""

    device: str
    platform: str
    jax: str
    date: str
    rounds: int
    kernels: Mapping[str, tuple[Point, ...]]  # by the text of the form
    file: str = ""

    def __str__(self) -> str:
        count = sum(map(len, self.kernels.values()))
        return f"{count} kernels measured on {self.device}, {self.date}, JAX {self.jax}, median of {self.rounds} rounds"

    @cached_property
    def _exact(self) -> dict[Form, float]:
        return {Form(text, point.sizes): point.seconds for text, points in self.kernels.items() for point in points}

    @cached_property
    def _curves(self) -> dict[str, list[tuple[float, float]]]:
        """For every form, (work, seconds) in increasing order; equal work has the mean of its times."""
        return {text: _curve(points) for text, points in self.kernels.items()}

    def exact(self, form: Form) -> float | None:
        """Seconds of a kernel that was measured in these sizes."""
        return self._exact.get(form)

    def seconds(self, form: Form, work: float) -> float | None:
        """Seconds of a kernel, measured or interpolated; None outside the measured sizes of its form."""
        exact = self.exact(form)
        return _between(self._curves.get(form.text, []), work) if exact is None else exact

    def merged(self, other: KernelProfile) -> KernelProfile:
        """Both profiles' kernels; the other's times replace those of the same sizes."""
        kernels = {text: {point.sizes: point for point in points} for text, points in self.kernels.items()}
        for text, points in other.kernels.items():
            kernels.setdefault(text, {}).update((point.sizes, point) for point in points)
        lists = {text: tuple(points.values()) for text, points in kernels.items()}
        return KernelProfile(other.device, other.platform, other.jax, other.date, other.rounds, lists, other.file)

    def to_toml(self) -> str:
        """The text of the file that `load_profile` reads."""
        lines = [f"{key} = {json.dumps(getattr(self, key))}" for key in KEYS]
        for text, points in sorted(self.kernels.items()):
            rows = [f"    [{list(point.sizes)}, {point.work:.6e}, {point.seconds:.6e}]," for point in points]
            lines += ["", "[[kernel]]", f"form = {json.dumps(text)}", "points = [  # sizes, work, seconds", *rows, "]"]
        return "\n".join([*lines, ""])


def _curve(points: Iterable[Point]) -> list[tuple[float, float]]:
    by_work: dict[float, list[float]] = {}
    for point in points:
        by_work.setdefault(point.work, []).append(point.seconds)
    return [(work, sum(times) / len(times)) for work, times in sorted(by_work.items())]


def _between(curve: Sequence[tuple[float, float]], work: float) -> float | None:
    """The time at this work, between its neighbours on the curve; None outside the curve."""
    if not curve or not curve[0][0] <= work <= curve[-1][0]:
        return None
    i = bisect_left([x for x, _ in curve], work)
    (x1, y1) = curve[i]
    if x1 == work:
        return y1
    (x0, y0) = curve[i - 1]
    share = math.log(work / x0) / math.log(x1 / x0) if x0 > 0 else 1.0
    return y0 * (y1 / y0) ** share


@dataclass
class Coverage:
    """The origin of the times of a program's kernels: numbers of kernels, and their seconds in one step."""

    exact: int = 0
    interpolated: int = 0
    missing: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by "exact", "interpolated", "missing"

    def add(self, source: str, seconds: float) -> None:
        """Count one kernel."""
        setattr(self, source, getattr(self, source) + 1)
        self.seconds[source] = self.seconds.get(source, 0.0) + seconds

    def __str__(self) -> str:
        total = self.exact + self.interpolated + self.missing
        roofline = self.seconds.get("missing", 0.0) / max(sum(self.seconds.values()), 1e-30)
        return (
            f"{self.exact} of {total} kernels have measured times and {self.interpolated} interpolated ones; "
            f"{self.missing} are not in the profile and have roofline times, {roofline:.0%} of compute"
        )


_KINDS = {
    **dict.fromkeys(("device", "platform", "jax", "date"), str),
    "rounds": int,
    "kernel": list[_Kernel],
}


def load_profile(path: str | os.PathLike[str]) -> KernelProfile:
    """Read a profile; raises `MachineError` for a file that is missing or malformed."""
    file = Path(path).expanduser()
    if not file.exists():
        raise MachineError(f"there is no profile {file}\n  run: meshdsl doctor --profile MODEL --out {file}")
    try:
        values = read("", load_toml(file, "the profile", MachineError), Table(_KINDS, tuple(_KINDS)))
    except UsageError as error:
        problems = error.args[0].replace("\n", "\n  ")
        raise MachineError(
            f"the profile {file} is malformed; measure again with meshdsl doctor --profile\n  {problems}"
        ) from None
    kernels = {kernel.form: tuple(Point(*row) for row in kernel.points) for kernel in values.pop("kernel")}
    return KernelProfile(**values, kernels=kernels, file=str(file))
