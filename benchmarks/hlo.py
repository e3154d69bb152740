"""Counts the dots and collectives of a compiled executable, from its optimized HLO text.

An instruction inside a loop counts once per trip (`known_trip_count`; nested loops multiply), inside a fusion or call
once per call, and inside a branch of a conditional once. If a loop with a dot or a collective has an unknown trip
count, an error is raised.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128}

COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}

HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*->.*\{\s*$")
ASSIGN = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
ONE_CALLEE = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
MANY_CALLEES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
MATMUL_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|dot)[^"]*"', re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Array:
    """The dtype and sizes of an array on one device."""

    dtype: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * BITS.get(self.dtype, 8) // 8


@dataclass(frozen=True, order=True)
class Dot:
    """A matrix product on one device; `contract` and `batch` are the dim numbers of (left, right)."""

    out: Array
    left: Array
    right: Array
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]

    def __str__(self) -> str:
        return f"{self.left} . {self.right} -> {self.out}"

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        """(dtype, batch, rows, contracted, columns) with rows <= columns, equal for a product and its transpose."""
        contracted = math.prod(self.left.sizes[d] for d in self.contract[0])
        batch = math.prod(self.left.sizes[d] for d in self.batch[0])
        rows = math.prod(self.left.sizes) // max(1, contracted * batch)
        columns = math.prod(self.right.sizes) // max(1, contracted * batch)
        return (self.out.dtype, batch, min(rows, columns), contracted, max(rows, columns))

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.out.sizes) * math.prod(self.left.sizes[d] for d in self.contract[0])


@dataclass(frozen=True, order=True)
class Collective:
    """A collective on one device; a combined one has several operands. `group` is the number of devices in a group."""

    kind: str
    operands: tuple[Array, ...]
    group: int
    bytes: int  # the larger of one device's operands and results

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.operands))}) over {self.group}: {self.bytes} bytes"


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str


def dots(compiled) -> Counter[Dot]:
    """The number of runs of each matrix product on one device. Convolutions are not counted."""
    counts: Counter[Dot] = Counter()
    for ins, shapes, count in _executed(_text(compiled)):
        if ins.opcode == "custom-call" and MATMUL_CALL.search(ins.attributes):
            raise ValueError(f"a custom call that may be a dot cannot be counted: {ins.attributes[:200]}")
        if ins.opcode != "dot":
            continue
        left, right = (shapes[name][0] for name in ins.operands)
        contract, batch = (_dim_numbers(ins.attributes, kind) for kind in ("contracting", "batch"))
        counts[Dot(ins.arrays[0], left, right, contract, batch)] += count
    return counts


def collectives(compiled) -> Counter[Collective]:
    """The number of runs of each collective on one device; an asynchronous start and done count as one."""
    counts: Counter[Collective] = Counter()
    for ins, shapes, count in _executed(_text(compiled)):
        kind = COLLECTIVES.get(ins.opcode.removesuffix("-start"))
        if kind is None:
            continue
        operands = tuple(sorted(array for name in ins.operands for array in shapes[name]))
        size = sum(array.bytes for array in operands)
        results = sum(array.bytes for array in ins.arrays)
        if ins.opcode.endswith("-start") and kind != "all_reduce":
            results -= size  # the result of a start contains the operands and the results
        counts[Collective(kind, operands, _group(ins.attributes), max(size, results))] += count
    return counts


def collective_bytes(compiled, kind: str | None = None) -> int:
    """Bytes of all collectives, or of those of one kind, per device and run."""
    return sum(c.bytes * n for c, n in collectives(compiled).items() if kind in (None, c.kind))


def flops(compiled) -> int:
    """Floating-point operations of the dots on one device, with loop trips counted."""
    return sum(dot.flops * n for dot, n in dots(compiled).items())


def memory(compiled) -> int:
    """Bytes per device: arguments + outputs + temporaries - outputs that alias an argument."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def summary(compiled) -> dict:
    """The figures of an executable, as a dict for `json.dumps`."""
    counts = collectives(compiled)
    kinds = sorted({c.kind for c in counts})
    return {
        "collectives": {kind: sum(n for c, n in counts.items() if c.kind == kind) for kind in kinds},
        "collective_bytes": {kind: collective_bytes(compiled, kind) for kind in kinds},
        "dots": dots(compiled).total(),
        "flops": flops(compiled),
        "memory_bytes": memory(compiled),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def difference(ours, theirs) -> dict:
    """The dots and collectives that only one of two executables runs; empty lists if the multisets are equal.

    Dots are compared by sizes (a product and its transpose are equal), collectives by kind, operands and group.
    """
    out = {}
    for name, read in (("dots", _dot_sizes), ("collectives", collectives)):
        a, b = read(ours), read(theirs)
        out[name] = {"only_first": _listed(a - b), "only_second": _listed(b - a)}
    return out


def _dot_sizes(compiled) -> Counter:
    sizes: Counter = Counter()
    for dot, n in dots(compiled).items():
        sizes[dot.sizes] += n
    return sizes


def _listed(counter: Counter) -> list[str]:
    return [f"{n} x {item}" for item, n in sorted(counter.items())]


def _text(compiled) -> str:
    return compiled if isinstance(compiled, str) else compiled.as_text()


def _executed(text: str) -> Iterator[tuple[_Instruction, dict[str, tuple[Array, ...]], int]]:
    """Yields each instruction, the shapes of its computation's values by name, and its number of runs."""
    computations, entry = _parse(text)
    runs: Counter[str] = Counter()
    unknown: set[str] = set()

    def walk(name: str, count: int, in_unknown_loop: bool) -> None:
        runs[name] += count
        if in_unknown_loop:
            unknown.add(name)
        for ins in computations[name]:
            callees = ONE_CALLEE.findall(ins.attributes)
            for group in MANY_CALLEES.findall(ins.attributes):
                callees += [callee.strip().lstrip("%") for callee in group.split(",")]
            trips = TRIPS.search(ins.attributes) if ins.opcode == "while" else None
            for callee in callees:
                if callee in computations:
                    times = count * int(trips.group(1)) if trips else count
                    walk(callee, times, in_unknown_loop or (ins.opcode == "while" and trips is None))

    walk(entry, 1, False)
    for name, count in runs.items():
        shapes = {ins.name: ins.arrays for ins in computations[name]}
        for ins in computations[name]:
            counted = ins.opcode == "dot" or ins.opcode.removesuffix("-start") in COLLECTIVES
            if name in unknown and counted:
                raise ValueError(f"{ins.opcode} {ins.name} is in a loop with an unknown trip count")
            yield ins, shapes, count


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = HEAD.match(line)
        if head and not ASSIGN.match(line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (assign := ASSIGN.match(line)):
            current.append(_instruction(assign.group(1), line[assign.end() :]))
    if not entry:
        raise ValueError("the text has no ENTRY computation: pass a compiled executable, not a lowered one")
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    """Parses `type opcode(operands), attributes`."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[end:].strip().partition("(")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[opening + 1 : closing]))
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in ARRAY.findall(rest[:end])
    )
    return _Instruction(name, opcode, arrays, operands, rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parenthesis: {text[:200]}")


def _dim_numbers(attributes: str, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contracting or batch dims of (left, right)."""

    def read(side: str) -> tuple[int, ...]:
        match = re.search(rf"\b{side}_{kind}_dims=\{{([\d,]*)\}}", attributes)
        return tuple(int(n) for n in match.group(1).split(",") if n) if match else ()

    return read("lhs"), read("rhs")


def _group(attributes: str) -> int:
    """The number of devices in a group, from any of the forms that XLA prints."""
    if match := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        return len(set(re.findall(r"\d+", match.group(1))))
    groups = attributes.partition("replica_groups=")[2]
    if match := re.match(r"\{\{([\d,]*)\}", groups):  # {{0,1},{2,3}}
        return len(match.group(1).split(","))
    if match := re.match(r"\[(\d+),(\d+)\]<=", groups):  # [groups,size]<=[...]
        return int(match.group(2))
    if match := re.match(r"mesh\[([^\]]*)\].*?\{([^}]*)\}", groups):  # mesh['a'=2,'b'=4] {'a','b':(1)2}
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match.group(1))}
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match.group(2))
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    raise ValueError(f"unknown form of a device group: {attributes[:200]}")


def main() -> None:
    """Prints the summary of an HLO text file: python -m benchmarks.hlo FILE"""
    import sys

    with open(sys.argv[1]) as file:
        text = file.read()
    report = {"dots": _listed(dots(text)), "collectives": _listed(collectives(text)), "flops": flops(text)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
