"""Check the ledger against the emitted StableHLO: the kind, groups, dtype, bytes and count of every collective.

The two sides are read independently: one from the program, the other from the StableHLO text that JAX lowers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ...lowering import Program
from .stablehlo import HloCollective, read, stated


@dataclass(frozen=True)
class Compared:
    """One collective, with its count per device as the program states it and as the text contains it."""

    collective: HloCollective
    stated: int
    emitted: int

    def __str__(self) -> str:
        if self.stated == self.emitted:
            return f"{self.stated} x {self.collective}"
        return f"stated {self.stated} times, emitted {self.emitted}: {self.collective}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        groups = [list(group) for group in self.collective.groups]
        return {**vars(self.collective), "groups": groups, "stated": self.stated, "emitted": self.emitted}


@dataclass(frozen=True)
class Verification:
    """The collectives of a program beside those of its StableHLO text; `print(verification)` shows the differences.

    `md.verify` returns it. An example with a text that sends something else:

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> specs = md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")
    >>> text = step.lower(*specs).as_text().replace("stablehlo.add", "stablehlo.maximum")
    >>> verification = md.verify(text, step.program(*specs))
    >>> verification.equal, verification.count, verification.bytes
    (False, 1, 1024)
    >>> print(verification)
    the program and its StableHLO differ:
      stated 0 times, emitted 1: all_reduce max float32 1024 bytes among (0, 1, 2, 3)
      stated 1 times, emitted 0: all_reduce sum float32 1024 bytes among (0, 1, 2, 3)
    """

    matched: tuple[Compared, ...]
    mismatched: tuple[Compared, ...]

    @property
    def equal(self) -> bool:
        """True if both sides agree on every collective."""
        return not self.mismatched

    @property
    def count(self) -> int:
        """Number of collectives that the program states, loop trips counted."""
        return sum(entry.stated for entry in (*self.matched, *self.mismatched))

    @property
    def bytes(self) -> int:
        """Total bytes of those collectives, on one device."""
        return sum(entry.stated * entry.collective.bytes for entry in (*self.matched, *self.mismatched))

    def __str__(self) -> str:
        if self.equal:
            many = "collective" if self.count == 1 else "collectives"
            return f"{self.count} {many} of {self.bytes:,} bytes: the program states what is emitted"
        return "\n".join(["the program and its StableHLO differ:", *(f"  {entry}" for entry in self.mismatched)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "equal": self.equal,
            "count": self.count,
            "bytes": self.bytes,
            "matched": [entry.to_dict() for entry in self.matched],
            "mismatched": [entry.to_dict() for entry in self.mismatched],
        }


def _padded(collective: HloCollective) -> HloCollective:
    return replace(collective, kind=collective.kind.removeprefix("ragged_"))


def verify(text: str, program: Program) -> Verification:
    """Compare a program's stated collectives with those of its lowered text; collectives of 0 bytes don't count.

    >>> import meshdsl as md
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:4", "io:rows")
    >>> specs = md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")
    >>> print(verify(step.lower(*specs).as_text(), step.program(*specs)))
    1 collective of 1,024 bytes: the program states what is emitted

    Raises `InternalError` for a collective of the text that meshdsl cannot read.
    """
    ours: Counter[HloCollective] = stated(program)
    theirs = Counter({collective: n for collective, n in read(text).items() if collective.bytes and n})
    if not any(one.kind == "ragged_all_to_all" for one in theirs):  # on CPU devices, which send every slot
        ours = Counter({_padded(collective): n for collective, n in ours.items()})
    both = [Compared(collective, ours[collective], theirs[collective]) for collective in sorted({*ours, *theirs})]
    same = tuple(collective for collective in both if collective.stated == collective.emitted)
    return Verification(same, tuple(collective for collective in both if collective.stated != collective.emitted))
