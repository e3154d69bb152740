"""Plans and operations send at most what Shardy's do, in its own tests (`sdy/transforms/export/test`).

The bytes are those that one device sends in the collectives that Shardy's tests expect; its reshards of values send as
much as the planner's. An axis of which Shardy uses a part is several axes here. Left out are dims that do not divide,
other orders of devices, and reshards that send nothing.

The same for the redistributions in the tests of PyTorch's DTensor (`test_redistribute.py`), but for those to pending
sums. DTensor changes one axis after another.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest

import meshdsl as md
from meshdsl.dims import dims
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.partition.planner import Reshard

# mesh ; float32 shape ; the axes of each dim before ; after ; bytes (reshard_to_collectives.mlir)
RESHARDS = """
x:6 ; 24x8 ; x - ; - - ; 640
x:2 y:2 ; 16x8 ; y x ; y - ; 128
x:2 y:2 z:2 ; 16x8 ; x,y,z - ; x - ; 192
x:2 y:2 z:2 ; 16x8 ; y,z x ; y x ; 64
x:2 y1:4 y4:2 ; 16x8 ; y1,y4 x ; y1 x ; 32
x:2 y:2 z:2 ; 16x8x8 ; x y - ; - y x ; 512
x:2 y:2 z:2 ; 16x8x8 ; x - y,z ; x y,z - ; 384
x:2 y:2 z:2 ; 16x8 ; x,z y ; x y,z ; 32
x:4 y:2 z:4 ; 16x8x8 ; - y,x - ; x - y ; 640
x:4 y:2 z:4 ; 16x8x8 ; x y,z - ; x,z - y ; 160
x:2 y:2 z:2 ; 16x8x8 ; y x - ; - - x,y ; 1024
x:2 y:2 z:2 ; 16x8x8 ; y x,z - ; - - x,y,z ; 1152
x:4 y:2 z:4 ; 16x8x8 ; - y,z - ; x,z - y ; 160
x:4 y:2 z1:2 z2:2 ; 16x8x8 ; x z1,z2,y - ; x,z2 - y ; 256
x:2 y:2 z:2 w1:2 w2:2 ; 16x8 ; - w1 ; w1,w2 - ; 96
x:2 y:2 z:2 ; 16x8x8 ; - x - ; - - x,y,z ; 448
x:2 y:2 z:2 ; 16x8x8 ; z x - ; - - x,y,z ; 640
x:2 y:2 z:2 ; 16x8x8 ; y x - ; - - x,y,z ; 640
x:2 y:2 z:2 ; 16x8x8 ; - x,y - ; x - y,z ; 640
x:2 y:2 z:2 w1:2 w2:2 ; 16x8 ; y,z,w1 - ; y x,w1,w2 ; 28
x:2 y:2 z:2 ; 8x4 ; x,y - ; x y,z ; 12
x:2 y:2 z:2 w:2 ; 16x8x8 ; z x - ; w - x,y ; 896
x:2 y:2 z:2 ; 16x8 ; - x ; x,y z ; 64
x:2 y:2 z:2 ; 16x8x8 ; - x z ; - - x,y,z ; 768
x:2 y:2 z:2 ; 16x4 ; - x ; x,y,z - ; 48
x:2 y:2 z:2 ; 16x4x8 ; - x,y - ; x - y,z ; 512
x:2 y:2 z:2 ; 4x4 ; x,y - ; x y,z ; 12
x:2 y:2 ; 4x10 ; - x ; x,y - ; 60
x:2 y:2 z:2 ; 16x8 ; z y ; z x ; 128
x1:2 x2:2 y:2 z:4 ; 16x8 ; z y ; z x1,x2 ; 32
x1:2 x2:2 y:2 z:4 ; 16x8 ; z x1,x2 ; z y ; 64
x:2 y:2 z:2 w:2 ; 16x8 ; x,y,z - ; w,y,z - ; 64
x:2 y:2 z:2 ; 16x8 ; x,y - ; z - ; 256
x1:2 x2:2 y:2 z:4 ; 16x8 ; x1,x2,z - ; y - ; 256
x:2 y:2 z:2 ; 16x8 ; x,y z ; z - ; 256
x:2 y:2 ; 16x8 ; x - ; - y ; 128
x:4 y:2 ; 16x8 ; x - ; - y ; 192
x:2 y:2 z:2 w:2 u:2 v:2 ; 8x8x8x8 ; x y,z - - ; - - w,u v ; 1792
x:4 y:2 ; 16x8 ; y - ; - x ; 64
x:2 y:2 z:2 w:4 ; 16x8 ; y,z,w - ; y x,w ; 28
x:2 y:2 ; 16x8 ; x y ; y x ; 128
x1:2 x2:2 y:2 ; 16x8 ; x1,x2 y ; y x1,x2 ; 96
x:2 y:2 z:2 ; 16x8 ; x y ; x,y z ; 64
x:2 y:2 ; 8x8x8 ; x y - ; - x y ; 768
x1:2 x2:2 y:2 z:4 ; 16x8 ; z y ; y,z x1,x2 ; 16
x:4 y:2 z1:2 z2:2 ; 16x8 ; z1,z2,y x ; x,z1,z2 - ; 40
x:4 y:2 z:4 ; 16x8 ; x,y z ; y,x z ; 16
x:4 y:2 z:4 ; 16x8 ; x,y z ; y,z x ; 16
x:2 y:2 ; 16x8x8 ; y - - ; x,y - - ; 1024
x:2 y:2 z:2 ; 16x8 ; y,x,z - ; z - ; 256
x:2 y:2 z:2 ; 16x8 ; y,x,z - ; z y ; 160
x:2 y:2 z:2 ; 16x8 ; z,y,x - ; - y ; 288
x:2 y:2 ; 16x8x8 ; - y,x - ; x,y - - ; 1792
x:2 y:2 z:2 w1:2 w2:2 ; 16x8 ; y,w1,z,w2 - ; y x,w1,w2 ; 44
x:2 y:2 z:2 w1:2 w2:2 ; 16x8 ; y,z,w2 - ; y x,w1,w2 ; 24
x:2 y:3 ; 12x12 ; x - ; y - ; 192
x:2 y:3 ; 12x12 ; y - ; x - ; 288
x1:2 x2:2 y1:3 y3:2 ; 12x12 ; x1,x2 - ; y1,y3 - ; 96
x1:2 x2:2 y1:3 y3:2 ; 12x12 ; y1,y3 - ; x1,x2 - ; 144
x:2 y:3 ; 12x12 ; x y ; y x ; 208
x1:2 x2:2 y1:2 y2:3 ; 12x12 ; x1,x2 y1 ; y1,y2 - ; 96
x1:2 x2:2 y1:3 y3:2 z:2 ; 12x12 ; x1,x2 z ; y1,y3 - ; 96
"""

# operation ; mesh ; float32 operands, with the axes of each dim ; result ; bytes (insert_explicit_reshards)
OPERATIONS = """
reshape ; x:4 y:2 ; a0:16/x a1:2 a2:4 ; b0:16 b1:8/y,x ; 48
reshape ; x:4 ; a0:4/x a1:8 ; b0:32/x ; 0
reshape ; x:4 y:2 ; a0:4/x a1:8 ; b0:32/y ; 64
reshape ; y:2 ; a0:4/y a1:8 ; b0:32/y ; 0
reshape ; x:4 y:2 ; a0:4/y a1:8 ; b0:32/x ; 40
reshape ; x:4 y:2 ; a0:4/x a1:8/y ; b0:32/x,y ; 0
reshape ; x1:2 x2:2 y:2 ; a0:4/x1,x2 a1:8/y ; b0:32/y,x1,x2 ; 16
reshape ; x:4 y:2 ; a0:4/x a1:8/y ; b0:32/x ; 16
reshape ; x1:2 x2:2 y:2 ; a0:4/y a1:8/x1,x2 ; b0:32/y,x1,x2 ; 24
reshape ; x:4 y:2 ; a0:4/y a1:8/x ; b0:32/y ; 48
reshape ; x:4 ; a0:4 a1:8/x ; b0:32 ; 96
reshape ; x:4 ; a0:4 a1:8/x ; b0:32/x ; 24
reshape ; x1:2 x2:2 y:2 ; a0:2/x1 a1:8/x2,y ; b0:16/x1,x2,y ; 0
reshape ; x1:2 x2:2 y:2 ; a0:2 a1:8 ; b0:16/x1,x2,y ; 0
reshape ; x:4 ; a0:32/x ; b0:4/x b1:8 ; 0
reshape ; y:2 ; a0:32/y ; b0:4/y b1:8 ; 0
reshape ; x:4 y:2 ; a0:32/x,y ; b0:4/x b1:8/y ; 0
reshape ; x1:2 x2:2 y:2 ; a0:32/y,x1,x2 ; b0:4/y b1:8/x1,x2 ; 24
reshape ; x:4 ; a0:32 ; b0:4 b1:8/x ; 0
reshape ; x1:2 x2:2 y:2 ; a0:16/x1,x2,y ; b0:2/x1 b1:8/x2,y ; 0
reshape ; y:2 ; a0:2 a1:2/y a2:4 ; b0:4 b1:2 b2:2/y ; 32
reshape ; x:4 ; a0:8 a1:8/x ; b0:4/x b1:16 ; 48
reshape ; x:4 ; a0:8/x a1:8 ; b0:4 b1:16/x ; 48
reshape ; x:4 y:2 ; a0:8/x,y a1:8 ; b0:4 b1:16/x,y ; 56
reshape ; x:4 y:2 ; a0:8/x,y a1:8 ; b0:4 b1:16/y,x ; 24
reshape ; x1:2 x2:2 y:2 ; a0:8/y,x1,x2 a1:8 ; b0:4 b1:16/x1,x2,y ; 56
reshape ; x1:2 x2:2 y:2 ; a0:8/y,x1,x2 a1:8 ; b0:4 b1:16/y,x1,x2 ; 56
reshape ; x:4 y:2 ; a0:8/x,y a1:8 ; b0:4 b1:16/x ; 80
reshape ; x:4 y:2 ; a0:8/x,y a1:8 ; b0:4 b1:16/y ; 96
reshape ; x1:2 x2:2 y:2 ; a0:8/y,x1,x2 a1:8 ; b0:4 b1:16/x1,x2 ; 80
reshape ; x1:2 x2:2 y:2 ; a0:8/y,x1,x2 a1:8 ; b0:4 b1:16/y ; 128
reshape ; x:4 z:4 ; a0:8 a1:8/x ; b0:4/z b1:16 ; 48
reshape ; x:4 y:2 z:4 ; a0:8 a1:8/x ; b0:4/z b1:16/y ; 24
reshape ; x:4 y:2 ; a0:8/x a1:8 ; b0:4 b1:16/x,y ; 48
reshape ; x:4 y:2 ; a0:8/x a1:8 ; b0:4 b1:16/y,x ; 24
reshape ; x:4 y:2 ; a0:8/y a1:8 ; b0:4 b1:16/x,y ; 16
reshape ; x:4 y:2 ; a0:8/y a1:8 ; b0:4 b1:16/y,x ; 48
reshape ; x:4 y:2 ; a0:16/x,y ; b0:4/x b1:4/y ; 0
reverse a1,a3 ; x:4 y:2 ; a0:4/y a1:32 a2:8 a3:2 ; a0:4/x a1:32 a2:8 a3:2 ; 2304
reverse a1,a3 ; x:4 y:2 ; a0:4/x a1:32 a2:8 a3:2 ; a0:4/y a1:32 a2:8 a3:2 ; 4352
reverse a1,a3 ; x:4 y:2 z1:2 z2:2 ; a0:4/y a1:32/z1,z2 a2:8 a3:2 ; a0:4/x a1:32 a2:8/z1 a3:2 ; 1152
reverse a1,a3 ; x1:2 x2:2 z1:2 z2:2 ; a0:4/x1 a1:32/z1 a2:8 a3:2/z2 ; a0:4/x2 a1:32 a2:8 a3:2 ; 4096
reverse a1,a3 ; x:4 y:2 z1:2 z2:2 ; a0:4/y a1:32 a2:8/z1 a3:2 ; a0:4/x a1:32/z1,z2 a2:8 a3:2 ; 512
concat a1 ; x:4 ; a0:4 a1:32 a2:256 ; a0:4/x a1:32 a2:256 ; 0
concat a1 ; x:4 y:2 ; a0:4/x a1:32 a2:256 , a0:4/y a1:48 a2:256 ; a0:4 a1:80 a2:256 ; 233472
concat a1 ; x:4 y:2 ; a0:8/x a1:32/y a2:256 , a0:8 a1:48/y a2:256 ; a0:8/x a1:80/y a2:256 ; 81920
concat a1 ; x:4 y:2 ; a0:8/x a1:32 , a0:8/x a1:48 ; a0:8 a1:80/x,y ; 280
einsum ; x:4 y:2 ; i0:8/x k0:32 , k0:32 j1:16/y ; i0:8/x j1:16/y ; 0
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8/x j1:16 ; 128
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8/x j1:16/y ; 128
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8/x,y j1:16 ; 128
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8/y,x j1:16 ; 192
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32 j1:16/y ; i0:8/x j1:16/y ; 128
einsum ; x1:2 x2:2 y:2 ; i0:8/x1 k0:32/y , k0:32/y j1:16 ; i0:8 j1:16/x2 ; 256
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16/x ; i0:8 j1:16 ; 896
einsum ; x:4 ; i0:4/x k0:4096 , k0:4096/x j1:4096 ; i0:4/x j1:4096 ; 110592
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16/x ; i0:8/x j1:16 ; 608
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16/x ; i0:8 j1:16/x ; 512
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8 j1:16 ; 512
einsum ; x:4 y:2 ; i0:8 k0:32/y , k0:32/y j1:16 ; i0:8/x j1:16 ; 128
einsum ; y:2 ; i0:8 k0:32/y , k0:32/y j1:16 ; i0:8/y j1:16 ; 512
einsum ; y:2 ; i0:8 k0:32/y , k0:32/y j1:16 ; i0:8 j1:16/y ; 512
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8/y j1:16 ; 384
einsum ; x:4 y:2 ; i0:8/x k0:4/y , k0:4/y j1:16 ; i0:8 j1:16/x ; 176
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/y j1:16 ; i0:8 j1:16/x ; 224
einsum ; x:4 y:2 ; i0:8/x k0:16/y , k0:16/y j1:16 ; i0:8 j1:16/x ; 320
einsum ; x:4 y:2 ; i0:8 k0:32/y , k0:32/y j1:16/x ; i0:8/x j1:16 ; 224
einsum ; x:4 y:2 ; i0:8/x k0:32 , k0:32 j1:16/y ; i0:8/y j1:16/x ; 120
einsum ; x:4 y:2 ; i0:16/x k0:32 , k0:32 j1:8/y ; i0:16/y j1:8/x ; 120
einsum ; x:4 y:2 ; i0:128/x k0:4 , k0:4 j1:256/y ; i0:128/y j1:256/x ; 2048
einsum ; x:4 y:2 ; i0:8/x k0:1024 , k0:1024 j1:16/y ; i0:8/y j1:16/x ; 120
einsum ; x1:2 x2:2 y:2 ; i0:8/x2 k0:32/y , k0:32/y j1:16 ; i0:8 j1:16/x1,x2 ; 192
einsum ; x:4 y:2 ; i0:8/x k0:32/y , k0:32/x j1:16/y ; i0:8/y j1:16/x ; 784
einsum ; x:4 y:2 ; i0:8/x k0:4/y , k0:4/x j1:16/y ; i0:8/y j1:16/x ; 152
einsum ; x:4 y:2 z:4 ; i0:8 k0:32/z , k0:32 j1:16 ; i0:8 j1:16/x,y ; 96
einsum ; x1:2 x2:2 y:2 z:4 ; i0:8 k0:32/z,x2 , k0:32 j1:16/x1,x2,y ; i0:8 j1:16/x1,x2,y ; 224
einsum ; x1:2 x2:2 y:2 z1:2 z2:2 ; i0:8 k0:32/z1,z2,x2 , k0:32 j1:16/x1,x2,y,z2 ; i0:8 j1:16/x1,x2,y,z2 ; 416
einsum ; x1:2 x2:2 ; i0:8/x1 k0:32/x2 , k0:32/x1,x2 j1:16 ; i0:8/x1,x2 j1:16 ; 1088
einsum ; x1:2 x2:2 ; i0:8/x1 k0:4/x2 , k0:4/x1,x2 j1:16 ; i0:8/x1,x2 j1:16 ; 208
einsum ; x:4 y:2 z:4 ; b0:4/y i1:8 k0:32/x,z , b0:4/y k0:32/x,z j2:16 ; b0:4/y i1:8 j2:16 ; 1920
einsum ; x:4 y:2 z:4 ; i0:4 k0:8/y k1:32/x,z , k0:8/y k1:32/x,z j2:16 ; i0:4 j2:16 ; 496
einsum ; x:4 y:4 z:4 t:8 ; i0:16/x k0:32/z k1:64/t , k0:32/z k1:64/t j2:128/x,y ; i0:16/x j2:128/z,t ; 4128
einsum ; x:4 y:2 ; b0:4/x i1:8/y k0:32 , b0:4/x k0:32 j2:16/y ; b0:4 i1:8/x j2:16/y ; 704
einsum ; x:4 y:2 z:4 ; b0:4/x i1:8 k0:32 , b0:4/y k0:32 j2:16 ; b0:4/z i1:8 j2:16 ; 2752
einsum ; x1:2 y:2 ; b0:4/y,x1 i1:8 k0:32 , b0:4/y k0:32 j2:16 ; b0:4 i1:8 j2:16 ; 1536
einsum ; y1:2 y2:2 ; b0:64/y1 i1:8 k0:32 , b0:64/y1 k0:32 j2:16 ; b0:64 i1:8/y1,y2 j2:16 ; 6144
einsum ; y1:2 y2:2 ; b0:64/y2 i1:8 k0:32 , b0:64/y2 k0:32 j2:16 ; b0:64 i1:8/y1,y2 j2:16 ; 4096
einsum ; x:4 ; i0:16 k0:8/x , k0:8 j1:8/x ; i0:16/x j1:8 ; 288
einsum ; x:4 ; i0:8 k0:16/x , k0:16 j1:8/x ; i0:8/x j1:8 ; 432
einsum ; x:4 ; i0:8 k0:8/x , k0:8 j1:16/x ; i0:8/x j1:16 ; 288
einsum ; x:4 ; i0:8 k0:8/x , k0:8 j1:8/x ; i0:8/x j1:8 ; 240
einsum ; y:2 ; i0:8 k0:8/y , k0:8 j1:8/y ; i0:8 j1:8 ; 256
einsum ; y:2 ; i0:8 k0:2/y , k0:2 j1:8/y ; i0:8 j1:8 ; 160
einsum ; y:2 ; i0:8 k0:16/y , k0:16 j1:8/y ; i0:8 j1:8 ; 384
einsum ; y:2 ; i0:8 k0:2/y , k0:2 j1:8 ; i0:8 j1:8/y ; 32
einsum ; y:2 ; i0:8 k0:16/y , k0:16 j1:8 ; i0:8 j1:8/y ; 256
einsum ; x:4 y:2 z:4 ; i0:8/x i1:32/z k0:64/y , k0:64/y j1:256 ; i0:8/x,y i1:32/z j1:256 ; 33792
"""


def sharding(text: str) -> Sharding:
    return Sharding.of({f"d{i}": () if axes == "-" else axes.split(",") for i, axes in enumerate(text.split())})


@pytest.mark.parametrize("row", RESHARDS.strip().splitlines())
def test_a_reshard_sends_at_most_the_bytes_of_shardy(row: str):
    mesh, sizes, source, target, most = (part.strip() for part in row.split(";"))
    shape = dims(" ".join(f"d{i}:{n}" for i, n in enumerate(sizes.split("x"))))
    assert Reshard(sharding(source), sharding(target), shape, Mesh(mesh), Extents(), 4).cost <= int(most)


def rules(terms: str) -> str:
    """The layout rules in `a:8/x,y b:4`."""
    return "; ".join(f"{dim.split(':')[0]}:{axes}" for dim, _, axes in (t.partition("/") for t in terms.split()))


def apply(operation: str, result: str, *xs: md.Tensor) -> md.Tensor:
    name, _, over = operation.partition(" ")
    match name:
        case "einsum":
            return md.einsum(*xs, out=[term.split(":")[0] for term in result.split()])
        case "reshape":
            return md.reshape(xs[0], " ".join(term.split("/")[0] for term in result.split()))
        case "concat":
            return md.concat(xs, over)
        case _:
            return md.reverse(md.reverse(xs[0], over.split(",")[0]), over.split(",")[1])


@pytest.mark.parametrize("row", OPERATIONS.strip().splitlines())
def test_an_operation_sends_at_most_the_bytes_of_shardy(row: str):
    operation, mesh, operands, result, most = (part.strip() for part in row.split(";"))
    terms = operands.split(" , ")
    overrides = {f"x/{i}": rules(text) for i, text in enumerate(terms)} | {"result": rules(result)}
    specs = [md.spec(" ".join(term.split("/")[0] for term in text.split())) for text in terms]
    compiled = md.compile(lambda x: {"result": apply(operation, result, *x)}, mesh, md.Layout("", overrides=overrides))
    program = compiled.program(specs)
    assert sum(record.wire_bytes for record in program.collectives) <= int(most)
    shapes = [[d.size for d in spec.dims] for spec in specs]
    if sum(map(math.prod, shapes)) > 1 << 14:
        return
    values = [np.arange(math.prod(n), dtype=np.float32).reshape(n) % 7 for n in shapes]
    xs = [md.tensor(value, spec.dims) for value, spec in zip(values, specs, strict=True)]
    wanted = apply(operation, result, *xs)
    assert np.array_equal(md.simulate(program, *xs)[0], wanted.numpy())


# mesh ; shapes ; the dim that each axis splits (R: none, P: pending sum) before > after ; DTensor's steps, each
# as axis:before>after, as its tests expect them
REDISTRIBUTIONS = """
4 ; 12x3 13x3 14x3 ; 0 > R ; 0:0>R
4 ; 3x12 3x13 3x14 ; 1 > R ; 0:1>R
4 ; 12x3 ; R > R ;
4 ; 12x3 13x3 14x3 ; R > 0 ;
4 ; 3x12 3x13 3x14 ; R > 1 ;
4 ; 12x3 ; P > R ; 0:P>R
4 ; 12x3 13x3 14x3 ; P > 0 ; 0:P>0
4 ; 3x12 3x13 3x14 ; P > 1 ; 0:P>1
2x2 ; 10x5 9x5 3x5 1x3 ; 0,0 > R,R ; 1:0>R 0:0>R
2x2 ; 10x5 9x5 3x5 1x3 ; 0,1 > R,R ; 1:1>R 0:0>R
4 ; 8x8 8x8x8 8x5 5x8 5x5 ; 0 > 1 ; 0:0>1
4 ; 8x8 8x8x8 8x5 5x8 5x5 ; 1 > 0 ; 0:1>0
2x2 ; 8x8 8x8x8 8x5 5x8 5x5 ; 0,1 > 0,0 ; 1:1>0
2x2 ; 8x8 8x8x8 8x5 5x8 5x5 ; 0,1 > 1,0 ; 1:1>R 0:0>1
2x2 ; 8x8 8x8x8 8x5 5x8 5x5 ; 0,0 > 1,1 ; 1:0>R 0:0>1
2x2 ; 8x8x8 ; 0,2 > 1,0 ; 1:2>R 0:0>1
2x2 ; 8x8x8 ; 1,1 > 1,2 ; 1:1>2
2x2x2 ; 8x8x8 ; 0,0,0 > 1,1,1 ; 2:0>R 1:0>R 0:0>1
2x2x2 ; 8x8x8 ; 0,1,0 > 1,0,0 ; 2:0>R 1:1>R 0:0>1
2x2x2 ; 8x8x8 ; 0,1,2 > 2,1,0 ; 2:2>R 0:0>2
2x2x2 ; 8x8x8 ; 1,0,0 > R,0,0 ; 0:1>R
2x2x2 ; 8x8x8 ; 1,R,0 > R,0,0 ; 2:0>R 0:1>R
2x2x2 ; 8x8x8 ; 0,0,1 > 0,1,2 ; 2:1>2 1:0>1
"""


def redistributions() -> Iterator[tuple[str, str, str, str, str]]:
    """Mesh, shape, the dims that axes split before and after, and steps."""
    for row in REDISTRIBUTIONS.strip().splitlines():
        mesh, shapes, placements, steps = (part.strip() for part in row.split(";"))
        before, after = placements.split(" > ")
        yield from ((mesh, shape, before, after, steps) for shape in shapes.split())


PADDED_ONCE = {"10x5": 180, "9x5": 180}  # over both axes, as GSPMD does, where DTensor pads along one after the other


def placed(placements: str) -> str:
    """The layout rules of one dim for each mesh axis."""
    split: dict[str, list[str]] = {}
    for k, dim in enumerate(placements.split(",")):
        if dim.isdigit():
            split.setdefault(f"d{dim}", []).append(f"x{k}")
    return " ".join(f"{d}:{','.join(axes)}" for d, axes in split.items())


def bytes_of_dtensor(mesh: str, shape: str, before: str, steps: str) -> int:
    """The bytes that one device sends in these steps: blocks are padded to the longest along the dims that change."""
    sizes, dims, held = [int(n) for n in mesh.split("x")], [int(n) for n in shape.split("x")], before.split(",")
    sent = 0
    for step in steps.split():
        k, change = step.split(":")
        old, new = change.split(">")
        n, axis, block = sizes[int(k)], int(k), list(dims)
        for other, dim in enumerate(held):
            if dim.isdigit() and other != axis:
                block[int(dim)] = -(-block[int(dim)] // sizes[other])
        for dim in {old, new} - {"R", "P"}:
            block[int(dim)] = -(-block[int(dim)] // n)
        each = 4 * math.prod(block)
        sent += 2 * (n - 1) * each // n if (old, new) == ("P", "R") else (n - 1) * each
        held[axis] = new
    return sent


def test_dtensor_tests_61_redistributions():
    assert len([*redistributions()]) == 61


@pytest.mark.parametrize("case", [*redistributions()])
def test_a_redistribution_sends_at_most_the_bytes_of_dtensor(case: tuple[str, ...]):
    mesh, shape, before, after, steps = case
    on = " ".join(f"x{k}:{n}" for k, n in enumerate(mesh.split("x")))
    pending = "P" in before
    overrides = {"x": "parts:x0" if pending else placed(before), "result": placed(after)}
    text = " ".join(f"d{i}:{n}" for i, n in enumerate(shape.split("x")))
    spec = md.spec(f"parts:4 {text}" if pending else text)
    f = md.compile(lambda x: {"result": md.sum(x, "parts") if pending else x}, on, md.Layout("", overrides=overrides))
    program = f.program(spec)
    most = bytes_of_dtensor(mesh, shape, before, steps)
    most = PADDED_ONCE.get(shape, most) if (before, after) == ("0,0", "R,R") else most
    assert sum(record.wire_bytes for record in program.collectives) <= most
    if any(n % 2 for n in spec.shape):  # other laws test dims that divide
        value = np.arange(math.prod(spec.shape), dtype=np.float32).reshape(spec.shape)
        result = md.simulate(program, md.tensor(value, spec.dims))[0]
        assert np.array_equal(result, value.sum(0) if pending else value)
