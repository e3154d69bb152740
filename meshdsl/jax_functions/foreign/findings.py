"""Where a program first leaves what one device computes: from a wrong result back to steps whose operands are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ...errors import NOWHERE, Where
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
        name = self.primitive.removesuffix("_invariant")  # JAX's name of a psum under check_vma=True
        return f"{self.where}{_callers(self.lines)} {name}: {self.what}{since}{fix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "what": self.what, "lines": list(map(str, self.lines)), "primitive": self.primitive,
            "axes": list(self.axes), "since": list(map(str, self.since_lines)), "fix": self.fix,
        }  # fmt: skip


def _called(lines: Sequence[Where], beside: Where) -> str:
    return f"{_near(lines[0], beside)}{_callers(lines)}"


def _callers(lines: Sequence[Where]) -> str:
    """The line that called the function, as text; empty if the call is in another file."""
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

    def differing(
        self, results: Sequence[Blocks], wanted: Sequence[Blocks], slack: Sequence[float] = ()
    ) -> list[Blocks]:
        """The results that are not the wanted ones, up to `slack`, or not on every device, and collectives that some
        devices never reach."""
        wrong = self.split_wrongly()
        for i, (result, one) in enumerate(zip(results, wanted, strict=True)):
            x, y = map(_numbers, (result, one))
            if not close(x, y, self.reference.tolerance, slack[i] if slack else 0.0):
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
            equal = [i for i, axis in enumerate(v.mesh) if axis not in taken and axis not in out.mesh]
            if isinstance(v.array, np.ndarray):
                grid = v.array.reshape(*v.mesh.values(), *v.shape)
                firsts = (np.broadcast_to(np.take(grid, [0], i), grid.shape) for i in equal)
                wrong += [] if all(close(grid, first, self.reference.tolerance) for first in firsts) else [out]
        return wrong

    def findings(self, wrong: Iterable[Blocks]) -> list[Finding]:
        """The findings behind these values, those that most likely are the cause first."""
        steps = self.back(wrong, self.is_right)
        front = [step for step in steps if all(map(self.is_right, step.ins))]
        passed = [step for step in steps if step not in front and step.is_collective]
        made = sorted((step for step in front if not _is_exit(step)), key=self.is_by_place)
        found = list(map(self.of_stuck, self.run.stuck))
        for step in made:
            found.append(replace(self.of_step(step), is_sure=False) if self.is_by_place(step) else self.of_step(step))
        found += [self.of_exit(step) for step in front if _is_exit(step)]
        if not any(one.is_sure for one in found):
            brought = self.back((v for step in front for v in step.ins), lambda v: False)
            passed += [step for step in brought if step.primitive == "ppermute"]
            found = [self.of_passed(step) for step in passed] + found
        return list({(one.where, one.primitive): one for one in reversed(found)}.values())[::-1]

    def back(self, values: Iterable[Blocks], stops: Callable[[Blocks], bool]) -> list[Executed]:
        """The steps that made these values, and what went into them, not past a value that stops; in their order."""
        todo, found = list(values), dict[Executed, None]()
        while todo:
            step = todo.pop().maker
            if step is not None and step not in found:
                found[step] = None
                todo += [v for v in step.ins if not stops(v)]
        return sorted(found, key=lambda step: self.order[step])

    def is_by_place(self, step: Executed) -> bool:
        """True where a value differs from device to device by design: by `axis_index`, or as an integer constant."""
        arrays = [v for v in step.ins if not v.is_literal]
        if step.primitive == "axis_index" or (not arrays and step.outs[0].array.dtype.kind not in "fc"):
            return True
        parts = [v for v in arrays if not self.is_whole(v)]
        return any(maker.primitive == "axis_index" for maker in self.back(parts, self.is_whole))

    def since(self, value: Blocks) -> tuple[Where, ...]:
        """The line that first made a value partial, or scaled it, and its callers."""
        steps = [] if self.is_whole(value) else self.back([value], self.is_whole)
        return next((step.lines for step in steps if all(map(self.is_whole, step.ins))), ())

    def of_exit(self, step: Executed) -> Finding:
        """What is wrong with a right value that `out_specs` joins wrongly."""
        (v,), found = step.ins, self.known_of(step.ins[0])
        taken = {a for own in split_over(step.spec, len(v.shape)) for a in own}
        axes = tuple(a for a in v.mesh if a not in step.outs[0].mesh)
        wrong = tuple(a for a in axes if (a in taken) != isinstance(found.over[a], int)) or axes
        partial = [a for a in wrong if found.over[a] in (PARTIAL, EXTREME)]
        what = f"a result of shard_map is {self.text(v)}, but its out_specs is {step.spec}"
        fix = f"{_sum(found, partial)} before it is returned" if partial else "change out_specs, or move the blocks"
        return Finding(what, v.maker.lines if v.maker else step.lines, "shard_map", wrong, self.since(v), fix)

    def of_stuck(self, step: Executed) -> Finding:
        axes = axes_of(step.eqn)
        what = f"some devices of a group over {_shown(axes)} never reach it, so the others wait forever"
        return Finding(what, step.lines, step.primitive, axes, (), "take the branch, or the trip, on all of them")

    def of_passed(self, step: Executed) -> Finding:
        axes = axes_of(step.eqn)
        what = f"what it brings over {_shown(axes)} is nothing that one device computes, or in a wrong order"
        return Finding(what, step.lines, step.primitive, axes, is_sure=False)

    def of_step(self, step: Executed) -> Finding:
        """What is wrong at a step whose operands are right and whose result is not."""
        operands = [v for v in step.ins if not v.is_literal]
        if step.is_collective:
            return self.of_collective(step, step.ins[0])
        for v in operands:
            if self.known_of(v).partial:
                return self.of_partial(step, v, operands)
        out = next((v for v in step.outs if not self.is_right(v)), step.outs[0])
        shown = "; ".join(dict.fromkeys(map(self.text, operands))) or "none"
        if (result := self.sharding(out)) is not None:
            axes = next(((a,) for a, n in out.mesh.items() if result.scale in (n, 1 / n)), ())
            what = f"the result is {result.scale:g} times what one device computes"
            return Finding(what, step.lines, step.primitive, axes, (), "divide or multiply by the size of the whole")
        for axis in out.mesh:
            if len({self.known_of(v).over.get(axis, REPLICATED) for v in operands} - {REPLICATED}) > 1:
                what = f"operands lie differently over {axis!r}: {shown}"
                return Finding(what, step.lines, step.primitive, (axis,), (), "move one of them first")
        what = f"no sharding of what one device computes is the result (operands: {shown})"
        return Finding(what, step.lines, step.primitive, is_sure=False)

    def of_partial(self, step: Executed, v: Blocks, operands: Sequence[Blocks]) -> Finding:
        found, since = self.known_of(v), self.since(v)
        axes, kind = found.partial, "maximum" if EXTREME in found.over.values() else "mean" if found.is_mean else "sum"
        whole = any(not set(self.known_of(w).partial) & set(axes) for w in operands) or len(operands) < len(step.ins)
        if step.primitive in ("add", "add_any", "sub") and whole:
            what = (
                f"adds a value that is whole to a partial {kind} over {_shown(axes)}, which counts it on every device"
            )
        else:
            what = f"an operand is a partial {kind} over {_shown(axes)}"
        return Finding(
            what, step.lines, step.primitive, axes, since, f"{_sum(found, axes)} {_between(since, step.lines)}"
        )

    def of_collective(self, step: Executed, v: Blocks) -> Finding:
        axes, found, since = axes_of(step.eqn), self.known_of(v), self.since(v)
        equal = tuple(a for a in axes if found.over.get(a) == REPLICATED)
        if step.primitive in SUMS and equal:
            times = math.prod(v.mesh[a] for a in equal)
            what = f"adds over {_shown(equal)} values that are equal there: the result is {times} times too large"
            return Finding(what, step.lines, step.primitive, equal, since, f"no sum over {_shown(equal)}, or a pmean")
        if step.primitive in SUMS and found.is_mean:
            what = f"adds the means of parts over {_shown(axes)}: the result is {found.scale:g} times too large"
            return Finding(what, step.lines, step.primitive, axes, since, f"pmean over {_shown(axes)}")
        what = f"over {_shown(axes)} of a value that is {self.text(v)} gives nothing that one device computes"
        fix = "psum" if any(found.over.get(a) == PARTIAL for a in axes) else ""
        return Finding(what, step.lines, step.primitive, axes, since, fix)

    def known_of(self, value: Blocks) -> Explanation:
        """The sharding of a right value."""
        found = self.sharding(value)
        assert found is not None
        return found

    def text(self, value: Blocks) -> str:
        found, step = self.sharding(value), value.maker
        own: tuple[str, ...] = ()
        if step is not None and len(step.outs) == len(step.eqn.outvars):
            own = self.names.get(step.eqn.outvars[step.outs.index(value)], ())
        return "nothing that one device computes" if found is None else found.text(own)


def _sum(found: Explanation, axes: Sequence[str]) -> str:
    kind = "pmax" if any(found.over[a] == EXTREME for a in axes) else "pmean" if found.is_mean else "psum"
    return f"{kind} over {_shown(axes)}"


def _shown(axes: Iterable[str]) -> str:
    return ", ".join(map(repr, axes))


def _between(since: Sequence[Where], lines: Sequence[Where]) -> str:
    """The lines between which something is missing: those of one function, where both have one."""
    pairs = [(a, b) for a in since for b in lines if a.file == b.file and a.line < b.line]
    return f"between lines {pairs[0][0].line} and {pairs[0][1].line}" if pairs else "before it"


def _numbers(value: Blocks) -> Any:
    """The array of a value of no mesh; of keys, their bits."""
    return value.array[0] if isinstance(value.array, np.ndarray) else np.asarray(jax.random.key_data(value.array)[0])


def _is_exit(step: Executed) -> bool:
    return step.primitive == "shard_map" and len(step.ins[0].mesh) > len(step.outs[0].mesh)
