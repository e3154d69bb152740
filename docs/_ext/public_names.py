"""One page for each public name, the directive `{public-names}` that lists them, and links from `md.name` in text.

The pages are written to `docs/reference/`, which git ignores, when a build starts.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from families import documented, families
from parameters import parameters
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import meshdsl as md

FOLDER = "reference"


class PublicNames(SphinxDirective):
    """Adds a section per family: a table of its names, each with the first sentence of its docstring."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the names are not in the page's own text
        sections = []
        for title, names in families().items():
            section = nodes.section(ids=[nodes.make_id(f"family-{title}")])
            section += nodes.title(text=title)
            if title.startswith("md."):
                section += self._parsed(["```{eval-rst}", *_docstring(title[3:]).splitlines(), "```"])
            rows = [f"| [`md.{name}`]({FOLDER}/{name}.md) | {_first_sentence(name)} |" for name in names]
            section += self._parsed([":::{table}", ":class: names", "", "| name | |", "|---|---|", *rows, ":::"])
            sections.append(section)
        return sections

    def _parsed(self, lines: list[str]) -> list[nodes.Node]:
        return self.parse_text_to_nodes(StringList(lines, source=self.env.docname))


def page(name: str, title: str) -> str:
    """The Markdown of the page of one name."""
    anchor = nodes.make_id(f"family-{title}")  # made by the directive, so Markdown's own links do not know it
    family = f'[Reference](../reference.md) / <a href="../reference.html#{anchor}">{title}</a>'
    head = ["---", "orphan: true", "---", "", f"# md.{name}", "", "{.family}", family, ""]
    return "\n".join([*head, "```{eval-rst}", *_directive(name), "```", ""])


def _directive(name: str) -> list[str]:
    value, short = documented(name), name.rpartition(".")[2]
    if short != name and getattr(md, short, None) is value:  # Sphinx takes one description of a class
        return [f".. py:data:: meshdsl.{name}", "", f"   The same as `md.{short}`.".replace("`", "``"), ""]
    if isinstance(value, type):
        return [f".. autoclass:: meshdsl.{name}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: meshdsl.{name}", ""]
    return [f".. py:data:: meshdsl.{name}", "", f"   {_shown(value)}", ""]


def _shown(value: object) -> str:
    """A constant, which has no docstring of its own: its value, or the keys of a mapping."""
    return ", ".join(value) if isinstance(value, Mapping) else repr(value)


def _docstring(name: str) -> str:
    return "\n".join(_as_rst(inspect.getdoc(documented(name)) or ""))


def _first_sentence(name: str) -> str:
    value = documented(name)
    if not (isinstance(value, type) or callable(value)):
        return _shown(value)
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    sentence = re.match(r"(?:`[^`]*`|[^.`]|\.(?! [A-Z`]|$))*\.?", paragraph)
    return (sentence[0] if sentence else paragraph).replace("|", "\\|")


def _as_rst(text: str) -> Iterator[str]:
    """Docstrings mark code with single backticks; in reStructuredText these are double ones."""
    listing = False  # an indented paragraph after "::" is copied unchanged
    for line in text.splitlines():
        listing = line.startswith("    ") if listing and line.strip() else listing or line.endswith("::")
        session = line.lstrip().startswith((">>>", "..."))
        yield line if session or listing or "``" in line else re.sub(r"`([^`]+)`(?=(\w)?)", _literal, line)


def _literal(match: re.Match[str]) -> str:
    return f"``{match[1]}``" + ("\\ " if match[2] else "")


def _process(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText, and add the table of parameters; changes `lines` in place."""
    lines[:] = [line.replace("<doctest ...>", "<stdin>") for line in _as_rst("\n".join(lines))]
    if kind in ("class", "function", "method"):
        lines += _table(value)


def _table(function: Any) -> Iterator[str]:
    rows = parameters(function)
    if not any(row.meaning or row.default is not None for row in rows):
        return  # such as *args alone
    yield from ("", ".. list-table::", "   :class: parameters", "   :header-rows: 1", "")
    cells = [("parameter", "type", "default", "meaning")]
    for (kind, default, meaning), alike in itertools.groupby(rows, lambda row: row[1:]):
        names = ", ".join(_code(row.name) for row in alike)
        row = names, _code(kind), _code(default or ""), meaning
        cells.append(tuple(next(_as_rst(_escaped(cell)), "") for cell in row))
    used = [column for column in range(4) if any(row[column] for row in cells[1:])]
    for row in cells:
        yield from (f"   {'  -' if column else '* -'} {row[column]}" for column in used)
    yield ""


def _escaped(text: str) -> str:
    """The text with the markup characters of reStructuredText escaped, except in code."""
    return re.sub(r"(`[^`]*`)|([*|_])", lambda match: match[1] or f"\\{match[2]}", text)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _signature(app: Sphinx, kind: str, name: str, value: Any, options: Any, text: str, result: str) -> Any:
    """Names and defaults; the types are in the table of parameters.

    No signature for a class whose fields have types or defaults of the compiler: users do not create its values.
    """
    if kind == "class" and ("~meshdsl." in (text or "") or "<factory>" in (text or "")):
        return "", ""
    if kind not in ("class", "function", "method") or not text:
        return None
    signature = inspect.signature(value)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r"<function (\w+)[^>]*>", r"\1", shown), result


def write_pages(app: Sphinx) -> None:
    """Write the page of each name, and remove the pages of names that are gone."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": page(name, title) for title, names in families().items() for name in names}
    for stale in {path.name for path in folder.glob("*.md")} - set(pages):
        (folder / stale).unlink()
    for file, text in pages.items():
        path = folder / file
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


class Links(SphinxTransform):
    """Turns `md.einsum` in text, and the names of public classes, into links to their pages."""

    default_priority = 200

    def apply(self) -> None:
        known = {name for names in families().values() for name in names}
        classes = {name for name in known if isinstance(documented(name), type)}
        for literal in list(self.document.findall(nodes.literal)):
            match = re.fullmatch(r"(md\.)?([\w.]+)(\(.*\))?", literal.astext())
            if match is None or match[2] not in (known if match[1] else classes):
                continue
            if isinstance(literal.parent, (nodes.reference, addnodes.pending_xref)):
                continue
            target = f"meshdsl.{match[2]}"
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True
            )
            literal.replace_self(link)
            link += literal


def setup(app: Sphinx) -> dict[str, object]:
    app.add_directive("public-names", PublicNames)
    app.add_transform(Links)
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}
