"""Rates of a step: tokens a second, model and hardware FLOP utilisation, and the time and money to a budget of tokens.

Model FLOP utilisation (Chowdhery et al., *PaLM*, 2022) counts the products that the model needs, once: not those that
rematerialisation repeats, and not elementwise operations. Hardware utilisation counts the products that run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors.units import number, percent
from ...ir import Graph, operations, walk
from ..machine import Machine, machine


@dataclass(frozen=True)
class Work:
    """The work of one step: FLOPs of the model's products on all devices, by dtype, and the size of its batch."""

    flops: Mapping[str, float]
    amount: int  # of `unit`
    unit: str  # "tokens" or "samples"

    def peak_seconds(self, machine: Machine, devices: int) -> float:
        """Seconds that the products take at the machine's peak, divided equally over the devices."""
        return sum(flops / machine.peak_of(dtype) for dtype, flops in self.flops.items()) / devices


@dataclass(frozen=True)
class Budget:
    """The time and money to process an amount of tokens or samples."""

    amount: float
    unit: str
    seconds: float
    device_hours: float
    money: float | None  # None without a price
    joules: float | None = None  # at the devices' TDP, an upper bound; None if that is not known

    def __str__(self) -> str:
        money = "" if self.money is None else f", costs {self.money:,.0f}"
        energy = "" if self.joules is None else f", at most {self.joules / 3.6e6:,.0f} kWh"
        hours = f"{self.device_hours:,.0f} device hours"
        return f"{number(self.amount, self.unit)}: {duration(self.seconds)}, {hours}{money}{energy}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Rates:
    """Rates of a step that takes `seconds` on `devices`.

    >>> rates = Rates(seconds=0.5, devices=8, amount=4096, unit="tokens", mfu=0.4, hardware=0.5)
    >>> print(rates)
    8.19 ktokens/s; MFU 40 %, hardware 50 %
    >>> print(rates.budget(1e9, price=2.0))
    1.00 Gtokens: 33.9 h, 271 device hours, costs 543
    """

    seconds: float
    devices: int
    amount: int  # per step
    unit: str
    mfu: float  # model FLOP utilisation, as a fraction of the peak
    hardware: float  # hardware FLOP utilisation
    watts: float = 0.0  # of all devices, at their TDP; 0: not known

    @property
    def joules(self) -> float | None:
        """Energy of one step if every device takes its TDP, an upper bound; None if the TDP is not known."""
        return self.watts * self.seconds if self.watts else None

    @property
    def per_second(self) -> float:
        """Tokens or samples a second, on all devices."""
        return self.amount / self.seconds if self.seconds else math.inf

    def budget(self, amount: float, price: float | None = None) -> Budget:
        """The time and money to `amount` tokens or samples; `price` is that of one device for an hour."""
        seconds = amount / self.per_second
        hours = seconds * self.devices / 3600
        money, joules = None if price is None else hours * price, self.watts * seconds if self.watts else None
        return Budget(amount, self.unit, seconds, hours, money, joules)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "per_second": self.per_second, "joules": self.joules}

    def __str__(self) -> str:
        rate = f"{number(self.per_second, self.unit)}/s"
        energy = "" if self.joules is None else f"; at most {number(self.joules, 'J')} a step"
        return f"{rate}; MFU {percent(self.mfu, 1)}, hardware {percent(self.hardware, 1)}{energy}"


def work_of(graph: Graph, specs: Mapping[str, Any]) -> Work:
    """The work of a step: `graph` is that of the step without rematerialisation, `specs` are those of its batch.

    A batch of integers with two dims or more, named targets or tokens, counts tokens; any other counts samples, which
    are the largest first dim.
    """
    flops: dict[str, float] = {}
    for eqn, trips in walk(graph):
        if eqn.operation.product and eqn.control is None:
            dtype = eqn.ins[0].dtype.name
            each = operations(eqn, lambda v: tuple(d.size for d in v.dims))
            flops[dtype] = flops.get(dtype, 0.0) + trips * each
    spec = next((specs[name] for name in ("targets", "tokens") if name in specs), None)
    if spec is not None and len(spec.dims) > 1:
        return Work(flops, math.prod(d.size for d in spec.dims), "tokens")
    leading = [spec.dims[0].size for spec in specs.values() if getattr(spec, "dims", ())]
    return Work(flops, max(leading, default=1), "samples")


DEVICE_KINDS = {  # the start of JAX's `device_kind`: the machine file
    "TPU v2": "tpu-v2",
    "TPU v3": "tpu-v3",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6": "tpu-v6e",
    "NVIDIA A100": "a100-p4de",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "Tesla V100": "v100-p3dn",
}


def machine_of_device(kind: str) -> Machine | None:
    """The machine of a device kind, as JAX names it; None if no file has it.

    >>> machine_of_device("TPU v5 lite").name, machine_of_device("cpu")
    ('tpu-v5e', None)
    """
    name = next((name for start, name in DEVICE_KINDS.items() if kind.startswith(start)), None)
    return None if name is None else machine(name)


def duration(seconds: float) -> str:
    """A long time as text.

    >>> duration(90), duration(1200), duration(7200), duration(864000)
    ('90.0 s', '20.0 min', '2.0 h', '10.0 days')
    """
    for unit, scale in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
