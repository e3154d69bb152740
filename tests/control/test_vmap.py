"""`md.vmap` is the stacked loop over the places of a dim: every operation, its gradients, loops and random numbers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import backend
from meshdsl.dims import names
from tests.laws import INDICES, Row, looped, rows, run
from tests.lowering.maker import LIMIT, Draw, Maker, weights, whole_numbers
from tests.lowering.programs import same_bits
from tests.lowering.test_layout_law import close, weighted

ROWS = [row for row in rows() if row.ins]
FEW = [row for k, row in enumerate(ROWS) if k > 110 or k % 12 == 0]  # of the elementwise and reducing rows, some
QUICK = {"xla_backend_optimization_level": 0}
SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "t": 4}


def compared(row: Row, mapped: list[bool], seed: int, v: int) -> None:
    """Values, and gradients of a weighted sum, by NumPy's kernels."""
    both = [row.vectorised(mapped), row.vectorised(mapped, looped(row, mapped))]
    rng = np.random.default_rng([seed, *row.name.encode()])
    sizes, dtype = {**SIZES, "v": v}, "" if row.exact else "float64"
    index = INDICES[seed % len(INDICES)]
    arrays = both[0].arrays(rng, sizes, dtype=dtype, index=index)
    graphs = [md.compile(weighted(one), "", "").graph(*one.types(sizes, dtype, index)) for one in both]
    with np.errstate(all="ignore"):
        ours, theirs = (run(graph, arrays, backend.NumPy) for graph in graphs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert close(row, a, b), f"result {k} of {row.name} mapped {mapped}"


@pytest.mark.parametrize("row", FEW, ids=str)
def test_vmap_is_the_loop(row: Row) -> None:
    choices = [c for c in itertools.product([True, False], repeat=len(row.ins)) if any(c)]
    compared(row, list(Draw(row.name).choice(choices)), 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_vmap_is_the_loop_for_every_choice_of_operands(row: Row) -> None:
    choices = [c for c in itertools.product([True, False], repeat=len(row.ins)) if any(c)]
    for k, mapped in enumerate(choices):
        for v in (1, 3):
            compared(row, list(mapped), k, v)


def random_program(seed: int) -> tuple[Any, list[md.Tensor]]:
    """A function of two tensors, and tensors of which one or both have the dim `v` too."""
    rng, numbers = Draw(seed), np.random.default_rng(seed)
    pool = [md.Dim(name, rng.choice([1, 2, 3, 5])) for name in "abc"]
    v = md.Dim("v", rng.choice([1, 2, 3]))
    shapes = [tuple(rng.sample(pool, rng.choice([1, 2]))) for _ in range(2)]
    shapes = [(v, *shapes[0]), (v, *shapes[1]) if rng.random() < 0.5 else shapes[1]]

    def f(*xs: md.Tensor) -> Any:
        maker = Maker(Draw(seed + 1), list(xs), ["x", "y"])
        maker.kinds = [kind for kind in maker.kinds if kind not in ("op_vmap", "op_shard")]
        for _ in range(4):
            maker.step()
        return maker.live[-1]

    return f, [whole_numbers(numbers, shape) for shape in shapes]


def stacked(f: Any, xs: list[md.Tensor]) -> md.Tensor:
    cut = [md.unstack(x, "v") if "v" in names(x.dims) else [x] * xs[0].dims[0].size for x in xs]
    return md.stack([f(*one) for one in zip(*cut, strict=True)], "v")


def weighted_gradient(f: Any) -> Any:
    def loss(xs: list[md.Tensor]) -> Any:
        y = f(xs)
        return md.sum(y * weights(y.dims)), y

    return md.value_and_grad(loss, has_aux=True)


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=str)
def test_vmap_of_random_programs_is_the_loop(seeds: range) -> None:
    for seed in seeds:
        f, xs = random_program(seed)

        pair = [lambda xs, f=f: md.vmap(f, over="v")(*xs), lambda xs, f=f: stacked(f, xs)]
        made = []
        for how in pair:
            graph = md.compile(weighted_gradient(how), "", "").graph(xs)
            with np.errstate(all="ignore"):
                made.append(run(graph, [x.numpy() for x in xs], backend.NumPy))
        large = any(not (np.abs(x) < LIMIT).all() for x in made[1] if x.dtype.kind == "f")
        assert large or same_bits(*made), f"seed {seed}"


@pytest.mark.parametrize(
    "draws",
    [
        (lambda k: md.random.normal(k, "n:5"), lambda k: jax.random.normal(k, (5,), "float32")),
        (lambda k: md.random.bits(k, dtype="uint64"), lambda k: jax.random.bits(k, (), "uint64")),
        pytest.param((lambda k: md.random.permutation(k, "n:5"), lambda k: jax.random.permutation(k, 5)),
                     marks=pytest.mark.slow),
        (lambda k: md.random.fold_in(md.random.split(k)[1], 7),
         lambda k: jax.random.key_data(jax.random.fold_in(jax.random.split(k)[1], 7))),
    ],
    ids=["normal", "bits", "permutation", "keys"],
)  # fmt: skip
@pytest.mark.usefixtures("at_once_in_jax")
def test_random_numbers_of_many_keys_are_those_of_jax_vmap(draws: Any) -> None:
    ours, theirs = draws
    keys = md.random.split(md.random.key(7), md.Dim("k", 3))
    wanted = jax.jit(lambda: jax.vmap(theirs)(jax.random.split(jax.random.key(7), 3)))()
    np.testing.assert_array_equal(md.vmap(ours, over="k")(keys).numpy(), wanted)
    grid = md.rename(md.broadcast(keys, "m:2 k key_word"), m="m")
    nested = md.vmap(ours, over="m k")(grid)
    np.testing.assert_array_equal(nested.numpy()[1], wanted)


def test_gradients_per_example_and_hessians_are_jaxs() -> None:
    rng = np.random.default_rng(0)
    w, x, y = rng.normal(size=(4, 3)), rng.normal(size=(5, 4)), rng.normal(size=(5, 3))

    def loss(w: md.Tensor, x: md.Tensor, y: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.tanh(md.einsum(x, w, out="o")) - y))

    def theirs(w: Any, x: Any, y: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ w) - y) ** 2)

    ours = md.vmap(md.grad(loss), over="batch")(md.tensor(w, "i o"), md.tensor(x, "batch i"), md.tensor(y, "batch o"))
    wanted = jax.jit(jax.vmap(jax.grad(theirs), (None, 0, 0)), compiler_options=QUICK)(w, x, y)
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-12)

    def cubes(x: md.Tensor) -> md.Tensor:
        return md.sum(x * x * x) * md.sum(x)

    def row(e: md.Tensor) -> md.Tensor:
        return md.grad(lambda x: md.sum(md.grad(cubes)(x) * e))(md.tensor([1.0, 2.0, -1.0], "i"))

    unit = md.tensor(np.eye(3), "j i")
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(x * x * x) * jnp.sum(x)), compiler_options=QUICK)(
        np.array([1.0, 2.0, -1.0])
    )
    compiled = md.compile(lambda unit: md.vmap(row, over="j")(unit), "", "")
    np.testing.assert_allclose(compiled(unit).numpy(), hessian, rtol=1e-5)


