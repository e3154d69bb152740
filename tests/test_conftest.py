"""The environment that the other tests take for granted, and the tests that `make test-quick` runs."""

import subprocess
from pathlib import Path

import jax
import pytest

from tests.conftest import compare_golden, sampled
from tests.quick import ALWAYS, changed_files, files_for


def test_conftest_has_eight_cpu_devices_and_64_bits():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    assert jax.numpy.asarray(1.0).dtype == "float64"


def test_golden_reports_writes_and_then_agrees(tmp_path: Path):
    path = tmp_path / "deep" / "name.txt"
    missing = compare_golden(path, "a\nb", update=False)
    assert missing is not None and "no golden file name.txt" in missing and "--update-golden" in missing

    assert compare_golden(path, "a\nb", update=True) is None
    assert path.read_text() == "a\nb\n"
    assert compare_golden(path, "a\nb\n", update=False) is None

    changed = compare_golden(path, "a\nc", update=False)
    assert changed is not None and "-b\n+c" in changed


def test_sample_has_evenly_spaced_cases_of_each_test():
    names = ["a", "b[0]", "b[1]", *(f"c[{i}]" for i in range(100))]
    assert sampled(names, 4) == {"a", "b[0]", "b[1]", "c[0]", "c[25]", "c[50]", "c[75]"}


FILES = [
    *ALWAYS,
    "tests/cost/test_memory.py",
    "tests/cli/test_cli.py",
    "tests/models/test_resnet.py",
    "tests/test_types.py",
]
DOCSTRINGS = "tests/test_docs.py::test_docs_docstrings"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("meshdsl/cost/memory.py", [f"{DOCSTRINGS}[meshdsl.cost.memory]", "tests/cost/test_memory.py"]),
        ("meshdsl/tools/commands/__init__.py", [f"{DOCSTRINGS}[meshdsl.tools.commands]", "tests/cli/test_cli.py"]),
        ("meshdsl/tools/cli.py", [f"{DOCSTRINGS}[meshdsl.tools.cli]", "tests/cli/test_cli.py"]),
        ("models/resnet.py", ["tests/models/test_resnet.py"]),
        ("docs/costs.md", ["tests/test_docs.py::test_docs_page[docs/costs.md]"]),
        ("tests/test_types.py", ["tests/test_types.py"]),
        ("tests/cost/helpers.py", ["tests/cost/test_memory.py"]),
        ("tests/laws/shape.py", []),
        ("README.md", ["tests/test_docs.py::test_docs_page[README.md]"]),
        ("CHANGELOG.md", []),
        ("Makefile", []),
    ],
)
def test_quick_runs_the_tests_of_a_changed_file_and_the_laws(changed: str, expected: list[str]):
    assert files_for([changed], FILES) == [*ALWAYS, *expected]


def test_quick_runs_no_test_twice():
    both = files_for(["tests/test_docs.py", "docs/costs.md"], [*FILES, "tests/test_docs.py"])
    assert both == [*ALWAYS, "tests/test_docs.py"]


def test_quick_finds_commits_edits_and_new_files(tmp_path: Path):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("old", "edited"):
        (tmp_path / name).write_text("")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "branch")
    (tmp_path / "committed").write_text("")
    git("add", ".")
    git("commit", "-qm", "two")
    (tmp_path / "edited").write_text("more")
    (tmp_path / "new").write_text("")
    assert sorted(changed_files(tmp_path)) == ["committed", "edited", "new"]
