"""Control functions inside the transformations of JAX. The long form is `python -m tests.control.wrappers`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.control import wrappers
from tests.joined import in_groups


@pytest.mark.parametrize("name", ["cond", "while_loop", "scan", "vmap"])
@pytest.mark.parametrize("transform", ["jit", "vmap"])
def test_control_functions_of_tensors_inside_jax(name: str, transform: str) -> None:
    assert wrappers.check(name, transform, "tensors") == ""


SAMPLE = wrappers.sample(22, seed=1)
IN_JAX = in_groups({case[:2]: wrappers.in_jax(*case[:2]) for case in SAMPLE}, wrappers.A)


@pytest.mark.parametrize("case", SAMPLE, ids=", ".join)
def test_control_functions_inside_jax(case: tuple[str, str, str]) -> None:
    assert wrappers.check(*case, IN_JAX(case[:2])) == ""


def test_a_body_closes_over_a_tensor_that_is_spread_over_devices() -> None:
    s = md.compile(lambda x: x * 2, "p:2", "n:p")(md.tensor([1.0, 2.0], "n"))
    total = md.scan(lambda c, _: (c + md.sum(s), None), 0.0, None, over="step:3")[0]
    assert float(total) == 18
    with pytest.raises(md.TraceError, match="a constant would be gathered to every device"):
        md.compile(lambda x: md.cond(md.sum(x) > 0, lambda: s, lambda: -s), "p:2")(md.tensor([1.0], "m"))


def test_a_traced_predicate_needs_no_python_bool() -> None:
    x = md.tensor(jnp.arange(3.0), "n")
    with pytest.raises(md.MeshdslError, match=r"md\.cond"):
        jax.jit(lambda a: md.tensor(a, "n").array if md.sum(md.tensor(a, "n")) > 0 else a)(x.array)
