"""The values of an overlap plan: what the user asks for, what was tried, and what each window holds."""

from __future__ import annotations

from dataclasses import InitVar, asdict, dataclass
from typing import Any

from ..errors import LayoutError, nearest
from ..errors.markup import titled
from ..errors.no_effect import NoEffectError, no_effect
from ..errors.units import percent, seconds, show_bytes

MODES = ("none", "auto", "dw", "lancet", "list", "ring", "skew", "halves", "ticks")
CHOOSING = ("lancet",)  # modes that choose the number of parts
IN_PARTS = ("halves", "skew", "ticks", "auto")  # modes that take a number of parts
STEPS = ("auto", "flat", "always")  # for collectives in steps
SHOWN = 20  # `print` shows this many windows, the longest


@dataclass(frozen=True)
class Overlap:
    """The choice of an overlap plan: how communication overlaps with computation.

    `mode` is one of

    - "none": the program's order, which the device's compiler may change;
    - "dw": weight gradients run behind all_to_alls (Jiang et al., 2024, Algorithm 1);
    - "lancet": "dw", and the forward pass in parts around each all_to_all (their section 5);
    - "list": list scheduling of the whole step;
    - "ring": "list", and products read gathered operands block by block (collective matmul);
    - "skew": loops stay loops; weights are gathered one trip ahead, or weight gradients computed one trip late, or each
      body is in `parts` parts along `dim`;
    - "ticks": loops stay loops; in a tick of a pipeline, each pass runs beside the messages of the other, or both run
      layer by layer in one loop, each beside the communication of the other, for different micro-batches; layers of
      ticks with one pass may run in `parts` parts along `dim`;
    - "halves": the step in `parts` parts along `dim`, each hiding the communication of the others;
    - "auto": the fastest of these by the timeline, or none; of a pipeline, "ticks", as the other modes unroll its ticks
      and then store what every micro-batch saves.

    `dim` defaults to the dim that passes through most of the program. `memory_limit` is in bytes per device (default:
    the machine's memory).

    >>> import meshdsl as md
    >>> md.Overlap("halves", parts=4, memory_limit=40e9).mode
    'halves'

    Raises `LayoutError` for an unknown mode, and `md.NoEffectError` for options without effect; with `strict=False`
    they are dropped with a `md.NoEffectWarning`.
    """

    mode: str = "none"
    dim: str | None = None
    parts: int = 2
    memory_limit: float | None = None
    strict: InitVar[bool] = True

    def __post_init__(self, strict: bool):
        if self.mode not in MODES:
            raise LayoutError(f"overlap={self.mode!r} is not available; {nearest(self.mode, MODES)}")
        if not isinstance(self.parts, int) or self.parts < 2:
            raise LayoutError(f"parts={self.parts!r}: a program is cut into 2 parts or more")
        if self.dim is not None and self.mode not in (*IN_PARTS, *CHOOSING):
            no_effect(NoEffectError(f"dim has no effect with overlap={self.mode!r}: nothing is cut into parts"), strict)
            object.__setattr__(self, "dim", None)
        if self.parts != 2 and self.mode not in IN_PARTS:
            why = "it chooses the number of parts" if self.mode in CHOOSING else "nothing is cut into parts"
            no_effect(NoEffectError(f"parts has no effect with overlap={self.mode!r}: {why}"), strict)
            object.__setattr__(self, "parts", 2)
        if self.mode == "none" and self.memory_limit is not None:
            no_effect(NoEffectError("memory_limit has no effect with overlap='none': nothing is moved"), strict)
            object.__setattr__(self, "memory_limit", None)


NO_OVERLAP = Overlap()


@dataclass(frozen=True)
class OverlapWindow:
    """One collective between its start and its wait."""

    collective: str
    where: str
    cause: str
    seconds: float
    exposed: float  # seconds in which nothing is computed
    inside: tuple[tuple[str, str], ...]  # (operation, source line) of each product that runs meanwhile

    def __str__(self) -> str:
        hidden = percent(self.seconds - self.exposed, self.seconds)
        lines = ", ".join(dict.fromkeys(where for _, where in self.inside)) or "no product"
        return (
            f"{self.collective}  {seconds(self.seconds)}, {hidden} hidden behind {lines}  # {self.where} {self.cause}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Attempt:
    """One plan that was tried, with its estimated time and peak memory."""

    name: str
    seconds: float
    exposed: float
    peak_bytes: int
    rejected: str = ""


@dataclass(frozen=True)
class OverlapPlan:
    """The overlap plan of one program. `print` shows its windows and the plans that were tried."""

    mode: str
    machine: str = ""
    chosen: str = "none"
    attempts: tuple[Attempt, ...] = ()  # the unchanged program first
    windows: tuple[OverlapWindow, ...] = ()

    @property
    def before(self) -> Attempt:
        """The unchanged program."""
        return self.attempts[0]

    @property
    def after(self) -> Attempt:
        """The plan that runs."""
        return next(one for one in self.attempts if one.name == self.chosen)

    @property
    def slower(self) -> bool:
        """True if the step takes longer than the unchanged program, by the timeline; never with "auto"."""
        return bool(self.attempts) and self.after.seconds > self.before.seconds

    def __str__(self) -> str:
        if not self.attempts:
            return "overlap: none; the order of the program is the compiler's to change"
        a, b = self.before, self.after
        lines = [
            f"overlap {self.mode!r} on {self.machine}: {self.chosen}{', slower than no plan' * self.slower}",
            f"  step    {seconds(a.seconds)} -> {seconds(b.seconds)}",
            f"  exposed {seconds(a.exposed)} -> {seconds(b.exposed)} of communication",
            f"  peak    {show_bytes(a.peak_bytes)} -> {show_bytes(b.peak_bytes)}",
            "tried",
        ]
        for one in self.attempts:
            note = f"  rejected: {one.rejected}" if one.rejected else ""
            figures = f"{seconds(one.seconds):>9}  {seconds(one.exposed):>9} exposed  {show_bytes(one.peak_bytes):>9}"
            lines.append(f"  {one.name:<24} {figures}{note}")
        longest = sorted(range(len(self.windows)), key=lambda i: -self.windows[i].seconds)[:SHOWN]
        lines += ["windows"] * bool(longest) + [f"  {i:>3}  {self.windows[i]}" for i in sorted(longest)]
        if len(self.windows) > SHOWN:
            lines.append(f"       and {len(self.windows) - SHOWN} shorter ones")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<overlap {self.mode}: {self.chosen}, {len(self.windows)} windows>"

    def _repr_html_(self) -> str:
        return titled(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; seconds and bytes of one device."""
        return {**asdict(self), "slower": self.slower}
