"""Two cases of the layout law of the models with experts; all of them: `python -m tests.models.layout_law`."""

from __future__ import annotations

import pytest

from tests.models import layout_law


@pytest.mark.parametrize("mesh, layout", [layout_law.ALL[3], layout_law.ALL[7]])
def test_a_step_under_a_layout_is_the_unsplit_step(mesh: str, layout: str):
    found = layout_law.differences("moe", mesh, layout)
    assert max(found.values()) <= layout_law.TOLERANCE, found


@pytest.mark.parametrize("name", layout_law.MODELS)
def test_every_model_has_at_least_twelve_layouts(name: str):
    assert len(layout_law.layouts(name)) >= 12
