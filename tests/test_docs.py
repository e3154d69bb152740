"""Everything shown runs: each page of the documentation and each docstring is a doctest.

Examples run in JAX's default precision, as a reader's do, not in the 64-bit types of the other tests.
"""

from __future__ import annotations

import doctest
import importlib
import linecache
import re
from pathlib import Path

import jax
import pytest

import meshdsl
from tests.pages import PageChecker, PageParser, run_page, unchecked

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not {"_build", "reference", "notebooks"} & set(path.parts) and path.name != "CHANGELOG.md"
)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "meshdsl").rglob("*.py")
    if path.name != "__main__.py"  # importing it runs the program
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_links_and_paths_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    paths = re.findall(r"`((?:benchmarks|docs|meshdsl|models|tests)/[\w/.]+)`", text)
    modules = re.findall(r"python -m ((?:benchmarks|meshdsl|tests)\.[\w.]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    files = {name: ROOT / name.replace(".", "/") for name in modules}
    missing += [
        name for name, at in files.items() if not (at.with_suffix(".py").exists() or (at / "__main__.py").exists())
    ]
    assert not missing, f"{page.name} points to what is not there: {', '.join(missing)}"


@pytest.mark.usefixtures("at_once_in_jax")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_page(page: Path, tmp_path: Path):
    missed = unchecked(page.read_text(encoding="utf-8"))
    assert not missed, f"these listings never run; write Python with >>>, or say why: {missed}"
    with jax.enable_x64(False):
        result = run_page(page, tmp_path)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; see the captured output"


@pytest.mark.parametrize("name", MODULES)
def test_docs_docstrings(name: str):
    module = importlib.import_module(name)
    linecache.clearcache()  # each docstring begins with a look at every file in it
    with jax.enable_x64(False):
        result = doctest.testmod(module, extraglobs={"md": meshdsl}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; see the captured output"


def examples(page: str) -> list[tuple[str, str]]:
    return [(example.source, example.want) for example in PageParser().get_examples(page)]


def test_docs_parser_fence_ends_the_expected_output():
    page = "Text.\n\n```python\n>>> 1 + 1\n2\n```\n\n```python\n>>> 2 + 2\n5\n```\n"
    assert examples(page) == [("1 + 1\n", "2\n"), ("2 + 2\n", "5\n")]


def test_docs_parser_runs_commands():
    page = "```console\n$ meshdsl doctor \\\n    --json\n{}\n\nend\n$ echo $?\n0\n```\n\n```console\n$ make test\n```\n"
    assert examples(page) == [
        ("shell('meshdsl doctor      --json')\n", "{}\n<BLANKLINE>\nend\n"),
        ("shell('echo $?')\n", "0\n"),
    ]


def test_docs_parser_writes_files():
    page = "```toml\n# run.toml\nsteps = 3\n```\n\n```toml\n[train]\n```\n"
    assert examples(page) == [("write_file('run.toml', '# run.toml\\nsteps = 3\\n')\n", "")]


def test_docs_parser_leaves_listings_with_a_reason():
    page = "<!-- not run: takes an hour -->\n```console\n$ meshdsl train x\nloss\n```\n"
    assert examples(page) == [] == unchecked(page)


def test_docs_parser_finds_listings_that_never_run():
    page = (
        "```python\nx = 1\n```\n\n```text\ny = 2\n```\n\n```python\n>>> z = 3\n```\n\n```console\n$ ls\nmine.py\n```\n"
    )
    assert unchecked(page) == ["x = 1", "$ ls"]


def test_docs_checker_names_the_prompt():
    want, got = "  at <stdin>:1  x + y\n", "  at <doctest page.md[3]>:1  x + y\n"
    assert PageChecker().check_output(want, got, 0)
    assert not PageChecker().check_output(want.replace("1", "2"), got, 0)
