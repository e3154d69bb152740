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
    "yarn" does so along the index of a pair (Peng et al., 2023), and `magnitude` depends on `mscale`.
    """

    base: float = 10000.0
    factor: float = 1.0
    kind: str = "default"  # or "linear", "llama3" or "yarn"
    low: float = 1.0
    high: float = 4.0
    context: int = 8192
    mscale: float = 0.0

    def speeds(self, head: md.Dim) -> list[float]:
        """The angle by which each pair of a head rotates per position, in radians."""
        half = head.size // 2
        if self.kind == "yarn":
            return [self.base ** (-i / half) * self._ramp(i, half) for i in range(half)]
        return [speed * self._scale(speed) for speed in (self.base ** (-i / half) for i in range(half))]

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1 + 0.1 * self.mscale * math.log(self.factor) if self.kind == "yarn" and self.factor > 1 else 1.0

    def _ramp(self, i: int, half: int) -> float:
        """The scale of pair i: pairs that turn `high` and `low` times in a context are the ends of a ramp."""
        turns = (half * math.log(self.context / (2 * math.pi * t)) / math.log(self.base) for t in (self.high, self.low))
        first, last = max(0, math.floor(next(turns))), min(2 * half - 1, math.ceil(next(turns)))
        scaled = min(1.0, max(0.0, (i - first) / (last - first or 0.001)))
        return 1 - scaled + scaled / self.factor

    def _scale(self, speed: float) -> float:
        if self.kind == "llama3":
            turns = self.context * speed / (2 * math.pi)
            kept = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
            return kept + (1 - kept) / self.factor
        return 1 / self.factor


def settings(hub: md.HubConfig, *more: str) -> dict[str, Rotary]:
    """The rotary positions of a config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    new = hub.values.get("rope_parameters") is not None
    table = hub.table("rope_parameters" if new else "rope_scaling")
    base = (table if new else hub).number("rope_theta", 10000.0)
    if new:  # the keys of transformers 4 beside it say the same
        hub.table("rope_scaling")
        if hub.number("rope_theta", base) != base:
            hub.only("rope_theta", base)
    return {"rotary": read(table, base, *more)}


def read(table: md.HubConfig, base: float, *more: str) -> Rotary:
    """The rotary positions of a table of rope parameters, whose `rope_theta` is given; `more` are further kinds."""
    kind = table.only("type" if "type" in table.values else "rope_type", "default", "linear", "llama3", *more)
    if kind == "default":
        rotary = Rotary(base)
    elif kind == "linear":
        rotary = Rotary(base, table.number("factor"), kind)
    elif kind == "yarn":
        fast, slow, mscale = table.number("beta_fast", 32.0), table.number("beta_slow", 1.0), table.number("mscale")
        table.only("mscale_all_dim", mscale)  # then sines and cosines are not scaled, only scores
        context = table.size("original_max_position_embeddings")
        rotary = Rotary(base, table.number("factor"), kind, slow, fast, context, mscale)
    else:
        low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
        context = table.size("original_max_position_embeddings")
        rotary = Rotary(base, table.number("factor"), kind, low, high, context)
    table.close()
    return rotary


def to_hub(config: Any) -> dict[str, Any]:
    """The keys of a config.json: `rope_parameters`, and those that transformers 4 reads instead."""
    table = written(config.rotary)
    older = {key: value for key, value in table.items() if key != "rope_theta"}
    scaling = None if config.rotary.kind == "default" else older
    return {"rope_parameters": table, "rope_theta": config.rotary.base, "rope_scaling": scaling}


def written(rotary: Rotary) -> dict[str, Any]:
    """The table of rope parameters."""
    table: dict[str, Any] = {"rope_type": rotary.kind, "rope_theta": rotary.base}
    if rotary.kind != "default":
        table["factor"] = rotary.factor
    if rotary.kind == "llama3":
        table |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
        table["original_max_position_embeddings"] = rotary.context
    if rotary.kind == "yarn":
        table |= {"beta_slow": rotary.low, "beta_fast": rotary.high, "mscale": rotary.mscale}
        table |= {"mscale_all_dim": rotary.mscale, "original_max_position_embeddings": rotary.context}
    return table
