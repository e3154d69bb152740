"""Operations along a split dim send only what moves, and change no result: bitwise, padding poisoned, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md

SPLITS = (
    ("a:4", "x:a"),
    ("a:2 b:3", "x:a,b"),
    ("a:2 b:3", "x:b,a"),
    ("a:3", "x:a"),
    ("a:2 b:2", "x:a y:b"),
    ("a:8", "x:a"),
)
SIZES = (1, 2, 5, 8, 13)


def integers(rng: np.random.Generator, sizes: tuple[int, ...], dims: str) -> md.Tensor:
    return md.tensor(rng.integers(-4, 5, sizes).astype(np.float32), dims)


def same_everywhere(f: Callable[..., Any], args: list[Any], mesh: str, layout: str) -> md.Program:
    """The program of f, whose simulation on every device gives exactly what its kernels give undivided."""
    compiled = md.compile(f, "one:1")
    program = compiled.under(mesh, layout).program(*args)  # of the same trace
    wanted = md.simulate(compiled.program(*args), *args)
    for got, want in zip(md.simulate(program, *args), wanted, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=f"{mesh} {layout}\n{program}")
    return program


def both_ways(f: Callable[..., Any], args: list[Any], mesh: str, layout: str) -> None:
    def loss(*xs: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        y = f(*xs)
        return md.sum(md.square(y) * 2), y

    floating = tuple(i for i, x in enumerate(args) if x.dtype.kind == "f")
    same_everywhere(md.value_and_grad(loss, argnums=floating, has_aux=True), args, mesh, layout)


def legal(layout: str, mentioned: str) -> str:
    return " ".join(rule for rule in layout.split() if rule.partition(":")[0] in mentioned)


@pytest.mark.parametrize(("mesh", "layout"), SPLITS)
def test_moves_along_a_split_dim(mesh: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    for size in SIZES:
        t, u = integers(rng, (size, 3), "x y"), integers(rng, (3, 3), "x y")
        start, stride = int(rng.integers(0, size)), int(rng.integers(1, 4))
        count = (size - 1 - start) // stride + 1
        both_ways(lambda t, s=start, c=count, d=stride: md.slice(t, "x", s, c, d), [t], mesh, layout)
        both_ways(lambda t, s=start: md.pad(t, "x", s, 2, value=5), [t], mesh, layout)
        both_ways(lambda t, n=size: md.pad(t, "x", -min(2, n - 1), 1, inner=2), [t], mesh, layout)
        both_ways(lambda t, s=start: md.roll(t, "x", 2 * s - 3), [t], mesh, layout)
        both_ways(lambda t, s=start: md.shift(t, "x", s - 2, fill=1), [t], mesh, layout)
        both_ways(lambda t: md.reverse(t, "x"), [t], mesh, layout)
        both_ways(lambda t, u: md.concat([t, u, t], "x"), [t, u], mesh, layout)


@pytest.mark.parametrize(("mesh", "layout"), (*SPLITS, ("a:2 b:2", "x:a y:b z:a"), ("a:4", "x:a q:a")))
def test_sums_orders_and_reshapes_along_a_split_dim(mesh: str, layout: str) -> None:
    rng = np.random.default_rng(1)
    for size in SIZES:
        t = integers(rng, (size, 3), "x y")
        z, q, p, k = (md.Dim(*d) for d in (("z", 3 * size), ("q", 3), ("p", size), ("k", min(size, 3))))
        for exclusive in (False, True):
            for reverse in (False, True):
                both_ways(
                    lambda t, e=exclusive, r=reverse: md.cumsum(t, "x", exclusive=e, reverse=r),
                    [t], mesh, legal(layout, "xy"),
                )  # fmt: skip
        same_everywhere(lambda t, k=k: md.top_k(t, "x", k), [t], mesh, legal(layout, "xy"))
        both_ways(lambda t, z=z: md.flatten(t, "x y", z), [t], mesh, legal(layout, "xyz"))
        both_ways(lambda t, q=q, p=p: md.reshape(t, [q, p]), [t], mesh, legal(layout, "xyq"))
        both_ways(lambda t, n=size: md.unstack(t, "x")[n // 2], [t], mesh, legal(layout, "xy"))
        both_ways(lambda t: md.stack([t, t + 1, t * 2], "s"), [t], mesh, legal(layout, "xy"))


@pytest.mark.parametrize("into", ["x", "y", "z", "w"])
@pytest.mark.parametrize("layout", ["x:a", "x:a z:b", "y:b x:a", "x:a,b", "z:a"])
def test_merges_beside_dims_of_size_one(layout: str, into: str) -> None:
    rng = np.random.default_rng(3)
    for sizes in ((1, 3, 2), (3, 1, 2), (3, 2, 1), (1, 3, 1)):
        for order in ("z x y", "x z y", "x y z"):
            t = integers(rng, sizes, order)
            both_ways(lambda t, order=order: md.flatten(t, order, into), [t], "a:2 b:2", layout)


@pytest.mark.parametrize(
    ("dims", "into", "mesh", "layout"),
    [
        ("x:4 y:8", "y:4 x:8", "a:3 b:2", "x:b; y:a"),
        ("x:6 y:2 z:2 w:3", "w:2 x:6 y:3 z:2", "a:3 b:2", "w:a,b"),
        ("x:5 y:8 z:2 w:2", "y:5 x:2 z:2 w:8", "a:3 b:4", "w:a; x:b"),
        ("x:6 y:6 z:3", "z:36 x:3", "a:3 b:4", "x:b"),
    ],
)
def test_reshapes_into_names_of_other_dims(dims: str, into: str, mesh: str, layout: str) -> None:
    t = integers(np.random.default_rng(4), tuple(d.size for d in md.dims(dims)), dims)
    both_ways(lambda t: md.reshape(t, into), [t], mesh, layout)


@pytest.mark.parametrize(("mesh", "layout"), SPLITS)
def test_slices_at_a_traced_place(mesh: str, layout: str) -> None:
    rng = np.random.default_rng(2)
    for size in SIZES:
        k = max(1, size // 2)
        t, u = integers(rng, (size, 3), "x y"), integers(rng, (k, 3), "x y")
        for start in (-2, 0, size // 3, size):
            at = md.tensor(np.int32(start))
            both_ways(lambda t, at, k=k: md.dynamic_slice(t, "x", at, k), [t, at], mesh, layout)
            both_ways(lambda t, u, at: md.dynamic_update_slice(t, u, "x", at), [t, u, at], mesh, layout)


SPATIAL = (
    ("a:2", "h:a"),
    ("a:4", "h:a"),
    ("a:2 b:2", "h:a w:b"),
    ("a:2 b:2 c:2", "b:c h:a w:b"),
    ("a:2 b:2", "h:a c:b"),
    ("a:3 b:2", "h:b,a"),
    ("a:2 b:2", "h:a o:b"),
    ("a:8", "h:a"),
)


@pytest.mark.parametrize(("mesh", "layout"), SPATIAL)
def test_windows_along_split_dims(mesh: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    done = 0
    while done < 6:
        high, wide, k, m = (int(rng.integers(1, top)) for top in (14, 9, 5, 4))
        x, w = integers(rng, (2, high, wide, 3), "b h w c"), integers(rng, (k, m, 3, 2), "kh kw c o")
        options: dict[str, Any] = {
            "stride": {"h": int(rng.integers(1, 4)), "w": int(rng.integers(1, 3))},
            "dilation": {"h": int(rng.integers(1, 3))},
            "base_dilation": {"h": int(rng.integers(1, 4))},
            "padding": [
                "same",
                "valid",
                {"h": (int(rng.integers(-1, 5)), int(rng.integers(-1, 4))), "w": (1, 0)},
            ][int(rng.integers(0, 3))],
        }

        def f(x: md.Tensor, w: md.Tensor, options: dict[str, Any] = options) -> md.Tensor:
            return md.conv(x, w, {"h": "kh", "w": "kw"}, out="b h w o", **options)

        try:
            empty = 0 in f(x, w).shape
        except md.ShapeError:  # a negative padding may leave nothing
            continue
        if empty:
            continue
        done += 1
        both_ways(f, [x, w], mesh, layout)
        pool = {"h": min(3, high), "w": min(2, wide)}

        def pooled(x: md.Tensor, pool: dict[str, int] = pool) -> md.Tensor:
            return md.max_pool(x, pool, stride={"h": 2, "w": 1}, padding="same")

        same_everywhere(pooled, [x], mesh, legal(layout, "bhwc"))


def test_a_halo_is_all_that_a_convolution_sends() -> None:
    x, w = md.spec("batch:4 height:16 width:8 c:2"), md.spec("kh:3 kw:3 c:2 o:2")
    step = md.compile(
        lambda x, w: md.conv(x, w, {"height": "kh", "width": "kw"}, out="batch height width o"),
        "rows:2 cols:4",
        "batch:rows height:cols",
    )
    line = 2 * 8 * 2 * 4  # a line of the image on one device: batch, width, channels, float32
    assert [(r.kind, r.axes, r.bytes) for r in step.program(x, w).collectives] == [("permute", ("cols",), line)] * 2


def test_what_moves_is_what_is_sent() -> None:
    t = md.spec("x:4096 y:4")

    def sent(f: Callable[[md.Tensor], md.Tensor]) -> dict[str, int]:
        records = md.compile(f, "m:8", "x:m").program(t).collectives
        return {kind: sum(r.bytes for r in records if r.kind == kind) for kind in {r.kind for r in records}}

    row, block = 4 * 4, 512 * 4 * 4
    assert sent(lambda t: md.shift(t, "x", 3)) == {"permute": 3 * row}
    assert sent(lambda t: md.roll(t, "x", -2)) == {"permute": 2 * row}
    assert sent(lambda t: md.reverse(t, "x")) == {"permute": block}
    assert sent(lambda t: md.cumsum(t, "x")) == {"all_gather": 8 * row}
    assert sent(lambda t: md.slice(t, "x", 0, 2048, 2)) == {}
    for by in (1, -3):
        loss = lambda t, by=by: md.sum(md.square(md.shift(t, "x", by)))  # noqa: E731 - it belongs to this line
        assert sent(md.grad(loss)) == {"permute": 2 * abs(by) * row}  # forward and back, though the shift crops rows


def test_a_shift_over_a_dim_of_two_blocks_is_a_permute() -> None:
    for blocks in (2, 4):
        step = md.compile(lambda t: md.shift(t, "x", 1), f"m:{blocks}", "x:m")
        (record,) = step.program(md.spec(f"x:{blocks} y:4")).collectives
        assert (record.kind, record.bytes) == ("permute", 4 * 4)
