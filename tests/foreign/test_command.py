"""`meshdsl verify file.py:step` of a JAX function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import here

FILE = '''
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("rows"), out_specs=P(), check_vma=False))

right = mapped(lambda x: jax.lax.pmean(jnp.mean(x * x), "rows"))
wrong = mapped(lambda x: jnp.mean(x * x))
summed = mapped(lambda x: jax.lax.psum(jnp.sum(x * x), "rows"))
whole = lambda x: jnp.mean(x * x)
right_args = wrong_args = summed_args = (jax.ShapeDtypeStruct((8, 4), "float32"),)
several = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(FILE)
    return str(path)


def test_a_function_is_verified_and_the_exit_code_says_the_result(file: str) -> None:
    done = here("verify", f"{file}:right", "--machine", "h100")
    assert done.code == 0 and "right on rows:4" in done.out and " us" in done.out, done.err
    done = here("verify", f"{file}:wrong", "--json")
    report = json.loads(done.out)
    assert done.code == 1 and report["findings"][0]["fix"].startswith("pmean over 'rows'")
    assert here("verify", f"{file}:summed").code == 0
    assert here("verify", f"{file}:summed", "--reference", "whole").code == 1
    done = here("verify", f"{file}:wrong", "--static")
    assert done.code == 1 and "partial sum over 'rows'" in done.out


def test_wrong_calls_are_refused(file: str) -> None:
    for words, message in [
        ((f"{file}:whole",), "whole_args"),
        ((f"{file}:right", "--args", "several"), "no tuple several"),
        ((f"{file}:right", "--reference", "none"), "no function 'none'"),
        ((f"{file}:right", "--layout", "batch:rows"), "--layout has no effect"),
        (("transformer:lm", "--static"), "--static has no effect"),
        ((f"{file}:several",), "several"),
    ]:
        done = here("verify", *words)
        assert done.code == 2 and message in done.err, (words, done)
