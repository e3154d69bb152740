"""Read the collectives of a lowered program from its StableHLO text, for `verify`.

`as_text()` of `compiled.lower(...)` is a module of functions, which MLIR parses. A collective counts once per trip of
the enclosing while loops, also through `func.call`. Trip counts are known for loops that `lax.scan` makes (a counter
from a constant to a constant, compared by LT). Any other while loop counts as one trip, and both branches of a
conditional count, as in `program.records(every_branch=True)`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (MLIR's Python bindings are only partly typed)

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from ...errors import InternalError
from ...layouts import Mesh
from ...lowering import Program
from ...lowering.program import CollectiveRecord

Groups = tuple[tuple[int, ...], ...]
KINDS = {
    stablehlo.AllReduceOp: "all_reduce",
    stablehlo.AllGatherOp: "all_gather",
    stablehlo.AllToAllOp: "all_to_all",
    stablehlo.ReduceScatterOp: "reduce_scatter",
    stablehlo.CollectivePermuteOp: "permute",
    stablehlo.CollectiveBroadcastOp: "collective_broadcast",
}
DTYPES = {"f": "float", "i": "int", "ui": "uint", "bf": "bfloat"}
REDUCTIONS = {stablehlo.AddOp: "sum", stablehlo.MaxOp: "max", stablehlo.MinOp: "min"}


@dataclass(frozen=True, order=True)
class HloCollective:
    """One collective of one device: kind, reduction, groups, and bytes of the larger of operand and result."""

    kind: str
    reduction: str
    groups: Groups  # device numbers in order; for a permute, pairs (from, to)
    dtype: str
    bytes: int

    def __str__(self) -> str:
        groups = ", ".join(_few([f"({', '.join(_few(group))})" for group in self.groups]))
        return f"{self.kind} {self.reduction} {self.dtype} {self.bytes} bytes among {groups}"


def _few(items: Sequence[Any]) -> list[str]:
    """The items as text; of more than eight, the first two and the last."""
    texts = [str(item) for item in items]
    return texts if len(texts) <= 8 else [*texts[:2], "...", texts[-1]]


def read(text: str) -> Counter[HloCollective]:
    """Every collective of the module, with the number of times one device runs it.

    >>> read("func.func public @main(%arg0: tensor<4xf32>) { return }")
    Counter()

    Raises `InternalError` for a text that MLIR cannot parse, and for a collective that it cannot read.
    """
    with mlir.make_ir_context():
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise InternalError(f"MLIR cannot parse the lowered text: {error}") from None
        operations: list[Any] = list(module.body)
        symbols = {op.sym_name.value: op for op in operations if isinstance(op, func.FuncOp | sdy.MeshOp)}
        functions: dict[str, Counter[HloCollective]] = {}

        def inside(op: Any) -> Counter[HloCollective]:
            """The collectives that one run of an operation performs, its regions and callees included."""
            if isinstance(op, func.CallOp):
                return called(op.callee.value)
            if (kind := _kind(op)) is not None:
                return Counter([_collective(op, kind, symbols)])
            total: Counter[HloCollective] = Counter()
            trips = _trips(op) if isinstance(op, stablehlo.WhileOp) else 1
            for number, region in enumerate(op.operation.regions):
                times = trips if number else 1  # the first region of a loop is its test
                for each in (inner for block in region for inner in block):
                    total.update({collective: times * n for collective, n in inside(each).items()})
            return total

        def called(name: str) -> Counter[HloCollective]:
            if name not in functions:
                functions[name] = inside(symbols[name])
            return functions[name]

        return called("main")


def _kind(op: Any) -> str | None:
    """The kind of a collective; None for another operation."""
    if isinstance(op, stablehlo.CustomCallOp):
        target = op.call_target_name.value
        return target if target == "ragged_all_to_all" else None
    return KINDS.get(type(op))


def _trips(loop: Any) -> int:
    """The trips of a loop whose counter goes from a constant to a constant; 1 for any other."""
    test, *_ = loop.cond
    *_, end = test
    compare = end.operands[0].owner
    if not isinstance(compare, stablehlo.CompareOp) or "LT" not in str(compare.comparison_direction):
        return 1
    counter, last = compare.operands
    if not isinstance(counter, ir.BlockArgument) or counter.owner != test:
        return 1
    first, last = loop.operands[counter.arg_number].owner, last.owner
    if not isinstance(first, stablehlo.ConstantOp) or not isinstance(last, stablehlo.ConstantOp):
        return 1
    return int(np.array(last.value)) - int(np.array(first.value))


def _collective(op: Any, kind: str, symbols: Mapping[str, Any]) -> HloCollective:
    # the other operands of a ragged exchange are the output, offsets and sizes
    values = [op.operands[0]] if isinstance(op, stablehlo.CustomCallOp) else [*op.operands, *op.results]
    shapes = [ir.ShapedType(value.type) for value in values]
    dtype = _dtype(str(shapes[0].element_type))
    sizes = [math.prod(shape.shape) * jnp.dtype(dtype).itemsize for shape in shapes]
    bodies = [block for region in op.operation.regions for block in region]
    reduction = REDUCTIONS[type(bodies[0].operations[0])] if bodies else ""
    return HloCollective(kind, reduction, _members(op, symbols), dtype, max(sizes))


def _members(op: Any, symbols: Mapping[str, Any]) -> Groups:
    """The groups of a collective as device numbers, from a list or from the axes of a mesh."""
    where: Any = op.backend_config if isinstance(op, stablehlo.CustomCallOp) else op.attributes
    listed: Any = where["source_target_pairs" if "source_target_pairs" in where else "replica_groups"]
    if isinstance(listed, ir.DenseIntElementsAttr):
        return tuple(sorted(tuple(map(int, row)) for row in np.array(listed)))
    by_axes: Any = stablehlo.ReplicaGroupMeshAxesAttr(listed)
    mesh = sdy.MeshAttr(symbols[ir.FlatSymbolRefAttr(by_axes.mesh).value].mesh)
    axes = [stablehlo.AxisRefAttr(axis) for axis in by_axes.axes]
    if mesh.device_ids or any(axis.sub_axis_info for axis in axes):
        raise InternalError(f"groups of devices that meshdsl cannot read: {listed} over {mesh}")
    sizes = {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)}
    return groups_of([axis.name for axis in axes], Mesh(sizes))


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
    for record in program.records(every_branch=True):
        if record.bytes and record.count:
            reduction = getattr(record.op, "kind", "")
            groups = _groups(record, program.mesh)
            counts[HloCollective(record.kind, reduction, groups, record.dtype.name, record.bytes)] += round(
                record.count
            )
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
