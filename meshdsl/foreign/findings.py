"""Where a program first leaves what one device computes: from a wrong result back to steps whose operands are right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..errors import NOWHERE, Where
from .collectives import SUMS, Array, axes_of, split_over
from .explain import EXTREME, PARTIAL, REPLICATED, Explanation, Reference, close
from .simulate import Blocks, Executed, Run


@dataclass(frozen=True)
class Finding:
    """One place where a program does not compute what one device does.

    `where` is the line, `since` the line that made the operand a partial sum, or scaled it; `lines` and `since_lines`
    have their callers too, innermost first. `axes` are the mesh axes concerned, and `fix` is one way out.
    """

    what: str
    lines: tuple[Where, ...]
    primitive: str
    axes: tuple[str, ...] = ()
    since_lines: tuple[Where, ...] = ()
    fix: str = ""
    is_sure: bool = True  # else the values there are wrong, or right in an order that only this program knows

    @property
    def where(self) -> Where:
        return self.lines[0] if self.lines else NOWHERE

    @property
    def since(self) -> Where | None:
        return self.since_lines[0] if self.since_lines and self.since_lines != self.lines else None

    def __str__(self) -> str:
        since = "" if self.since is None else f", since {_called(self.since_lines, self.where)}"
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.where}{_callers(self.lines)} {self.primitive}: {self.what}{since}{fix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "what": self.what, "lines": list(map(str, self.lines)), "primitive": self.primitive,
            "axes": list(self.axes), "since": list(map(str, self.since_lines)), "fix": self.fix,
        }  # fmt: skip


def _called(lines: Sequence[Where], beside: Where) -> str:
    return f"{_near(lines[0], beside)}{_callers(lines)}"


def _callers(lines: Sequence[Where]) -> str:
    """Where a line's function was called, if that is in the same file: elsewhere a caller is of no help."""
    others = [line for line in lines[1:2] if line.file == lines[0].file and line != lines[0]]
    return f" (called at line {others[0].line})" if others else ""


def _near(line: Where, other: Where) -> str:
    return f"line {line.line}" if line.file == other.file else str(line)


