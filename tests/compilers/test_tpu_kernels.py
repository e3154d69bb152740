"""Pallas kernels by the TPU compiler, without a TPU: a user's, through md.local, and those of md.attention.

These tests need the extra `aot`; `make test-aot` runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding

import meshdsl as md
from meshdsl.lowering.emit import emit, partition_spec
from meshdsl.targets.kernel_choice import with_kernels
from meshdsl.targets.tpu import TPU

pytestmark = pytest.mark.aot


def stablehlo(program: md.Program) -> str:
    """The StableHLO of a program for TPUs."""
    mesh, shapes = program.mesh.abstract(), list[Any]()
    for v in program.ins:
        sharding = NamedSharding(mesh, partition_spec(v.dims, v.sharding))
        shapes.append(jax.ShapeDtypeStruct(program.stored_shape(v), v.dtype, sharding=sharding))
    function = jax.jit(emit(with_kernels(program, TPU), mesh, TPU.emission))
    return function.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


def rows(kernel: Any, *xs: Any) -> Any:
    """A kernel over blocks of eight rows."""
    spec = pl.BlockSpec((8, xs[0].shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(xs[0].shape, xs[0].dtype)
    grid = (xs[0].shape[0] // 8,)
    return pl.pallas_call(kernel, shape, grid=grid, in_specs=[spec] * len(xs), out_specs=spec)(*xs)


def _forward(x_ref: Any, y_ref: Any) -> None:
    x = x_ref[...]
    y_ref[...] = x / (1 + jnp.sum(x * x, axis=1, keepdims=True))


def _backward(x_ref: Any, ct_ref: Any, out_ref: Any) -> None:
    x, ct = x_ref[...], ct_ref[...]
    n = 1 + jnp.sum(x * x, axis=1, keepdims=True)
    out_ref[...] = ct / n - 2 * x * jnp.sum(ct * x, axis=1, keepdims=True) / (n * n)


@jax.custom_vjp
def scale(x: Any) -> Any:
    return rows(_forward, x)


scale.defvjp(lambda x: (rows(_forward, x), x), lambda x, ct: (rows(_backward, x, ct),))


@pytest.fixture
def narrow() -> Iterator[None]:
    """Types of 32 bits: an index map such as (i, 0) has numbers of 64 bits otherwise, which do not compile for TPUs."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("layout", ["", "batch:a", "batch:a,b", "batch:a; channel:b"])
def test_a_users_kernel_compiles_under_a_layout_with_its_gradient(layout: str) -> None:
    def loss(x: md.Tensor) -> md.Tensor:
        return md.sum(md.local(scale, x, out="batch channel", split="batch"))

    program = md.compile(md.value_and_grad(loss), "a:2 b:2", layout).program(md.spec("batch:64 channel:256"))
    assert stablehlo(program).count("tpu_custom_call") >= 2
    found = md.compile_for("tpu:v5e:2x2", program)
    assert found.fits and not [change for change in found.changes if change.words]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("layout", "method"), [("heads:x", "auto"), ("length:x", "ring")])
def test_attention_kernels_take_a_fraction_of_the_cycles(layout: str, method: str) -> None:
    """Collectives are those of the blockwise form. The compiler's cycles leave the kernels out: see the benchmark."""
    x = md.spec("length:2048 heads:8 head:128", "bfloat16")

    def total(*ins: md.Tensor) -> md.Tensor:
        return md.sum(md.cast(md.attention(*ins, causal=True, method=method), "float32"))

    found: dict[str, md.Compilation] = {}
    for kernel in ("auto", "blockwise"):
        step = md.compile(md.grad(total, (0, 1, 2)), "x:4", layout, attention_kernel=kernel)
        assert ("tpu_custom_call" in stablehlo(step.program(x, x, x))) == (kernel == "auto")
        found[kernel] = md.compile_for("tpu:v5e:2x2", step.program(x, x, x))
    fused, blockwise = found["auto"], found["blockwise"]
    sent = [Counter({c.kind: c.bytes * c.count for c in each.collectives}) for each in (fused, blockwise)]
    assert sent[0] == sent[1]
    assert fused.cycles and blockwise.cycles and fused.cycles < blockwise.cycles / 2


@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_attention_kernels_fit_vector_memory(chip: str) -> None:
    """The largest blocks and heads that are taken, in float32, with segments; keys in parts in the gradient."""
    q, k = md.spec("length:1024 heads:4 group:2 head:256"), md.spec("length:1024 heads:4 head:256")
    ids = md.spec("length:1024", "int32")

    def total(q: md.Tensor, k: md.Tensor, v: md.Tensor, ids: md.Tensor) -> md.Tensor:
        return md.sum(md.attention(q, k, v, causal=True, window=700, segment_ids=ids))

    step = md.compile(md.grad(total, (0, 1, 2)), "x:4", "heads:x", attention_kernel="pallas")
    assert md.compile_for(f"tpu:{chip}", step.program(q, k, k, ids)).fits


def test_grouped_products_are_ragged_dots_on_tpus() -> None:
    """The products and the gradient of the vectors; that of the matrices is computed block by block."""

    def total(x: md.Tensor, w: md.Tensor, i: md.Tensor) -> md.Tensor:
        return md.sum(md.square(md.cast(md.grouped_dot(x, w, i, by="expert", over="model"), "float32")))

    x, w = md.spec("batch:4 length:1024 model:512", "bfloat16"), md.spec("expert:8 model:512 hidden:1024", "bfloat16")
    program = md.compile(md.grad(total, (0, 1)), "r:4", "batch:r").program(
        x, w, md.spec("batch:4 length:1024", "int32")
    )
    assert stablehlo(program).count('"chlo.ragged_dot"') == 2
    compilation = md.compile_for("tpu:v5e:2x2", program, effort="O1")
    assert compilation.memory is not None and compilation.fits
    assert (
        0.75 < md.memory(program).peak / compilation.memory.peak < 1.1
    )  # sorted copies of the vectors are not predicted
