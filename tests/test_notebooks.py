"""The notebooks run, and print what they show. In IPython, an error shows the user's cells and the message only."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import meshdsl as md

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def runner() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/_ext/notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_figures(text: str) -> list[str]:
    """The lines without numbers and their units, in any order: estimates change with every figure of the cost model."""
    plain = re.sub(r"\d[\d.,]*( ?([kMGT]?B|[mu]?s)\b)?", "#", text)
    return sorted(" ".join(line.split()) for line in plain.splitlines())


@pytest.mark.usefixtures("at_once_in_jax")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * path.stem.startswith("5_"), id=path.stem) for path in NOTEBOOKS],
)
def test_notebooks_print_what_they_show(path: Path, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    notebook = runner.load(path)
    with jax.enable_x64(False):
        for index, outputs in runner.run(notebook):
            cell = notebook["cells"][index]
            now, there = (without_figures(runner.texts(each)) for each in (outputs, cell["outputs"]))
            assert now == there, f"cell {index} prints something else; `python docs/_ext/notebooks.py` writes it again"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid_and_numbered(path: Path, runner: Any) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    numbers = [cell["execution_count"] for _, cell in runner.code_cells(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert notebook["cells"][0]["cell_type"] == "markdown" and "".join(notebook["cells"][0]["source"]).startswith("# ")


def test_notebooks_become_pages(runner: Any) -> None:
    html = {"output_type": "execute_result", "data": {"text/plain": ["x"], "text/html": ["<b>x</b>"]}}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {"cell_type": "code", "source": ["f(x)"], "outputs": [{"output_type": "stream", "text": ["1\n"]}, html]},
    ]
    drawing = {"output_type": "execute_result", "data": {"text/plain": ["Picture('p')"], "image/svg+xml": ["<svg/>"]}}
    cells.append({"cell_type": "code", "source": ["draw()"], "outputs": [drawing]})
    page = runner.markdown({"cells": cells}, "name")
    assert page.startswith("# Title\n\nThis page is the notebook `notebooks/name.ipynb`.\nText.")
    assert "```python\nf(x)\n```\n\n~~~text\n1\n~~~\n\n~~~{raw} html\n<b>x</b>\n~~~" in page
    assert '<img alt="Picture(&#x27;p&#x27;)" src="data:image/svg+xml;base64,' in page


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs a cell in an IPython session and returns what it prints."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is in the extra `dev`")
    shell = interactive.InteractiveShell.instance()

    def run(source: str) -> str:
        shell.run_cell(source, store_history=True)
        return capsys.readouterr().out

    yield run
    interactive.InteractiveShell.clear_instance()


def test_an_error_in_a_notebook_shows_the_cell_and_the_message(cell: Callable[[str], str]) -> None:
    cell("import meshdsl as md\nx = md.tensor([1.0], 'batch')")
    shown = cell("def total(x):\n    return md.sum(x, 'bach')\ntotal(x)")
    assert shown.strip() == (
        "Cell In[2], line 3\n      total(x)\n"
        "Cell In[2], line 2\n      return md.sum(x, 'bach')\n\n"
        "ShapeError: no dim 'bach' here; did you mean 'batch'? there are: batch\n"
        "  at In[2]:2  return md.sum(x, 'bach')"
    )


def test_a_program_in_a_notebook_names_cells(cell: Callable[[str], str]) -> None:
    cell("import meshdsl as md")
    shown = cell("print(md.compile(lambda x: md.exp(x), 'rows:2').program(md.spec('batch:4')))")
    assert re.findall(r"# (\S+)", shown) == ["In[2]:1"]


@pytest.mark.parametrize("full", [True, False], ids=["MESHDSL_TRACEBACK", "InternalError"])
def test_a_full_traceback_on_request_and_for_internal_errors(
    full: bool, cell: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHDSL_TRACEBACK", "1" if full else "0")
    cell("import meshdsl as md")
    shown = cell("md.tensor([1.0], 'a b')" if full else "raise md.InternalError('a check failed')")
    assert "Traceback (most recent call last)" in shown
    assert (str(Path(md.__file__).parent) in shown) is full
