"""Plans send at most what Shardy's do, in its own tests (`sdy/transforms/export/test/reshard_to_collectives.mlir`).

A row is a mesh, a float32 shape, the axes of each of its dims before and after, and the bytes that one device sends in
the collectives that Shardy's test expects. An axis of which Shardy uses a part is several axes here. Left out are cases
in which nothing is sent, dims that do not divide, and other orders of devices.
"""

import pytest

from meshdsl.dims import dims
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.partition.planner import Reshard

CASES = """
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


def sharding(text: str) -> Sharding:
    return Sharding.of({f"d{i}": () if axes == "-" else axes.split(",") for i, axes in enumerate(text.split())})


@pytest.mark.parametrize("row", CASES.strip().splitlines())
def test_at_most_the_bytes_of_shardy(row: str):
    mesh, sizes, source, target, most = (part.strip() for part in row.split(";"))
    shape = dims(" ".join(f"d{i}:{n}" for i, n in enumerate(sizes.split("x"))))
    assert Reshard(sharding(source), sharding(target), shape, Mesh(mesh), Extents(), 4).cost <= int(most)
