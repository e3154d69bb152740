"""The Sphinx directive `{public-names}`, which documents every public name, and links from `md.name` in text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from docutils import nodes
from docutils.statemachine import StringList
from families import documented, families
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective


class PublicNames(SphinxDirective):
    """Adds a section per family with the documentation of its names."""

    def run(self) -> list[nodes.Node]:
        sections = []
        for title, names in families().items():
            section = nodes.section(ids=[nodes.make_id(f"family-{title}")])
            section += nodes.title(text=title)
            if title.startswith("md."):
                section += self._parsed((documented(title[3:]).__doc__ or "").splitlines())
            for name in names:
                section += self._parsed(_directive(name))
            sections.append(section)
        return sections

    def _parsed(self, lines: list[str]) -> list[nodes.Node]:
        # autodoc writes reStructuredText, but the page is Markdown
        text = ["```{eval-rst}", *lines, "```"]
        return self.parse_text_to_nodes(StringList(text, source=self.env.docname))


def _directive(name: str) -> list[str]:
    value = documented(name)
    if isinstance(value, type):
        return [f".. autoclass:: meshdsl.{name}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: meshdsl.{name}", ""]
    # a constant has no docstring: show its value, or the keys of a mapping
    shown = ", ".join(value) if isinstance(value, Mapping) else repr(value)
    return [f".. py:data:: meshdsl.{name}", "", f"   {shown}", ""]


class Links(SphinxTransform):
    """Turns `md.einsum` in text into a link to its documentation."""

    default_priority = 200

    def apply(self) -> None:
        known = {name for names in families().values() for name in names}
        for literal in list(self.document.findall(nodes.literal)):
            found = re.fullmatch(r"md\.([\w.]+)(\(.*\))?", literal.astext())
            if found is None or found[1] not in known or isinstance(literal.parent, nodes.reference):
                continue
            target = f"meshdsl.{found[1]}"
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True
            )
            literal.replace_self(link)
            link += literal


def setup(app: Sphinx) -> dict[str, object]:
    app.add_directive("public-names", PublicNames)
    app.add_transform(Links)
    return {"parallel_read_safe": True}
