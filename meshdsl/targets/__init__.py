"""What each compiler does with a kernel, a loop's stack and a collective: one file or folder for each platform.

To add a platform, write its file and add it to `TARGETS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..errors import LayoutError, nearest
from .cpu import CPU
from .gpu import GPU
from .target import MemoryRules, Target
from .tpu import TPU

__all__ = ["FUSED", "TARGETS", "MemoryRules", "Target", "device_words", "target_for", "target_named", "target_of"]

TARGETS = (TPU, GPU, CPU)
FUSED = {kernel.name: kernel for target in TARGETS for kernel in target.kernels}


def target_named(platform: str) -> Target:
    """The target of a platform, by JAX's name of it; of one that is not known, a target without habits.

    >>> target_named("gpu").name, target_named("wafer").kernels
    ('gpu', ())
    """
    return next((target for target in TARGETS if target.name == platform), Target(platform))


def device_words() -> list[str]:
    """The words that a machine file may use for one device, such as "GPU"."""
    return [word for target in TARGETS for word in target.devices]


def target_for(device: str, capability: float = 0.0) -> Target:
    """The target of a machine, by its word for one device and the devices' compute capability, if that is known.

    Raises `LayoutError` for a word that no target has.
    """
    for target in TARGETS:
        if device in target.devices:
            return _with_capability(target, capability) if capability else target
    raise LayoutError(f"a machine has the device {device!r}; {nearest(device, device_words())}")


def target_of(devices: Iterable[Any]) -> Target:
    """The target of these devices, without the kernels for which they are too old."""
    device = next(iter(devices))
    target, capability = target_named(device.platform), getattr(device, "compute_capability", None)
    return target if capability is None else _with_capability(target, float(capability))


def _with_capability(target: Target, capability: float) -> Target:
    kernels = tuple(each for each in target.kernels if capability >= each.capability)
    name = target.name if kernels == target.kernels else f"{target.name} of compute capability {capability}"
    return dataclasses.replace(target, name=name, capability=capability, kernels=kernels)
