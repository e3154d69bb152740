"""A region sees blocks without padding and sends nothing; what it may not hold is an error that says so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.joined import calls
from tests.lowering.programs import same_bits
from tests.stablehlo import cost_law

X, W = md.spec("b:4 c:6", "float64"), md.spec("c:6", "float64")


def loss(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    scaled = md.local(lambda x, w: x * w - md.max(x, "c"), x, w, out="b c", whole="c")
    total = md.local(lambda y, w: md.sum(y * y, "b") * w, scaled, w, out="c")
    return md.sum(md.abs(total))


@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        ("", set()),
        ("b:r", {"all_reduce"}),
        ("c:s", {"all_gather", "all_reduce"}),
        ("b:r; c:s", {"all_gather", "all_reduce"}),
    ],
)
def test_what_a_region_needs_is_sent_around_it(layout: str, sent: set[str]) -> None:
    step = md.compile(md.value_and_grad(loss, argnums=(0, 1)), "r:2 s:3", layout)
    program = step.program(X, W)
    kinds = [c.kind for c in program.collectives]
    assert set(kinds) == sent
    assert layout != "b:r" or len(kinds) == 2  # the sum over b, and the gradient of w
    assert cost_law(program, step.lower(X, W).as_text()) == len(kinds)
    rng = np.random.default_rng(0)
    x, w = (md.tensor(rng.integers(-3, 4, [d.size for d in v.dims]).astype("float64"), v.dims) for v in (X, W))
    value, grads = md.value_and_grad(loss, argnums=(0, 1))(x, w)
    wanted = [t.numpy() for t in (value, *grads)]
    assert same_bits(md.simulate(program, x, w), wanted)
    got, found = step(x, w)
    assert same_bits([t.numpy() for t in (got, *found)], wanted)


def test_a_split_dim_has_the_size_of_a_block() -> None:
    seen: list[str] = []

    def f(x: md.Tensor) -> md.Tensor:
        seen.append(str(x.dims))
        return md.broadcast(md.sum(x, "b"), "part:1 c") * x.shape[0]

    step = md.compile(lambda x: md.local(f, x, out="part:1 c"), "r:2", "b:r; part:r")
    ones = md.tensor(np.ones((4, 6)), "b c")
    assert step(ones).numpy().tolist() == [[8.0] * 6]  # two blocks of two rows, each 2 * 2
    assert set(seen) == {"(b=4, c=6)", "(b=2, c=6)"}


@pytest.mark.parametrize("policy", ["nothing", "collectives", "offload"])
def test_regions_in_a_loop_differentiate_twice(policy: str) -> None:
    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> Any:
            y = md.local(lambda x, w: md.sum(x * x, "b") * w, x, w, out="c")
            return md.local(lambda x, y: md.sin(x + md.sum(y, "c")), x, y, out="b c", whole="c"), None

        return md.sum(md.scan(md.checkpoint(layer, policy), x, w, over="t")[0])

    def twice(x: md.Tensor, w: md.Tensor) -> Any:
        return md.grad(lambda x, w: md.sum(md.square(md.grad(f)(x, w))), argnums=(0, 1))(x, w)

    rng = np.random.default_rng(0)
    x, w = md.tensor(rng.normal(size=(4, 6)) / 9, "b c"), md.tensor(rng.normal(size=(3, 6)) / 9, "t c")
    wanted = twice(x, w)
    layouts = ("b:r", "c:s", "b:r; c:s")
    ran = calls(*((md.compile(twice, "r:2 s:3", layout), (x, w)) for layout in layouts))
    for layout, results in zip(layouts, ran, strict=True):
        for got, there in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got.numpy(), there.numpy(), rtol=1e-10, atol=1e-12, err_msg=layout)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize(("mesh", "layout"), [("r:4", "b:r"), ("r:4 s:2", "b:r; c:s")])
def test_a_region_never_reads_padding(rows: int, mesh: str, layout: str) -> None:
    """Each device runs the function on the rows that it has; in the padding, these gradients would be 0 / 0."""

    def by_jax(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        y = md.local(lambda x, w: jnp.sort(x / jnp.sqrt(x @ w), 1), x, w, out="b k", split="b")
        return md.sum(y) + md.sum(md.local(lambda x: jnp.log(x).sum(0), x, out="c", contract="b"))

    def by_md(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        y = md.local(lambda x, w: x / md.sqrt(md.dot(x, w, "c")), x, w, out="b c", whole="c")
        return md.sum(y) + md.sum(md.local(lambda x: md.sum(md.log(x), "b"), x, out="c"))

    rng = np.random.default_rng(rows)
    x, w = md.tensor(rng.uniform(1, 2, (rows, 6)), "b c"), md.tensor(rng.uniform(1, 2, (6, 6)), "c k")
    for f, v in ((by_jax, w), (by_md, md.tensor(w.numpy()[0], "c"))):
        step = md.value_and_grad(f, argnums=(0, 1))
        alone, compiled = md.compile(step, ""), md.compile(step, mesh, layout)
        for value in (1.5, 0.0, np.inf, np.nan):  # of one element
            xs = md.tensor(np.where(np.arange(6 * rows).reshape(rows, 6) == 3, value, x.numpy()), "b c"), v
            wanted, run = ([np.asarray(y.numpy()) for y in jax.tree.leaves(g(*xs))] for g in (alone, compiled))
            for got in (run, md.simulate(compiled.program(*xs), *xs)):
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_what_every_device_has_counts_once_in_a_gradient() -> None:
    """One result lacks the dim along which the function is split, so all devices compute it."""

    def loss(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        y, z = md.local(lambda x, w: (x * w, w**2), x, w, out=("b c", "c"), split="b")
        return md.sum(y * y) + md.sum(z)

    rng = np.random.default_rng(0)
    x, w = md.tensor(rng.normal(size=(6, 6)), "b c"), md.tensor(rng.normal(size=6), "c")
    for mesh in ("r:3", "r:4"):
        grads = md.compile(md.grad(loss, (0, 1)), mesh, "b:r")(x, w)
        for got, wanted in zip(grads, md.grad(loss, (0, 1))(x, w), strict=True):
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-12)


def test_what_a_region_refuses() -> None:
    whole: Any = lambda x, w: md.local(lambda x: x + w, x, out="b c")  # noqa: E731 - shown in the error
    with pytest.raises(md.TraceError, match="uses a tensor from outside"):
        md.compile(whole, "r:2").program(X, W)
    with pytest.raises(md.ShapeError, match=r"returned \[b=4\], and out= asks for \[b=4 c=6\]"):
        md.compile(lambda x: md.local(lambda x: md.sum(x, "c"), x, out="b c"), "r:2").program(X)
    four: Any = lambda x: md.local(lambda x: md.concat([md.slice(x, "b", 0, 1)] * 4, "b"), x, out="b c")  # noqa: E731
    md.compile(four, "r:2").program(X)
    with pytest.raises(md.ShapeError, match=r"returned \[b=4 c=6\], and out= asks for \[b=2 c=6\]"):
        md.compile(four, "r:2", "b:r").program(X)
    with pytest.raises(md.TraceError, match="must contain no loops or branches, and this is scan"):
        md.local(lambda x: md.scan(lambda c, r: (c + r, None), 0.0, x, over="b")[0], md.tensor([1.0], "b"), out="")
