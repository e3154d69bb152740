"""Low-rank adapters: their gradients are JAX's under every layout, and a workload trains nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.llama import llama

SMALL = llama.replace(batch=4, length=4, vocab=16, layers=2, d_model=8, d_ff=16, query_heads=2, heads=2, d_head=4)


@pytest.mark.parametrize("layout", ["", "batch:r", "batch:r; io:c", "batch:r; out:c", "rank:c"])
@pytest.mark.parametrize("alpha", [None, 6.0])
def test_gradients_of_adapters_are_those_of_jax(layout: str, alpha: float | None) -> None:
    rng = np.random.default_rng(0)
    w, a, b, x = (rng.standard_normal(shape) for shape in ((6, 4), (6, 3), (3, 4), (4, 6)))
    plain = md.model(lambda x: md.dot(x, md.param("w", "io:6 out:4", dtype="float64"), "io"))
    tuned = md.nn.lora(plain, rank=3, match="w", alpha=alpha)

    def ours(params: Any, x: Any) -> md.Tensor:
        return md.sum(md.square(tuned(params, x)))

    def theirs(w: Any, a: Any, b: Any) -> Any:
        return jnp.sum(jnp.square(x @ (w + (1.0 if alpha is None else alpha / 3) * a @ b)))

    named = {"w": md.tensor(w, "io out"), "w/lora_a": md.tensor(a, "io rank"), "w/lora_b": md.tensor(b, "rank out")}
    program = md.compile(md.grad(ours), "r:2 c:2", layout).program(named, md.tensor(x, "batch io"))
    got = md.simulate(program, *jax.tree.leaves(named), x)
    for one, other in zip(got, jax.grad(theirs, (0, 1, 2))(w, a, b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_a_workload_trains_its_adapters_alone() -> None:
    work = md.nn.lora(SMALL, rank=2, match="*/wq */wo")
    params, state = work.init(md.random.key(0))
    params = {path: p + 0.1 if path.endswith("lora_b") else p for path, p in params.items()}
    adapters = {path for path in params if "/lora_" in path}
    assert len(adapters) == 4 and all(params[path].dims[0].name == "layer" for path in adapters)
    batch = {
        name: md.tensor(np.arange(16, dtype=np.int32).reshape(4, 4) % 16, spec.dims)
        for name, spec in work.specs()[2].items()
    }
    after, _, metrics = md.compile(work.train_step(), "", "")(params, state, batch)
    changed = {path for path in params if not np.array_equal(after[path].numpy(), params[path].numpy())}
    assert changed == adapters
    weights = md.nn.merged(params)
    assert set(weights) == set(SMALL.specs()[0])
    whole = md.compile(SMALL.train_step(), "", "")(weights, SMALL.optimizer(SMALL.config).init(weights), batch)
    assert np.isclose(metrics["loss"].numpy(), whole[2]["loss"].numpy(), rtol=1e-6)


def test_adapters_of_no_weight_are_refused() -> None:
    tuned = md.nn.lora(md.model(lambda x: x * md.param("scale", "io:6")), rank=2, match="scale")
    with pytest.raises(md.ShapeError, match=r"no weight matches for md\.nn\.lora; the parameters are scale"):
        tuned.specs(md.spec("batch:2 io:6"))


def test_adapters_are_merged_on_export(tmp_path: Path) -> None:
    work = md.nn.lora(SMALL, rank=2, match="*/wq", alpha=6.0)
    params, _ = work.init(md.random.key(0))
    params = {path: p + 0.1 if path.endswith("lora_b") else p for path, p in params.items()}
    md.export_hugging_face(params, work, tmp_path / "tuned")
    _, again = md.import_hugging_face(tmp_path / "tuned", work)
    assert again.keys() == SMALL.specs()[0].keys(), "the parameters of the base"
    for path, x in md.nn.merged(params, alpha=6.0).items():
        np.testing.assert_array_equal(again[path].numpy(), x.numpy())
