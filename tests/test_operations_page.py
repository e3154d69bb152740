"""docs/operations.md says what the programs do: it is made again from the rows of the laws and compared."""

from __future__ import annotations

import importlib.util
import operator
import re
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def operations() -> Any:
    spec = importlib.util.spec_from_file_location("operations", ROOT / "docs/_ext/operations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_operations_page_equals_the_generated_text(operations: Any) -> None:
    made, there = operations.page(), (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    different = [f"- {a}\n+ {b}" for a, b in zip(there.split("\n"), made.split("\n"), strict=False) if a != b]
    assert made == there, "python docs/_ext/operations.py writes it again:\n" + "\n".join(different[:5])


def test_operations_page_lists_functions_alone(operations: Any) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    listed = re.findall(r"`md\.([\w.]+)`", text.partition("\n## ")[2])
    assert len(listed) > 120 and [name for name in listed if operator.attrgetter(name)(md) is None] == []
    assert "not supported" not in text
    assert {"all_reduce", "all_gather of a summary", "permute", "all_to_all", "none"} <= set(
        text.replace("|", ",").replace(", ", ",").replace(" ,", ",").split(",")
    )
