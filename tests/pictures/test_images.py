"""The pictures of the documentation are what `md.show` draws now, and a page shows each of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("pictures_of_docs", ROOT / "docs/_ext/pictures.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/_ext")  # it imports the module beside it
        spec.loader.exec_module(loaded)
    return loaded


def test_images_equal_what_show_draws(module: Any):
    with jax.enable_x64(False):
        made = module.pictures()
    stale = [name for name, svg in made.items() if (module.FOLDER / name).read_text(encoding="utf-8") != svg]
    assert not stale, f"python docs/_ext/pictures.py writes them again, then look at the difference: {stale}"


def test_pages_show_every_image_with_a_description(module: Any):
    shown = [found for page in PAGES for found in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text("utf-8"))]
    assert all(len(words) > 15 for words, _ in shown), "an image needs a text for readers who cannot see it"
    assert {Path(path).name for _, path in shown} >= {path.name for path in module.FOLDER.iterdir()}
