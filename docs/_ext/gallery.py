"""Runs the commands of docs/gallery.md when the site is built, and shows the HTML file of each below its listing."""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from meshdsl.tools import cli

PAGE = "gallery"
COMMAND = re.compile(r"\$ (meshdsl .*--html ([\w.]+).*)")


def show_reports(app: Sphinx, tree: nodes.document, docname: str) -> None:
    """Put a frame with the report below each listing that writes one."""
    if docname != PAGE:
        return
    for listing in list(tree.findall(nodes.literal_block)):
        command = COMMAND.match(listing.astext())
        if command is not None:
            source = f"reports/{html.escape(command[2])}"
            title = f"report of {html.escape(command[1])}"
            frame = (
                f'<iframe class="report" src="{source}" loading="lazy" title="{title}"></iframe>'
                f'<p><a href="{source}">Open the report on its own page</a></p>'
            )
            listing.parent.insert(listing.parent.index(listing) + 1, nodes.raw("", frame, format="html"))


def write_reports(app: Sphinx, exception: Exception | None) -> None:
    """Write the reports of the page beside it, if they are missing."""
    if exception is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir) / "reports"
    folder.mkdir(exist_ok=True)
    for command, file in COMMAND.findall((Path(app.srcdir) / f"{PAGE}.md").read_text(encoding="utf-8")):
        if not (folder / file).exists():
            _run([*shlex.split(command)[1:-1], str(folder / file)])


def _run(arguments: list[str]) -> None:
    before = Path.cwd()
    os.chdir(Path(__file__).parent.parent.parent)  # the models are files of the repository
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(arguments)
    finally:
        os.chdir(before)
    if code:
        raise ExtensionError(f"meshdsl {shlex.join(arguments)} exits with {code}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", show_reports)
    app.connect("build-finished", write_reports)
    return {"parallel_read_safe": True}
