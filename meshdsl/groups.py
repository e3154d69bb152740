"""The devices that share a weight update: a group along some axes of the mesh.

Gradients are reduced and scattered inside a group, and their shards summed across groups (partial sharding: Xu et al.,
2020, section on large topologies).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import LayoutError
from .layouts import Mesh
from .layouts.sharding import Axes

__all__ = ["group_of"]


def group_of(mesh: Mesh, asked: str | Iterable[str]) -> Axes:
    """The axes of a group, in the order of the mesh.

    >>> group_of(Mesh("y:32 x:32 core:2"), "core x")
    ('x', 'core')

    Raises `LayoutError` for an axis that the mesh lacks, and for no axis at all.
    """
    names = re.split(r"[\s,;+]+", asked.strip()) if isinstance(asked, str) else list(asked)
    names = [name for name in names if name]
    if not names:
        raise LayoutError(
            "update_group names no axis, and a group has some\n"
            f"  give axes of the mesh '{mesh}', or leave update_group out; weight_update='replicated' cuts no update"
        )
    for name in names:
        mesh.check_axis(name)
    return tuple(axis for axis in mesh.axes if axis in names)
