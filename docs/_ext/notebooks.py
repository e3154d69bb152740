"""Runs the notebooks in `notebooks/`, and turns them into pages. Needs neither Jupyter nor Sphinx.

`python docs/_ext/notebooks.py` runs each notebook in its own process and writes its outputs back; a test runs them and
compares the texts. A cell runs as in IPython: the value of its last line is displayed, unless it ends with `;`.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "notebooks"
FORMATS = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
Json = dict[str, Any]


def load(path: Path) -> Json:
    """A notebook as JSON (nbformat 4)."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, notebook: Json) -> None:
    """Write a notebook as Jupyter does: one space of indentation, and a final newline."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(notebook: Json) -> Iterator[tuple[int, list[Json]]]:
    """Run the code cells in one namespace; yields the index and the outputs of each."""
    namespace: Json = {"__name__": "__main__"}
    for number, (index, cell) in enumerate(code_cells(notebook), start=1):
        yield index, _outputs("".join(cell["source"]), number, namespace)


def code_cells(notebook: Json) -> list[tuple[int, Json]]:
    """The code cells with their indices."""
    return [(i, cell) for i, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code"]


def texts(outputs: list[Json]) -> str:
    """The text of outputs: printed lines, and displayed values as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join("".join(part).rstrip("\n") for part in parts)


def _outputs(source: str, number: int, namespace: Json) -> list[Json]:
    file = f"In[{number}]"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, file, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), file, "eval"), namespace) if last is not None else None
    outputs: list[Json] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": _lines(repr(value)), **_rich(value)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _rich(value: object) -> Json:
    outputs = {}
    for mime, method in FORMATS.items():
        make: Callable[[], str] | None = getattr(value, method, None)
        if make is not None:
            outputs[mime] = _lines(make())
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def markdown(notebook: Json, name: str) -> str:
    """The notebook as a page: its text, its code, and below each cell what it shows."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", [])]
    title, _, rest = "\n\n".join(parts).partition("\n")
    style = f"~~~{{raw}} html\n<style>{_theme()}</style>\n~~~"
    return f"{title}\n\nThis page is the notebook `notebooks/{name}.ipynb`.\n{rest}\n{style}\n"


def _theme() -> str:
    """The colours of axes for the site's own switch between light and dark; the outputs follow the system."""
    from meshdsl.errors.markup import AXIS_COLOURS, SOFT

    named = {f"axis-{i}": pair for i, pair in enumerate(AXIS_COLOURS)} | {"soft": SOFT}
    themes = (("light", 0), ("dark", 1))
    rules = (
        f'body[data-theme="{theme}"] .meshdsl .{name}{{color:{pair[i]}}}'
        for theme, i in themes
        for name, pair in named.items()
    )
    return "".join(rules)


def _shown(output: Json) -> str:
    svg = "".join(output.get("data", {}).get("image/svg+xml", []))
    if svg:  # as an image, because it then follows the site's own switch between light and dark
        alone = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) if "xmlns=" not in svg else svg
        data = base64.b64encode(alone.encode()).decode()
        return (
            f'~~~{{raw}} html\n<p><img alt="{escape(texts([output]))}" src="data:image/svg+xml;base64,{data}"></p>\n~~~'
        )
    html = "".join(output.get("data", {}).get("text/html", []))
    if html:
        return f"~~~{{raw}} html\n{html}\n~~~"
    return f"~~~text\n{texts([output])}\n~~~"


def write_pages(folder: Path) -> None:
    """Write one page for each notebook, if it changed."""
    folder.mkdir(exist_ok=True)
    for path in sorted(FOLDER.glob("*.ipynb")):
        page, text = folder / f"{path.stem}.md", markdown(load(path), path.stem)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def setup(app: Any) -> Json:
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "notebooks"))
    return {"parallel_read_safe": True}


def _run_file(path: Path) -> None:
    notebook = load(path)
    for number, (index, outputs) in enumerate(run(notebook), start=1):
        notebook["cells"][index] |= {"outputs": outputs, "execution_count": number}
    save(path, notebook)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _run_file(Path(sys.argv[1]))
    else:
        os.environ["PYTHONPATH"] = str(ROOT)
        for notebook_path in sorted(FOLDER.glob("*.ipynb")):
            subprocess.run([sys.executable, __file__, str(notebook_path)], check=True)
