"""Read the collectives of a lowered program from its StableHLO text, for `verify`.

`as_text()` of `compiled.lower(...)` is a module of functions. A collective counts once per trip of the enclosing while
loops, also through `func.call`. Trip counts are known for loops that `lax.scan` makes (a counter from a constant to a
constant, compared by LT). Any other while loop counts as one trip, and both branches of a conditional count, as in
`program.collectives`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from ..errors import InternalError
from ..layouts import Mesh
from ..lowering import Program
from ..lowering.program import CollectiveRecord

__all__ = ["Groups", "HloCollective", "groups_of", "read", "stated"]

Groups = tuple[tuple[int, ...], ...]
KINDS = {"collective_permute": "permute"}  # the other names are the same
DTYPES = {"f": "float", "i": "int", "ui": "uint", "bf": "bfloat"}
REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min"}


@dataclass(frozen=True, order=True)
class HloCollective:
    """One collective of one device: kind, reduction, groups, and bytes of the larger of operand and result."""

    kind: str
    reduction: str
    groups: Groups  # device numbers in order; for a permute, pairs (from, to)
    dtype: str
    bytes: int

    def __str__(self) -> str:
        groups = str(self.groups[:2])[1:-1] + (", ..." if len(self.groups) > 2 else "")
        return f"{self.kind} {self.reduction} {self.dtype} {self.bytes} bytes among {groups}"


@dataclass
class _Function:
    collectives: Counter[HloCollective] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass
class _Loop:
    depth: int
    trips: int


def read(text: str) -> Counter[HloCollective]:
    """Every collective of the module, with the number of times one device runs it.

    >>> read("func.func public @main(%arg0: tensor<4xf32>) {\\n}")
    Counter()

    Raises `InternalError` for a collective that it cannot read.
    """
    functions = _functions(text)

    def total(name: str) -> Counter[HloCollective]:
        counts = Counter(functions[name].collectives)
        for callee, times in functions[name].calls.items():
            counts.update({collective: times * n for collective, n in total(callee).items()})
        return counts

    return total("main")


def _functions(text: str) -> dict[str, _Function]:
    functions: dict[str, _Function] = {}
    function, depth = _Function(), 0
    loops: list[_Loop] = []
    starts: dict[str, str] = {}  # initial values of loop counters
    numbers: dict[str, int] = {}  # scalar constants
    opened: tuple[int, str] | None = None  # a collective whose reduction follows: its depth and first line
    reduction = ""
    trips: list[int] = []  # of open loop predicates and bodies
    for line in text.splitlines():
        code = re.sub(r'"[^"]*"', lambda m: m[0].replace("{", "").replace("}", ""), line)
        after = depth + code.count("{") - code.count("}")
        if match := re.search(r"func\.func .*?@(\w+)\(", line):
            function = functions.setdefault(match[1], _Function())
            loops, starts, numbers = [], {}, {}
        if match := re.match(r"\s*(%\w+) = stablehlo\.constant dense<(-?\d+)> : tensor<u?i\d+>", line):
            numbers[match[1]] = int(match[2])
        if "stablehlo.while(" in line:
            trips.append(1)
            starts = dict(re.findall(r"(%\w+) = (%[\w#]+)", line.partition("stablehlo.while(")[2]))
        if match := re.search(r"stablehlo\.compare\s+LT, (%\w+), (%\w+)", line):
            first, last = numbers.get(starts.get(match[1], "")), numbers.get(match[2])
            if first is not None and last is not None:
                trips[-1] = last - first
        if re.match(r"\s*} do {", line):
            loops.append(_Loop(depth, trips.pop()))
        times = math.prod(loop.trips for loop in loops)
        if match := re.search(r"(?<!\w)call @(\w+)\(", line):
            function.calls[match[1]] += times
        if opened is not None and (match := re.match(r"\s*%\w+ = stablehlo\.(\w+) ", line)):
            reduction = REDUCTIONS[match[1]]
        if re.search(r'"stablehlo\.(all_|reduce_scatter|collective_)|custom_call @ragged_all_to_all', line):
            if code.rstrip().endswith("({"):
                opened, reduction = (depth, line), ""
            else:
                function.collectives[_collective(line, line, "")] += times
        elif opened is not None and after == opened[0]:
            function.collectives[_collective(opened[1], line, reduction)] += times
            opened = None
        while loops and after < loops[-1].depth:
            loops.pop()
        depth = after
    return functions


def _collective(line: str, types: str, reduction: str) -> HloCollective:
    kind = re.search(r'"stablehlo\.(\w+)"|custom_call @(\w+)', line)
    groups = re.search(r"(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>", line)
    if kind is None or groups is None:
        raise InternalError(f"a collective of the lowered text that meshdsl cannot read: {line.strip()}")
    tensors = re.findall(r"tensor<((?:\d+x)*)(complex<\w+>|\w+)>", types.rpartition(" : ")[2])
    if kind[2]:  # the other operands are the output, offsets and sizes
        tensors = tensors[:1]
    (_, element), *_ = tensors
    dtype = _dtype(element)
    itemsize = jnp.dtype(dtype).itemsize
    sizes = [math.prod(map(int, re.findall(r"\d+", dims))) * itemsize for dims, _ in tensors]
    rows = _numbers(groups[1], int(groups[2]), int(groups[3]))
    name = kind[1] or kind[2]
    return HloCollective(KINDS.get(name, name), reduction, tuple(sorted(rows)), dtype, max(sizes))


def _numbers(text: str, rows: int, columns: int) -> Groups:
    if text.startswith('"0x'):  # MLIR writes long constants as bytes
        flat = np.frombuffer(bytes.fromhex(text[3:-1]), "<i8").tolist()
    else:
        flat = [int(n) for n in re.findall(r"\d+", text)]
    return tuple(tuple(flat[i * columns : (i + 1) * columns]) for i in range(rows))


def _dtype(element: str) -> str:
    if element.startswith("complex"):
        return f"complex{2 * int(re.sub(r'[^0-9]', '', element))}"
    if element.startswith("f8"):
        return f"float8_{element[2:].lower()}"
    match = re.fullmatch(r"([a-z]+)(\d+).*", element)
    if match is None:
        raise InternalError(f"no dtype is known for the StableHLO element type {element!r}")
    return "bool" if element == "i1" else f"{DTYPES[match[1]]}{match[2]}"


def stated(program: Program) -> Counter[HloCollective]:
    """The collectives that the program states. A collective of 0 bytes is not emitted, so it does not count."""
    counts: Counter[HloCollective] = Counter()
    for record in program.collectives:
        if record.bytes and record.count:
            reduction = getattr(record.op, "kind", "")
            groups = _groups(record, program.mesh)
            counts[HloCollective(record.kind, reduction, groups, record.dtype.name, record.bytes)] += record.count
    return counts


def groups_of(axes: Sequence[str], mesh: Mesh) -> Groups:
    """The device numbers of each group along some axes, members in the axes' order.

    >>> groups_of(["cols"], Mesh("rows:2 cols:2"))
    ((0, 1), (2, 3))
    """
    order = [list(mesh.axes).index(axis) for axis in axes]
    numbers = np.arange(mesh.size).reshape(tuple(mesh.axes.values()))
    places = np.moveaxis(numbers, order, range(len(axes))).reshape(mesh.count(axes), -1)
    return tuple(sorted(tuple(map(int, group)) for group in places.T))


def _groups(record: CollectiveRecord, mesh: Mesh) -> Groups:
    pairs = record.op.pairs(mesh)
    if pairs is None:
        return groups_of(record.axes, mesh)
    along = groups_of([axis for axis in mesh.axes if axis in record.axes], mesh)
    return tuple(sorted((group[a], group[b]) for group in along for a, b in pairs))
