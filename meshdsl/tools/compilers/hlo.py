"""Read the collectives of a compiled program from the compiler's text (scheduled HLO).

A collective in a loop counts once per trip if the loop's condition compares its counter with a constant. An
asynchronous pair counts once, at its start. Sizes are those of the text, without the padding of its layouts. Of
several slices, the text has collectives inside each, and sends to the runtime that exchanges between slices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InternalError

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
}
TYPES = {"pred": "bool", "bf16": "bfloat16"} | {f"c{n}": f"complex{n}" for n in (64, 128)}
TYPES |= {f"{letter}{n}": f"{word}{n}" for letter, word in (("s", "int"), ("u", "uint")) for n in (2, 4, 8, 16, 32, 64)}
TYPES |= {f"f{n}": f"float{n}" for n in (16, 32, 64)}
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
CROSSING = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Performed:
    """One collective of the compiled program, and how often one device runs it."""

    kind: str
    groups: tuple[tuple[int, ...], ...]  # device numbers; for a permute, pairs (from, to); between slices, none
    dtype: str  # for several arrays sent as one, their names joined by "+"
    bytes: int  # the larger of one device's operands and results
    arrays: int  # number of arrays sent as one
    asynchronous: bool
    count: int
    bounded: bool  # trip counts of all enclosing loops are known; an unknown one counts as 1

    def __str__(self) -> str:
        how = " asynchronous" if self.asynchronous else ""
        where = f"in {len(self.groups)} groups" if self.groups else "between slices"
        many = f" of {self.arrays} arrays" if self.arrays > 1 else ""
        return f"{self.count} x{how} {self.kind}{many} {self.dtype} {self.bytes} bytes {where}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "groups": [list(group) for group in self.groups]}


@dataclass(frozen=True)
class Instruction:
    """One instruction line of the text."""

    name: str
    opcode: str
    type: str
    args: str  # text between the parentheses
    attributes: str  # text after the operands

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.args))


def performed(text: str) -> tuple[Performed, ...]:
    """The collectives of a compiled module, in its order.

    >>> performed("ENTRY %main (p: f32[4]) -> f32[8] {\\n  %p = f32[4] parameter(0)\\n"
    ...           "  ROOT %g = f32[8] all-gather(%p), replica_groups={{0,1}}, dimensions={0}\\n}")[0].bytes
    32

    Raises `InternalError` for a text without an entry, and for a collective whose groups it cannot read.
    """
    bodies, entry = bodies_of(text)
    if not entry:
        raise InternalError("the compiled text has no ENTRY computation, so its collectives cannot be read")
    return tuple(_performed(bodies, entry, _Caller()))


def estimated_cycles(text: str) -> int | None:
    """The sum of the TPU compiler's estimates for every instruction that one device runs, without communication.

    >>> estimated_cycles("ENTRY %main (p: f32[4]) -> f32[4] {\\n  %p = f32[4] parameter(0)\\n"
    ...                  '  ROOT %f = f32[4] fusion(%p), backend_config={"estimated_cycles":"128"}\\n}')
    128

    The body of a loop counts once per trip. Of a conditional, a device runs one branch: the longest counts. None if the
    trips of a loop with estimates are unknown. Raises `InternalError` for a text without an entry.
    """
    bodies, entry = bodies_of(text)
    if not entry:
        raise InternalError("the compiled text has no ENTRY computation, so its cycles cannot be read")
    return _cycles(bodies, entry)


def _cycles(bodies: dict[str, list[Instruction]], name: str) -> int | None:
    total = 0
    for one in bodies[name]:
        if stated := CYCLES.search(one.attributes):  # of a fusion as a whole
            total += int(stated[1])
            continue
        trips = _trips(bodies, one) if one.opcode == "while" else 1
        inside = [_cycles(bodies, callee) for callee in called(one) if callee in bodies]
        if None in inside or (any(inside) and trips is None):
            return None
        combine = max if one.opcode == "conditional" else sum
        total += combine([n for n in inside if n is not None] or [0]) * (trips or 0)
    return total


def bodies_of(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation by name, in order, and the name of the entry computation."""
    bodies: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            body = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif match := LINE.match(line):
            body.append(_instruction(match[1], match[2]))
    return bodies, entry


def _instruction(name: str, code: str) -> Instruction:
    end = _close(code, 0, " ")  # the type may be a tuple and contain spaces
    opcode = re.match(r"\s*([\w\-]+)\(", code[end:])
    if opcode is None:
        return Instruction(name, "", code, "", "")
    start = end + opcode.end()
    stop = _close(code, start, ")")
    return Instruction(name, opcode[1], code[:end], code[start:stop], code[stop + 1 :])


def _close(code: str, start: int, last: str) -> int:
    """The index of the first `last` outside brackets."""
    depth = 0
    for i in range(start, len(code)):
        if depth == 0 and code[i] == last:
            return i
        depth += (code[i] in "({[") - (code[i] in ")}]")
    return len(code)


@dataclass(frozen=True)
class _Caller:
    """How often a computation runs, and whether its collectives start apart: from the instructions that call it."""

    trips: int = 1  # of all loops around it
    bounded: bool = True  # False if the trips of one of them are unknown
    scattered: bool = False  # inside a fusion of all-reduces with slices
    started: bool = False  # by an instruction that does not wait for it

    def of(self, bodies: dict[str, list[Instruction]], instruction: Instruction, callee: str) -> _Caller:
        """The same for a computation that an instruction calls."""
        trips = _trips(bodies, instruction) if instruction.opcode == "while" else 1
        return _Caller(
            self.trips * (1 if trips is None else trips),
            self.bounded and trips is not None,
            self.scattered or "all-reduce-scatter" in callee,  # the TPU compiler's name
            self.started or instruction.opcode.endswith("-start"),
        )


