"""The result of `md.verify_jax`, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors.tables import grouped, line_of, table
from ...errors.units import seconds, show_bytes
from .constraints import Constraint
from .findings import Finding
from .price import Sent


@dataclass(frozen=True)
class JaxReport:
    """The result of `md.verify_jax`: where a program differs from one device, and what each device sends.

    `print` shows both.

    `findings` are the places where it differs, the likeliest cause first; `undecided` the results that nothing
    decides, with the reason: they are never called right. `collectives` are what each device sends,
    `constraints` the shardings that the program asks for under `jax.jit`, `results` the paths of the function's
    results, `mesh` its axes, and `notes` what else is worth knowing.

    >>> import jax
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> import meshdsl as md
    >>> mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    >>> step = jax.shard_map(lambda x: jax.lax.psum(x, "rows"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    >>> report = md.verify_jax(step, jax.ShapeDtypeStruct((8,), "float32"))
    >>> report.ok, report.bytes, report.findings[0].fix
    (False, 32, "no sum over 'rows', or a pmean")
    """

    findings: tuple[Finding, ...]
    undecided: Mapping[str, str]
    collectives: tuple[Sent, ...]
    results: tuple[str, ...]
    mesh: Mapping[str, int]
    notes: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every result is that of one device."""
        return not self.findings and not self.undecided

    @property
    def bytes(self) -> int:
        """Bytes of all collectives on one device, trips counted."""
        return sum(one.bytes * one.trips for one in self.collectives)

    def __str__(self) -> str:
        mesh, many = " ".join(f"{a}:{n}" for a, n in self.mesh.items()), len(self.results)
        verdict = "wrong" if self.findings else "undecided" if self.undecided else "right"
        head = f"{verdict} on {mesh}:" if mesh else "right, as the compiler divides the work:"
        if self.ok:
            head += (" the result is" if many == 1 else f" all {many} results are") + " what one device computes"
        lines = [head, *(f"  {one}" for one in self.findings)]
        for why in dict.fromkeys(self.undecided.values()):
            own = [name for name, other in self.undecided.items() if other == why]
            shown = ", ".join(own if len(own) < 5 else [*own[:3], f"... ({len(own)} of {many} results)"])
            lines.append(f"  undecided: {shown}: {why}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += ["shardings that it asks for:", *(f"  {one}" for one in self.constraints)] if self.constraints else []
        return "\n".join([*lines, *self._sent()])

    def _sent(self) -> list[str]:
        if not self.collectives:
            return ["no collective"] if self.mesh else []

        def key(one: Sent) -> tuple[Any, ...]:
            return one.where, one.kind, one.axes, " ".join(d or "." for d in one.dims), one.trips, one.unbounded

        rows = grouped(self.collectives, key)
        shown = [
            [line_of(where), kind, " ".join(axes), dims, f"{trips:,}" + ("+" if unbounded else ""),
             show_bytes(sum(c.bytes for c in own)), _time(own)]
            for (where, kind, axes, dims, trips, unbounded), own in rows.items()
        ]  # fmt: skip
        head = ["line", "collective", "over", "of", "trips", "bytes", "time"]
        return [f"each device sends {show_bytes(self.bytes)}:", table(head, shown, "<<<<>>>")]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": self.ok, "findings": [one.to_dict() for one in self.findings], "undecided": dict(self.undecided),
            "notes": list(self.notes), "mesh": dict(self.mesh), "results": list(self.results), "bytes": self.bytes,
            "constraints": [one.to_dict() for one in self.constraints],
            "collectives": [one.to_dict() for one in self.collectives],
        }  # fmt: skip


def _time(own: list[Sent]) -> str:
    return "" if own[0].seconds is None else seconds(sum(one.seconds or 0.0 for one in own))
