"""What the table cannot prove is tried on random data: kernels, and blocks of one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import meshdsl as md

F = Callable[..., Any]


def kernel(body: Callable[..., None], rows: int = 1, *, scratch: bool = False, total: bool = False) -> F:
    """A kernel with a grid over the rows of [row, 4], for TPUs; `total`: its result is one row."""

    def f(x: Any) -> Any:
        block = pl.BlockSpec((rows, 4), lambda i: (i, 0))
        out = pl.BlockSpec((1, 4), lambda i: (0, 0)) if total else block
        shape = jax.ShapeDtypeStruct((1, 4) if total else x.shape, x.dtype)
        own = [pltpu.VMEM((rows, 4), x.dtype)] if scratch else []
        return pl.pallas_call(
            body, shape, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=out, scratch_shapes=own
        )(x)

    return f


def doubled(x: Any, y: Any, *own: Any) -> None:
    if own:
        own[0][...] = x[...]
    y[...] = 2 * (own[0] if own else x)[...]


def mixed(x: Any, y: Any) -> None:
    y[...] = x[...] + x[...].sum(0, keepdims=True)


def numbered(x: Any, y: Any) -> None:
    y[...] = x[...] * pl.program_id(0)


def summed(x: Any, y: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        y[...] = jnp.zeros((1, 4), x.dtype)

    y[...] += x[...]


def running(x: Any, y: Any, own: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        own[...] = jnp.zeros((1, 4), x.dtype)

    own[...] += x[...]
    y[...] = own[...]


RIGHT: dict[str, tuple[F, str, str]] = {
    "kernel": (kernel(doubled), "row column", "row"),
    "kernel with scratch memory": (kernel(doubled, scratch=True), "row column", "row"),
    "sum over the grid": (kernel(summed, total=True), "one column", ""),
}
# none of these is seen by the table: it does not have pallas_call
WRONG: dict[str, tuple[F, str, str, str]] = {
    "rows of one grid step": (kernel(mixed, 2), "row column", "row", "a result depends on other places"),
    "number of the grid step": (kernel(numbered), "row column", "row", "the results differ"),
    "state across grid steps": (kernel(running, scratch=True), "row column", "row", "the results differ"),
    "square of a sum": (lambda x: kernel(summed, total=True)(x) ** 2, "one column", "", "the results differ"),
    "never finite": (lambda x: jnp.log(-1 - kernel(doubled)(x) ** 2), "row column", "row", "no result is finite"),
}


def x32() -> md.Tensor:
    return md.tensor(np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), "row column")


def local(f: F, out: str, split: str) -> Callable[[md.Tensor], Any]:
    return lambda x: md.local(f, x, out=out, split=split, contract="" if split else "row")


@pytest.mark.parametrize("name", RIGHT)
def test_functions_that_pass_a_trial_say_that_they_are_tested(name: str) -> None:
    f = local(*RIGHT[name])
    for mesh in ("r:2", "r:8"):
        program = md.compile(f, mesh, "row:r").program(x32())
        assert "check='tested, not proven'" in str(program)
    assert "tested" not in str(md.compile(local(jnp.tanh, "row column", "row"), "r:8", "row:r").program(x32()))


@pytest.mark.parametrize("name", WRONG)
def test_functions_that_fail_a_trial_are_refused(name: str) -> None:
    f, out, split, how = WRONG[name]
    with pytest.raises(md.ShapeError, match=f"pallas_call is not known to keep places; on random data, .*{how}"):
        local(f, out, split)(x32())


def test_a_dtype_that_only_a_block_of_one_element_has_is_found() -> None:
    def f(x: Any) -> Any:
        return x.astype("float32").astype("float64") if x.shape[0] == 1 else x

    x = md.tensor(np.ones((8, 4)), "row column")
    with pytest.raises(md.ShapeError, match="one element; on random data, the results differ"):
        md.compile(local(f, "row column", "row"), "r:8", "row:r").program(x)


def test_large_functions_are_tried_on_small_arrays() -> None:
    def f(x: Any) -> Any:
        return x @ x.mT @ x

    def by_size(x: Any) -> Any:  # too large to be run, and another function on small arrays
        return f(x) if x.shape[1] == 4096 else lax.sort(x, dimension=0)

    x = md.spec("row:8 n:4096 m:4096", "float32")
    program = md.compile(lambda x: md.local(f, x, out="row n m", split="row"), "r:8", "row:r").program(x)
    assert "check='tested, not proven'" in str(program)
    with pytest.raises(md.ShapeError, match="one element; on random data, it is too large to be run"):
        md.compile(lambda x: md.local(by_size, x, out="row n m", split="row"), "r:8", "row:r").program(x)
