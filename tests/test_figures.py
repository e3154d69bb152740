"""The numbers that benchmarks give are those of the pages: a page with a stale one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if figures.MARK.search(page.read_text("utf-8"))]
KNOWN = json.loads(figures.FILE.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_pages_are_those_of_the_benchmarks(page: Path) -> None:
    stale = [
        f"{key}: {shown}, {KNOWN.get(key)}"
        for key, shown in figures.MARK.findall(page.read_text("utf-8"))
        if shown != KNOWN.get(key)
    ]
    assert not stale, f"python -m benchmarks.figures writes them: {stale}"


def test_figures_of_a_benchmark() -> None:
    row = {"case": "tensor parallel", "overlap": "list", "step_ms": 95.54, "exposed_ms": 33.0, "peak_gb": 5.3}
    found = figures.numbers("dense", ["a warning", json.dumps(row), '{"case": "another table"}'])
    expected = {"step": "95.5", "exposed": "33.0", "peak": "5.30"}
    assert found == {f"dense.tensor_parallel.list.{number}": text for number, text in expected.items()}
    page = "takes <!--dense.tensor_parallel.list.step-->1.0<!--/--> ms"
    assert figures.fill(page, found) == page.replace("1.0", "95.5")
