"""`md.show`: the picture of a sharded tensor, or of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...compile import Compiled, compile
from ...dims import show as show_dims
from ...errors import LayoutError, ShapeError, nearest
from ...ir import Type, Var
from ...layouts import Extents, Layout, Mesh, MeshLike, Sharding
from ...lowering import Program
from ...trace import Tensor, spec_of
from .blocks import blocks
from .picture import Picture
from .programs import MOST, program_picture


def show(
    value: Tensor | Type | Program,
    layout: str | Layout | Mapping[str, Any] | Sharding | None = None,
    mesh: MeshLike | None = None,
    *,
    most: int = MOST,
) -> Picture:
    """Draw which block of a tensor each device stores, or the collectives of a program. Notebooks show the result.

    >>> import meshdsl as md
    >>> picture = md.show(md.spec("batch:64 io:32"), "batch:rows", "rows:2 cols:4")
    >>> picture
    Picture('float32[batch=32/rows io=32] on rows:2 cols:4')
    >>> step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "batch:rows; io:cols")
    >>> md.show(step.program(md.spec("batch:64 io:32"), md.spec("io:32 hidden:16")))
    Picture('program on rows:2 cols:4: 1 collective')

    A tensor or spec needs `layout` and `mesh`. The layout's rules for dims of other tensors are ignored, so that a
    model's layout fits each of its tensors. A `md.Sharding` in place of the layout can also be partial. Between two
    devices, `=` joins copies, `+` joins terms of a partial sum, and a dotted line separates different blocks.

    A program is drawn in order, at most `most` collectives of it; the picture says how many it leaves out. Above them
    is the table of ticks of each pipeline.
    `picture.svg` is the text, and `picture.save(path)` writes it. Raises `LayoutError` for an illegal layout.
    """
    if isinstance(value, Compiled):
        raise ShapeError("md.show draws a program, got a compiled function\n  give it compiled.program(*args)")
    if isinstance(value, Program):
        if layout is not None or mesh is not None:
            raise LayoutError("a program has its layout and its mesh\n  call md.show(program)")
        if most < 1:
            raise ShapeError(f"most={most} collectives; a picture shows at least 1")
        return program_picture(value, most)
    if layout is None or mesh is None:
        raise LayoutError(
            "a tensor is drawn under a layout on a mesh, and one of them is missing\n"
            "  for example md.show(x, 'batch:rows', 'rows:2 cols:4')"
        )
    mesh = Mesh(mesh)
    type_ = spec_of(value)
    if isinstance(layout, Sharding):
        program, var = _under_sharding(type_, layout, mesh)
    else:
        program, var = _under_layout(type_, layout if isinstance(layout, Layout) else Layout(layout), mesh)
    return blocks(program, var)


def _under_layout(type_: Type, layout: Layout, mesh: Mesh) -> tuple[Program, Var]:
    """The tensor as the input of a program that does nothing, so that the compiler decides its sharding."""
    names = {dim.name for dim in type_.dims}
    rules = {dim: axes for dim, axes in layout.rules.items() if dim in names}
    for axes in layout.rules.values():
        for axis in axes:
            mesh.check_axis(axis)
    program = compile(lambda x: x, mesh, Layout(rules)).program(type_)
    return _of_one(type_, program.ins[0].sharding, mesh, program.extents)


def _under_sharding(type_: Type, sharding: Sharding, mesh: Mesh) -> tuple[Program, Var]:
    """The tensor under exactly this sharding."""
    names = [dim.name for dim in type_.dims]
    for dim, _ in sharding.split:
        if dim not in names:
            raise LayoutError(
                f"the sharding names dim {dim!r}, and the tensor is {show_dims(type_.dims)}; {nearest(dim, names)}"
            )
    for axis in (*sharding.split_axes, *sharding.partial):
        mesh.check_axis(axis)
    return _of_one(type_, sharding, mesh, Extents({dim: mesh.count(axes) for dim, axes in sharding.split}))


def _of_one(type_: Type, sharding: Sharding, mesh: Mesh, extents: Extents) -> tuple[Program, Var]:
    var = Var(type_.dims, type_.dtype, "", sharding)
    return Program((var,), (), (var,), mesh=mesh, extents=extents), var
