"""The worth of single knobs of a plan, and its fit on half the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors.units import seconds, show_bytes
from .evaluate import Entry

__all__ = ["Half", "KnobWorth"]


@dataclass(frozen=True, eq=False)
class KnobWorth:
    """The best plan with one knob back at its default; no entry if that is illegal or the step does not take it."""

    knob: str
    change: str
    entry: Entry | None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        entry = None if self.entry is None else self.entry.to_dict()
        return {"knob": self.knob, "change": self.change, "entry": entry, "why": self.why}


@dataclass(frozen=True, eq=False)
class Half:
    """The best plan on half the devices, and the plan with what makes it fit there; `print` shows both."""

    devices: int
    limit: float
    entry: Entry | None  # as it is
    fitting: Entry | None  # with the fewest of the changes that save memory; None if none fits
    changes: str = ""
    why: str = ""  # if there is no entry

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        entries = {"entry": self.entry, "fitting": self.fitting}
        shown = {name: None if entry is None else entry.to_dict() for name, entry in entries.items()}
        return {"devices": self.devices, "limit_bytes": self.limit, **shown, "changes": self.changes}

    def __str__(self) -> str:
        title = f"on half the devices ({self.devices})"
        if self.entry is None:
            return f"{title}: {self.why}"
        amount = f"{seconds(self.entry.seconds)}, {show_bytes(self.entry.peak_bytes)} on each device"
        if self.entry.fits:
            return f"{title} the plan fits: {amount}"
        if self.fitting is None:
            return f"{title} nothing makes it fit: {amount}"
        fits = f"{seconds(self.fitting.seconds)}, {show_bytes(self.fitting.peak_bytes)}"
        changes = "\n".join(f"  {line}" for line in self.changes.splitlines())
        return f"{title}: {amount}, over the limit; it fits with\n{changes}\n  {fits}"
