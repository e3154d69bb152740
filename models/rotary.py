"""Rotary positions with a scaled context, and their keys in a Hugging Face config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import meshdsl as md

__all__ = ["Rotary", "read", "settings", "to_hub", "written"]


@dataclass(frozen=True)
class Rotary:
    """The angles of rotary positions. A factor other than 1 scales them for a longer context.

    "linear" divides every speed by the factor. "llama3" divides slow speeds and keeps fast ones: those that turn more
    than `high` times in the first context of `context` positions; it divides those that turn fewer than `low` times.
    """

    base: float = 10000.0
    factor: float = 1.0
    kind: str = "default"  # or "linear" or "llama3"
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def speeds(self, head: md.Dim) -> list[float]:
        """The angle by which each pair of a head rotates per position, in radians."""
        half = head.size // 2
        return [speed * self._scale(speed) for speed in (self.base ** (-i / half) for i in range(half))]

    def _scale(self, speed: float) -> float:
        if self.kind == "llama3":
            turns = self.context * speed / (2 * math.pi)
            kept = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
            return kept + (1 - kept) / self.factor
        return 1 / self.factor


def settings(hub: md.HubConfig) -> dict[str, Rotary]:
    """The rotary positions of a config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    new = hub.values.get("rope_parameters") is not None
    table = hub.table("rope_parameters" if new else "rope_scaling")
    return {"rotary": read(table, (table if new else hub).number("rope_theta", 10000.0))}


def read(table: md.HubConfig, base: float) -> Rotary:
    """The rotary positions of a table of rope parameters, whose `rope_theta` is given."""
    kind = table.only("type" if "type" in table.values else "rope_type", "default", "linear", "llama3")
    if kind == "default":
        rotary = Rotary(base)
    elif kind == "linear":
        rotary = Rotary(base, table.number("factor"), kind)
    else:
        low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
        context = table.size("original_max_position_embeddings")
        rotary = Rotary(base, table.number("factor"), kind, low, high, context)
    table.close()
    return rotary


def to_hub(config: Any) -> dict[str, Any]:
    """The key `rope_parameters` of a config.json."""
    return {"rope_parameters": written(config.rotary)}


def written(rotary: Rotary) -> dict[str, Any]:
    """The table of rope parameters."""
    table: dict[str, Any] = {"rope_type": rotary.kind, "rope_theta": rotary.base}
    if rotary.kind != "default":
        table["factor"] = rotary.factor
    if rotary.kind == "llama3":
        table |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
        table["original_max_position_embeddings"] = rotary.context
    return table
