"""Two cases of the layout law of the Transformers; all of them: `python -m tests.models.layout_law`."""

from __future__ import annotations

import pytest

from tests.models import layout_law


@pytest.mark.parametrize(("name", "mesh"), [("moe", "rows:2"), ("gpt_moe", "rows:3")])
def test_a_step_with_experts_split_is_the_unsplit_one(name: str, mesh: str):
    layout = next(layout for at, layout in layout_law.layouts(name) if at == mesh)
    found = layout_law.differences(name, mesh, layout, steps=1)
    assert max(found.values()) <= layout_law.TOLERANCE, found


@pytest.mark.parametrize("name", layout_law.MODELS)
def test_every_model_has_at_least_twelve_layouts(name: str):
    assert len(layout_law.layouts(name)) >= 12