class Search:
    """The findings of one run beside a reference."""

    def __init__(self, run: Run, reference: Reference, names: dict[Any, tuple[str, ...]]) -> None:
        self.run, self.reference, self.names = run, reference, names
        self.order = {step: i for i, step in enumerate(run.steps)}
        self.known = dict[Blocks, Explanation | None]()

    def sharding(self, value: Blocks) -> Explanation | None:
        if value not in self.known:
            self.known[value] = self.reference.explained(value)
        return self.known[value]

    def is_right(self, value: Blocks) -> bool:
        found = self.sharding(value)
        return found is not None and found.is_right

    def is_whole(self, value: Blocks) -> bool:
        found = self.sharding(value)
        return found is not None and found.is_right and not found.partial

    def differing(self, results: Sequence[Blocks], wanted: Sequence[Blocks]) -> list[Blocks]:
        """The results that are not the wanted ones, or not on every device, and collectives that some never reach."""
        wrong = self.split_wrongly()
        for result, one in zip(results, wanted, strict=True):
            x, y = (
                v.array[0] if isinstance(v.array, np.ndarray) else jax.random.key_data(v.array) for v in (result, one)
            )
            if not close(x, y, self.reference.tolerance):
                self.expect(result, y)
                wrong.append(result)
        return wrong + [step.outs[0] for step in self.run.stuck]

    def expect(self, result: Blocks, wanted: Array) -> None:
        """A wrong result: that it equals another value of the reference explains nothing."""
        self.known[result] = None
        while result.maker is not None and _is_exit(result.maker):
            (result,) = result.maker.ins
            self.known[result] = self.reference.explained(result, wanted)

    def split_wrongly(self) -> list[Blocks]:
        """Results of `shard_map` that `out_specs` calls equal on devices where they differ."""
        wrong = list[Blocks]()
        for step in self.run.steps:
            if not _is_exit(step):
                continue
            (v,), (out,) = step.ins, step.outs
            taken = {a for own in split_over(step.spec, len(v.shape)) for a in own}
            grid = np.asarray(v.array).reshape(*v.mesh.values(), *v.shape) if isinstance(v.array, np.ndarray) else None
            for i, axis in enumerate(v.mesh):
                if grid is None or axis in taken or axis in out.mesh:
                    continue
                first = np.broadcast_to(np.take(grid, [0], i), grid.shape)
                if not close(grid, first, self.reference.tolerance):
                    wrong.append(out)
                    break
        return wrong

    def findings(self, wrong: Iterable[Blocks]) -> list[Finding]:
        """The findings behind these values, those that most likely are the cause first."""
        stuck = [self.of_stuck(step) for step in self.run.stuck]
        front, joined, passed = self.front(wrong)
        by_place = {step: self.is_by_place(step) for step in front}
        front.sort(key=lambda step: (by_place[step], self.order[step]))
        found = [replace(self.of_step(step), is_sure=False) if by_place[step] else self.of_step(step) for step in front]
        found = stuck + found + [self.of_exit(step) for step in joined]
        if not any(one.is_sure for one in found):
            found = [self.of_passed(step) for step in [*passed, *self.turning(front)]] + found
        kept = dict[tuple[Where, str], Finding]()
        for one in found:
            kept.setdefault((one.where, one.primitive), one)
        return list(kept.values())

    def front(self, wrong: Iterable[Blocks]) -> tuple[list[Executed], list[Executed], list[Executed]]:
        """The steps that made a wrong value of right ones, the right values that `out_specs` joins wrongly, and the
        collectives that wrong values passed through."""
        todo, seen, front, joined, passed = (
            list(wrong),
            set[Blocks](),
            list[Executed](),
            list[Executed](),
            list[Executed](),
        )
        while todo:
            value = todo.pop()
            if value in seen or value.maker is None:
                continue
            seen.add(value)
            step = value.maker
            behind = [v for v in step.ins if not self.is_right(v)]
            if behind:
                todo += behind
                passed += [step] if step.is_collective else []
            elif _is_exit(step):
                joined.append(step)
            else:
                front.append(step)
        passed.sort(key=lambda step: self.order[step])
        return list(dict.fromkeys(front)), list(dict.fromkeys(joined)), list(dict.fromkeys(passed))

    def turning(self, front: Iterable[Executed]) -> list[Executed]:
        """The permutes that brought the operands of these steps."""
        todo, seen, found = [v for step in front for v in step.ins], set[Blocks](), list[Executed]()
        while todo:
            v = todo.pop()
            if v in seen or v.maker is None:
                continue
            seen.add(v)
            if v.maker.name == "ppermute":
                found.append(v.maker)
            todo += v.maker.ins
        return sorted(found, key=lambda step: self.order[step])

    def is_by_place(self, step: Executed) -> bool:
        """True where a value differs from device to device by design: by `axis_index`, or as an integer constant."""
        if step.name == "axis_index":
            return True
        arrays = [v for v in step.ins if not v.is_literal]
        if not arrays and step.outs[0].array.dtype.kind not in "fc":
            return True
        return any(maker.name == "axis_index" for v in arrays for maker in self.behind(v))

    def behind(self, value: Blocks) -> list[Executed]:
        """The steps through which a value is not whole, back to those whose operands all are."""
        todo, seen, found = [value], set[Blocks](), list[Executed]()
        while todo:
            v = todo.pop()
            if v in seen or v.maker is None or self.is_whole(v):
                continue
            seen.add(v)
            found.append(v.maker)
            todo += v.maker.ins
        return found

    def since(self, value: Blocks) -> tuple[Where, ...]:
        """The line that first made a value partial, or scaled it, and its callers."""
        steps = [step for step in self.behind(value) if all(self.is_whole(v) for v in step.ins)]
        return min(steps, key=lambda step: self.order[step]).lines if steps else ()

    def of_exit(self, step: Executed) -> Finding:
        (v,) = step.ins
        found = self.sharding(v)
        assert found is not None
        taken = {a for own in split_over(step.spec, len(v.shape)) for a in own}
        axes = tuple(a for a in v.mesh if a not in step.outs[0].mesh)
        wrong = tuple(a for a in axes if (a in taken) != isinstance(found.over[a], int)) or axes
        since, partial = self.since(v), [a for a in wrong if found.over[a] in (PARTIAL, EXTREME)]
        what = f"a result of shard_map is {self.text(v)}, but its out_specs is {step.spec}"
        fix = (
            f"{_sum(found, partial)} before it is returned" if partial else "change out_specs, or move the blocks first"
        )
        at = v.maker.lines if v.maker else step.lines
        return Finding(what, at, "shard_map", wrong, since, fix)

    def of_stuck(self, step: Executed) -> Finding:
        axes = axes_of(step.eqn)
        what = f"some devices of a group over {', '.join(map(repr, axes))} never reach it, so the others wait forever"
        return Finding(what, step.lines, step.name, axes, (), "take the branch, or the trip, on all of them")

    def of_passed(self, step: Executed) -> Finding:
        axes = axes_of(step.eqn)
        what = (
            f"what it brings over {', '.join(map(repr, axes))} is nothing that one device computes, or wrongly ordered"
        )
        return Finding(what, step.lines, step.name, axes, is_sure=False)

    def text(self, value: Blocks) -> str:
        found, step = self.sharding(value), value.maker
        own: tuple[str, ...] = ()
        if step is not None and len(step.outs) == len(step.eqn.outvars):
            own = self.names.get(step.eqn.outvars[step.outs.index(value)], ())
        return "nothing that one device computes" if found is None else found.text(own)

    def of_step(self, step: Executed) -> Finding:
        """What is wrong at a step whose operands are right and whose result is not."""
        operands = [v for v in step.ins if not v.is_literal]
        known = [found for v in operands if (found := self.sharding(v)) is not None]
        out = next((v for v in step.outs if not self.is_right(v)), step.outs[0])
        result = self.sharding(out)
        if step.is_collective:
            return self.of_collective(step, operands, known, result)
        partial = [(v, found) for v, found in zip(operands, known, strict=True) if found.partial]
        if partial:
            (v, found), axes = partial[0], partial[0][1].partial
            whole = [w for w, own in zip(operands, known, strict=True) if not set(own.partial) & set(axes)]
            over, since = ", ".join(map(repr, axes)), self.since(v)
            kind = "maximum" if EXTREME in found.over.values() else "mean" if found.is_mean else "sum"
            fix = f"{_sum(found, axes)} {_between(since, step.lines)}"
            if step.name in ("add", "add_any", "sub") and (whole or len(operands) < len(step.ins)):
                what = f"adds a value that is whole to a partial {kind} over {over}, which counts it on every device"
                return Finding(what, step.lines, step.name, axes, since, fix)
            return Finding(f"an operand is a partial {kind} over {over}", step.lines, step.name, axes, since, fix)
        if result is not None:
            axes = _explaining(result.scale, out.mesh)
            what = f"the result is {result.scale:g} times what one device computes"
            return Finding(what, step.lines, step.name, axes, (), "divide or multiply by the size of the whole")
        for axis in out.mesh:
            split = {found.over.get(axis, REPLICATED) for found in known} - {REPLICATED}
            if len(split) > 1:
                shown = "; ".join(self.text(v) for v in operands)
                what = f"operands lie differently over {axis!r}: {shown}"
                return Finding(what, step.lines, step.name, (axis,), (), "move one of them first")
        shown = "; ".join(dict.fromkeys(self.text(v) for v in operands)) or "none"
        what = f"no sharding of what one device computes is the result (operands: {shown})"
        return Finding(what, step.lines, step.name, is_sure=False)

    def of_collective(
        self, step: Executed, operands: Sequence[Blocks], known: Sequence[Explanation], result: Explanation | None
    ) -> Finding:
        axes, (v, found) = axes_of(step.eqn), (operands[0], known[0]) if operands else (step.ins[0], None)
        shown = ", ".join(map(repr, axes))
        if found is None or step.name not in SUMS | {"pmax", "pmin"}:
            what = f"over {shown} of a value that is {self.text(v)} gives no sharding of what one device computes"
            return Finding(what, step.lines, step.name, axes, self.since(v))
        equal = [a for a in axes if found.over.get(a) == REPLICATED]
        if step.name in SUMS and equal:
            over = ", ".join(map(repr, equal))
            times = math.prod(v.mesh[a] for a in equal)
            what = f"adds over {over} values that are equal there: the result is {times:g} times too large"
            return Finding(what, step.lines, step.name, tuple(equal), self.since(v), f"no sum over {over}, or a pmean")
        if found.is_mean and step.name in SUMS:
            what = f"adds the means of parts over {shown}: the result is {found.scale:g} times too large"
            return Finding(what, step.lines, step.name, axes, self.since(v), f"pmean over {shown}")
        what = f"over {shown} of a value that is {self.text(v)}"
        return Finding(what, step.lines, step.name, axes, self.since(v), _move(found, axes))


def _move(found: Explanation, axes: Sequence[str]) -> str:
    if any(found.over.get(a) == PARTIAL for a in axes):
        return "psum"
    return "all_gather" if any(isinstance(found.over.get(a), int) for a in axes) else ""


def _sum(found: Explanation, axes: Sequence[str]) -> str:
    kind = "pmax" if any(found.over[a] == EXTREME for a in axes) else "pmean" if found.is_mean else "psum"
    return f"{kind} over {', '.join(map(repr, axes))}"


def _between(since: Sequence[Where], lines: Sequence[Where]) -> str:
    """The lines between which something is missing: those of one function, where both have one."""
    pairs = [(a, b) for a in since for b in lines if a.file == b.file and a.line < b.line]
    return f"between lines {pairs[0][0].line} and {pairs[0][1].line}" if pairs else "before it"


def _explaining(scale: float, mesh: Any) -> tuple[str, ...]:
    """The mesh axis whose size is the scale, if there is one."""
    return next(((a,) for a, n in mesh.items() if scale in (n, 1 / n)), ())


def _is_exit(step: Executed) -> bool:
    return step.name == "shard_map" and len(step.ins[0].mesh) > len(step.outs[0].mesh)
