"""Two cases of the layout law of the Transformers; all of them: `python -m tests.models.layout_law`."""

from __future__ import annotations

import pytest

from tests.models import layout_law


@pytest.mark.parametrize(("name", "mesh"), [("moe", "rows:2"), ("gpt_moe", "rows:3")])
def test_moe_transformer_step_is_equal_under_every_layout(name: str, mesh: str):
    layout = next(layout for at, layout in layout_law.layouts(name) if at == mesh)
    found = layout_law.differences(name, mesh, layout, steps=1)
    assert max(found.values()) <= layout_law.TOLERANCE, found


@pytest.mark.parametrize("name", layout_law.MODELS)
def test_layout_law_has_twelve_layouts_per_model(name: str):
    assert len(layout_law.layouts(name)) >= 12
