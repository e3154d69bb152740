"""Everything shown runs: each page of the documentation and each docstring is a doctest.

Examples run in JAX's default precision, as a reader's do, not in the 64-bit types of the other tests.
"""

from __future__ import annotations

import difflib
import doctest
import importlib
import re
import shlex
import sys
from pathlib import Path

import jax
import pytest

import meshdsl
from meshdsl import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.parts and path.name != "CHANGELOG.md"
)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "meshdsl").rglob("*.py")
    if path.name != "__main__.py"  # importing it runs the program
)


class FencedParser(doctest.DocTestParser):
    """Reads sessions in Markdown, where the closing fence is not part of the expected output."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        return super().parse(re.sub(r"(?m)^[ \t]*(```|:::).*$", "", string), name)


def unchecked_snippets(markdown: str) -> list[str]:
    """The Python listings that no doctest would run, each by its first line."""
    fences = re.findall(r"(?ms)^```(?:python|py|pycon|\{doctest\})[^\n]*\n(.*?)^```", markdown)
    return [body.strip().partition("\n")[0] for body in fences if ">>>" not in body]


def pasted(markdown: str) -> list[tuple[str, str]]:
    """Each command of ours that a listing shows, and what stands below it."""
    return re.findall(r"(?ms)^```text\n\$ \.venv/bin/(meshdsl [^\n]*)\n(.*?)^```", markdown)


PASTED = [(page.name, *found) for page in PAGES for found in pasted(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "command", "shown"), PASTED, ids=[f"{page}: {line}" for page, line, _ in PASTED])
def test_docs_pasted_commands_match_their_output(
    page: str, command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with jax.enable_x64(False):
        assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    diff = "\n".join(difflib.unified_diff(shown.splitlines(), printed.splitlines(), page, "printed now", lineterm=""))
    assert printed.startswith(shown), f"paste what `{command}` prints:\n{diff}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_links_and_paths_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    paths = re.findall(r"`((?:benchmarks|docs|meshdsl|models|tests)/[\w/.]+)`", text)
    modules = re.findall(r"python -m ((?:benchmarks|meshdsl|tests)\.[\w.]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    missing += [name for name in modules if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    assert not missing, f"{page.name} points to what is not there: {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_page(page: Path):
    unchecked = unchecked_snippets(page.read_text(encoding="utf-8"))
    assert not unchecked, f"these Python listings never run; write them with >>>, or mark them as text: {unchecked}"
    with jax.enable_x64(False):
        result = doctest.testfile(
            str(page),
            module_relative=False,
            parser=FencedParser(),
            optionflags=doctest.ELLIPSIS,
            encoding="utf-8",
        )
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; see the captured output"


@pytest.mark.parametrize("name", MODULES)
def test_docs_docstrings(name: str):
    module = importlib.import_module(name)
    with jax.enable_x64(False):
        result = doctest.testmod(module, extraglobs={"md": meshdsl}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; see the captured output"


def test_docs_parser_fence_ends_the_expected_output():
    page = "Text.\n\n```python\n>>> 1 + 1\n2\n```\n\n```python\n>>> 2 + 2\n5\n```\n"
    wants = [example.want for example in FencedParser().get_examples(page)]
    assert wants == ["2\n", "5\n"]


def test_docs_parser_finds_pasted_commands():
    page = "```text\n$ .venv/bin/meshdsl doctor --json\n{}\n```\n\n```text\n$ make test\n```\n"
    assert pasted(page) == [("meshdsl doctor --json", "{}\n")]
    assert PASTED, "README.md shows what `meshdsl analyze` prints"


def test_docs_parser_finds_listings_without_prompt():
    page = "```python\nx = 1\n```\n\n```text\ny = 2\n```\n\n```python\n>>> z = 3\n```\n"
    assert unchecked_snippets(page) == ["x = 1"]