def _performed(bodies: dict[str, list[Instruction]], name: str, caller: _Caller) -> Iterator[Performed]:
    types = {instruction.name: instruction.type for instruction in bodies[name]}
    # the TPU compiler repeats a collective in every kernel that it overlaps; count it in the kernel that starts it
    starts = any("AsyncCollectiveStart" in instruction.attributes for instruction in bodies[name])
    for instruction in bodies[name]:
        kind = KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind is not None:
            if "chain_id=" not in instruction.attributes or starts:
                kind = "reduce_scatter" if caller.scattered else kind
                yield _collective(kind, instruction, types, caller, starts)
            continue
        if instruction.opcode == "send" and (crossing := CROSSING.search(instruction.attributes)):
            for element, dims in ARRAY.findall(instruction.type)[:1]:
                sent = _dtype(element), _bytes(element, dims)
                yield Performed(crossing[1].lower(), (), *sent, 1, True, caller.trips, caller.bounded)
        for callee in called(instruction):
            if callee in bodies:
                yield from _performed(bodies, callee, caller.of(bodies, instruction, callee))


def called(instruction: Instruction) -> list[str]:
    """The computations that an instruction calls."""
    if instruction.opcode in ("reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"):
        return []
    several = [
        name for branches in BRANCHES.findall(instruction.attributes) for name in re.findall(r"[\w.\-]+", branches)
    ]
    return CALLED.findall(instruction.attributes) + several


def _trips(bodies: dict[str, list[Instruction]], loop: Instruction) -> int | None:
    if match := TRIPS.search(loop.attributes):
        return int(match[1])
    test = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
    inside = bodies.get(test[1], []) if test else []
    numbers = {
        instruction.name: instruction.args
        for instruction in inside
        if instruction.opcode == "constant" and instruction.args.isdigit()
    }
    ends = [
        int(numbers[name])
        for instruction in inside
        if instruction.opcode == "compare" and "direction=LT" in instruction.attributes
        for name in instruction.operands[1:]
        if name in numbers
    ]
    return ends[0] if len(ends) == 1 else None  # lax.scan counts from 0 in steps of 1


def _collective(kind: str, instruction: Instruction, types: dict[str, str], caller: _Caller, starts: bool) -> Performed:
    groups = _groups(instruction)
    operands = (
        instruction.operands[:1] if kind == "ragged_all_to_all" else instruction.operands
    )  # drop offsets and sizes
    arrays = [array for name in operands for array in ARRAY.findall(types.get(name, ""))]
    dtypes = dict.fromkeys(_dtype(element) for element, _ in arrays)
    sizes = [_bytes(element, dims) for element, dims in arrays]
    larger = len(groups[0]) if kind == "all_gather" else 1
    start = starts or caller.started or instruction.opcode.endswith("-start")
    sent = sum(sizes) * larger
    return Performed(kind, groups, "+".join(dtypes), sent, len(arrays), start, caller.trips, caller.bounded)


def _dtype(element: str) -> str:
    return TYPES.get(element) or (f"float8_{element[2:]}" if element.startswith("f8") else element)


def _bytes(element: str, dims: str) -> int:
    bits = re.search(r"\d+", element)
    itemsize = 1 if element == "pred" or bits is None else max(1, int(bits[0]) // 8)
    return math.prod(map(int, filter(None, dims.split(",")))) * itemsize


def _groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """Groups of `{{0,1},{2,3}}`, of `[2,2]<=[2,2]T(1,0)` (rows of a transposed grid), or of `mesh['a'=2] {'a'}`."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}", instruction.attributes):
        rows = [re.findall(r"\d+", row) for row in re.findall(r"\{([^}]*)\}", listed[1])]
        return tuple(sorted(tuple(map(int, row)) for row in rows))
    if grid := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes):
        numbers = _grid(grid[3], grid[4])
        return tuple(sorted(tuple(map(int, row)) for row in numbers.reshape(int(grid[1]), int(grid[2]))))
    ids = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]" + ids + r" \{([^}]*)\}", instruction.attributes):
        return _groups_of_axes(named[1], _grid(named[2], named[3]) if named[2] else None, named[4])
    raise InternalError(
        "a collective of the compiled text without groups that meshdsl can read: "
        f"{instruction.name} {instruction.attributes[:200]}"
    )


def _grid(sizes: str, transposed: str | None) -> np.ndarray:
    """Device numbers as a grid of sizes "2,4", with its dims in the order "1,0"."""
    shape = [int(n) for n in sizes.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose([int(n) for n in transposed.split(",")]) if transposed else numbers


def _groups_of_axes(mesh: str, devices: np.ndarray | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh; `'a':(2)4` is a part of axis a, of size 4, after one of size 2."""
    sizes: list[int] = []
    reduced: list[int] = []  # positions in `sizes`
    parts = {name: (pre, size) for name, pre, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)}
    for name, whole in re.findall(r"'([^']+)'=(\d+)", mesh):
        pre, size = parts.get(name, ("", ""))
        before, inside = (int(pre), int(size)) if size else (1, int(whole))
        if name in parts:
            reduced.append(len(sizes) + 1)
        sizes += [before, inside, int(whole) // (before * inside)]
    devices = np.arange(math.prod(sizes)) if devices is None else devices
    numbers = np.moveaxis(devices.reshape(sizes), reduced, range(-len(reduced), 0))
    rows = numbers.reshape(-1, math.prod(sizes[i] for i in reduced))
    return tuple(sorted(tuple(int(n) for n in row) for row in rows))
