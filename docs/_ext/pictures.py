"""The pictures in docs/images that `md.show` makes. `python docs/_ext/pictures.py` writes them; a test compares.

Each example is text, so that its lines have the file name that a reader would see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import meshdsl as md
from models.mlp import mlp

__all__ = ["FOLDER", "pictures"]

FOLDER = ROOT / "docs" / "images"
MESH = "rows:2 cols:4"

# name: the dims of a tensor, its layout or sharding, the mesh
TENSORS: dict[str, tuple[str, Any, str]] = {
    "two_dims": ("batch:64 io:32", "batch:rows; io:cols", MESH),
    "copies": ("io:32 hidden:16", "batch:rows; hidden:cols", MESH),
    "two_axes": ("batch:64 io:32", "batch:rows,cols", MESH),
    "partial": ("batch:64 hidden:16", md.Sharding.of({"batch": ("rows",)}, partial=("cols",)), MESH),
    "padded": ("batch:10 io:32", "batch:rows", "rows:4"),
}

# name: a function, its layout, the mesh, the specs of its arguments
PROGRAMS: dict[str, tuple[str, str, str, tuple[md.Tensor, ...]]] = {
    "contract": (
        'lambda x, w: md.einsum(x, w, out="batch hidden")',
        "batch:rows; io:cols",
        MESH,
        (md.spec("batch:64 io:32"), md.spec("io:32 hidden:16")),
    ),
    "scatter": (
        'lambda h, v: md.einsum(md.prefer(h, "d_ff"), v, out="length model")',
        "length:cols; d_ff:cols",
        MESH,
        (md.spec("length:8 d_ff:16"), md.spec("d_ff:16 model:4")),
    ),
    "flatten": (
        'lambda x: md.flatten(x, "batch length", "token")',
        "length:rows",
        MESH,
        (md.spec("batch:4 length:6 model:8"),),
    ),
    "shift": ('lambda x: md.shift(x, "batch", 1)', "batch:rows", "rows:4", (md.spec("batch:64 io:4"),)),
    "sort": ('lambda x: md.sort(x, "batch")', "batch:rows; io:cols", MESH, (md.spec("batch:64 io:32"),)),
    "take": (
        'lambda table, ids: md.take(table, ids, "vocab")',
        "batch:rows; vocab:cols",
        MESH,
        (md.spec("vocab:32 model:8"), md.spec("batch:4", "int32")),
    ),
}


def pictures() -> dict[str, str]:
    """The SVG text of every picture, by file name."""
    made = {f"{name}.svg": md.show(md.spec(dims), layout, mesh) for name, (dims, layout, mesh) in TENSORS.items()}
    for name, (code, layout, mesh, specs) in PROGRAMS.items():
        function = eval(compile(code, "model.py", "eval"), {"md": md})
        made[f"{name}.svg"] = md.show(md.compile(function, mesh, layout).program(*specs))
    mesh, layout = mlp.layouts["data_model"]
    made["step.svg"] = md.show(md.compile(mlp.train_step(), mesh, layout).program(*mlp.specs()))
    return {name: picture.svg + "\n" for name, picture in made.items()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
