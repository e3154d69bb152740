"""Two cases of the layout law of the Transformers; all of them: `python -m tests.models.layout_law`.

And DeepSeek-V3 with an exchange by node.
"""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.deepseek import deepseek
from tests.models import layout_law
from tests.nn.moe_reference import simulated


@pytest.mark.parametrize(("name", "mesh"), [("moe", "rows:2"), ("gpt_moe", "rows:3")])
def test_moe_transformer_step_is_equal_under_every_layout(name: str, mesh: str):
    layout = next(layout for at, layout in layout_law.layouts(name) if at == mesh)
    found = layout_law.differences(name, mesh, layout, steps=1)
    assert max(found.values()) <= layout_law.TOLERANCE, found


@pytest.mark.parametrize("name", layout_law.MODELS)
def test_layout_law_has_twelve_layouts_per_model(name: str):
    assert len(layout_law.layouts(name)) >= 12


def test_deepseek_by_node_has_the_loss_of_the_flat_exchange():
    sizes = {"batch": 4, "length": 8, "layers": 1, "dense_layers": 0, "vocab": 16, "capacity_factor": 1.25}
    flat, by_node = deepseek.replace(**sizes), deepseek.replace(**sizes, nodes=4)
    rng, (specs, _, batch) = np.random.default_rng(0), flat.specs()
    params = {k: md.tensor(rng.normal(size=v.shape).astype("float32") / 4, v.dims) for k, v in specs.items()}
    batch = {k: md.tensor(rng.integers(0, 16, v.shape).astype("int32"), v.dims) for k, v in batch.items()}
    expert, parts = md.Dim("expert", 8), md.dims("node:4 node_expert:2")
    divided = {k: md.unflatten(v, expert, parts) if expert in v.dims else v for k, v in params.items()}
    layout = "batch:gpu,node; node_batch:gpu; node:node; node_expert:gpu"
    want = simulated(flat.eval_step(), params, batch)["loss"]
    step = md.compile(by_node.eval_step(), "node:2 gpu:2", layout)
    assert {c.axes for c in step.program(divided, batch).collectives if c.kind == "all_to_all"} == {("node",), ("gpu",)}
    found = simulated(by_node.eval_step(), divided, batch, mesh="node:2 gpu:2", layout=layout)["loss"]
    assert np.allclose(found, want, rtol=1e-5)


def test_deepseek_by_node_needs_slots():
    with pytest.raises(md.ShapeError, match="nodes=4 sends slots, and dispatch='grouped' has none; set"):
        deepseek.replace(nodes=4).specs()
