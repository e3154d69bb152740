"""md.softmax: its gradient, and what a loop saves for it."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir import Scan


def by_quotient(x: md.Tensor) -> md.Tensor:
    e = md.exp(x - md.stop_gradient(md.max(x, "b")))
    return e / md.sum(e, "b")


def test_softmax_gradients_of_first_and_second_order_are_those_of_the_quotient() -> None:
    rng = np.random.default_rng(0)
    x, w = (md.tensor(rng.normal(size=(3, 5)), "a b") for _ in range(2))

    def slope(softmax) -> md.Tensor:
        first = md.grad(lambda x: md.sum(w * md.square(softmax(x))))
        return md.grad(lambda x: md.sum(md.square(first(x))))(x)

    np.testing.assert_allclose(slope(lambda x: md.softmax(x, "b")).numpy(), slope(by_quotient).numpy(), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_in_a_loop_saves_one_value_in_the_dtype_of_its_result(dtype: str) -> None:
    def loss(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> tuple[md.Tensor, None]:
            p = md.softmax(md.einsum(x, w, out="a b"), "b", dtype)
            return md.cast(md.rename(p, b="c"), "float32"), None

        return md.sum(md.square(md.scan(layer, x, w, over="layer")[0]))

    graph = md.compile(md.grad(loss, argnums=(0, 1)), "rows:2").graph(md.spec("a:4 c:8"), md.spec("layer:3 c:8 b:8"))
    forward = next(eqn for eqn in graph.eqns if isinstance(eqn.control, Scan))
    saved = [str(v.type) for v in forward.outs[1:]]
    assert saved.count(f"{dtype}[layer=3 a=4 b=8]") == 1, saved
    assert len(saved) <= 2, "the input of each layer and its weights"


@pytest.mark.parametrize("function", [md.softmax, md.log_softmax])
def test_softmax_of_no_elements_has_none(function) -> None:
    x = md.tensor(np.zeros((3, 0)), "a b")
    step = md.value_and_grad(lambda x: md.sum(function(x, "b")))
    for value, slope in (step(x), md.compile(step, "rows:2", "a:rows")(x)):
        assert float(value) == 0.0 and slope.dims == x.dims


def test_multi_head_attention_to_no_keys_is_zero() -> None:
    @md.model
    def layer(x: md.Tensor, memory: md.Tensor) -> md.Tensor:
        return md.nn.multi_head_attention(x, md.Dim("heads", 2), md.Dim("head", 4), memory=memory)

    x, memory = md.ones("batch:2 length:3 model:8"), md.ones("batch:2 memory:0 model:8")
    assert not layer(layer.init(md.random.key(0), x, memory), x, memory).numpy().any()
