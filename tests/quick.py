"""The tests for a change, which `make test-quick` runs: `python -m tests.quick` lists them.

They are the files that test the changed units: for `meshdsl/ops/reshape.py` those in `tests/ops/`; of documentation,
the changed pages and the docstrings of changed modules. The laws in `ALWAYS`, which every unit must keep, are added. A
change is what differs from the main branch, committed or not. With `--sample`, `tests/conftest.py` keeps some cases of
each test, evenly spaced.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["changed_files", "files_for"]

ROOT = Path(__file__).parent.parent
ALWAYS = (
    "tests/lowering/test_layout_law.py",
    "tests/ops/test_laws.py",
    "tests/test_imports.py",
    "tests/test_structure.py",
    "tests/test_public_names.py",
)
FOLDERS = {"commands": "cli"}  # of units whose tests have another name
MAIN = ("main", "origin/main", "master", "origin/master")


def changed_files(root: Path = ROOT) -> list[str]:
    """The files that differ from the main branch; from the last commit, if there is no main branch."""
    base = next((b for b in (_git(root, "merge-base", "HEAD", name) for name in MAIN) if b), "HEAD")
    return [
        *_git(root, "diff", "--name-only", base).splitlines(),
        *_git(root, "ls-files", "--others", "--exclude-standard").splitlines(),
    ]


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else ""


def files_for(changed: Iterable[str], files: Iterable[str]) -> list[str]:
    """The arguments of pytest for these changed files, out of the test files of the repository."""
    files = sorted(files)
    found = dict.fromkeys(ALWAYS)
    for path in changed:
        found |= dict.fromkeys(_tests_of(path, files))
    whole = {name for name in found if "::" not in name}
    return [name for name in found if name.partition("::")[0] not in whole or name in whole]


def _tests_of(path: str, files: list[str]) -> Iterator[str]:
    top, *rest = path.split("/")
    if path.endswith(".md") and (top == "docs" or not rest) and path != "CHANGELOG.md":
        yield f"tests/test_docs.py::test_docs_page[{path}]"
    elif path in files:
        yield path
    elif path.endswith(".py") and top in ("meshdsl", "models", "tests"):
        if top == "meshdsl" and rest[-1] != "__main__.py":
            yield f"tests/test_docs.py::test_docs_docstrings[{path[:-3].replace('/', '.').removesuffix('.__init__')}]"
        units = [top] if top == "models" else [part.removesuffix(".py") for part in rest[1::-1]]
        for unit in (FOLDERS.get(unit, unit) for unit in units):  # a part with tests of its own, or its whole folder
            prefixes = f"tests/{unit}/", f"tests/test_{unit}.", f"tests/test_{unit}_"
            if found := [f for f in files if f.startswith(prefixes)]:
                yield from found
                return


def main() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    changed = [path for path in changed_files() if (ROOT / path).exists()]
    print(*files_for(changed, files), sep="\n")


if __name__ == "__main__":
    main()