def dense(x: md.Tensor) -> md.Tensor:
    h = md.tanh(md.einsum(x, md.param("w", "io:3 hidden:4", init=md.init.normal(1.0)), out="batch hidden"))
    return md.layers(lambda h: h * md.param("scale", "hidden:4", init=md.init.ones()), h, over="layer:2")


@pytest.mark.usefixtures("at_once_in_jax")
def test_an_ensemble_inside_a_model_has_its_own_parameters() -> None:
    x = md.tensor(np.arange(6.0, dtype=np.float32).reshape(2, 3), "batch io")
    one, many = md.model(dense), md.model(lambda x: md.vmap(dense, over="member:3")(x))
    params = many.init(md.random.key(0), x)
    assert {path: str(p.dims) for path, p in params.items()} == {
        "w": "(member=3, io=3, hidden=4)",
        "scale": "(member=3, layer=2, hidden=4)",
    }
    y = many(params, x)
    apart = [one({path: md.unstack(p, "member")[i] for path, p in params.items()}, x) for i in range(3)]
    np.testing.assert_allclose(y.numpy(), np.stack([a.numpy() for a in apart]), rtol=1e-5)
    keys = md.random.split(md.random.key(1), md.Dim("member", 3))
    drawn = md.vmap(lambda key: one.init(key, x), over="member")(keys)
    np.testing.assert_array_equal(drawn["w"].numpy()[2], one.init(md.unstack(keys, "member")[2], x)["w"].numpy())
    np.testing.assert_allclose(md.vmap(one, over="member")(params, x).numpy(), y.numpy(), rtol=1e-5)


def test_the_new_dim_is_sharded_like_any_other() -> None:
    x = md.spec("batch:8 io:3")
    many = md.model(lambda x: md.vmap(dense, over="member:4")(x))
    step = md.grad(lambda params, x: md.sum(md.square(many(params, x))))
    program = md.compile(step, "rows:2 cols:4", "member:cols").program(many.specs(x), x)
    assert not program.collectives
    assert all(v.sharding.axes(v.dims[0]) == ("cols",) for v in program.outs)


def test_mistakes() -> None:
    x, y = md.tensor([1.0, 2.0], "k"), md.tensor([[1.0], [2.0]], "k n")
    for wrong, text in [
        (lambda: md.vmap(lambda a: a, over="z")(x), "no argument has that dim"),
        (lambda: md.vmap(lambda a: a * md.sum(y), over="k")(x), "a tensor has a dim of that name"),
        (lambda: md.vmap(lambda a: md.broadcast(a, "k:2"), over="k")(x), "a tensor has a dim of that name"),
        (lambda: md.vmap(lambda a: a, over="k:3")(x), "size"),
        (lambda: md.vmap(lambda a, b: a, over="k")(x, md.tensor([1.0], "k")), "two sizes"),
    ]:
        with pytest.raises(md.ShapeError, match=text):
            wrong()
