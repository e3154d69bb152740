"""The case study: its page shows its data, and the data says what the page claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshdsl as md
from benchmarks.case_study import CASES, DATA, tables

ROWS = json.loads(DATA.read_text(encoding="utf-8"))
PAGE = (Path(__file__).parent.parent / "docs" / "case_study.md").read_text(encoding="utf-8")


def test_case_study_page_shows_its_data():
    assert tables(ROWS) in PAGE and list(ROWS) == list(CASES)
    for name, case in CASES.items():
        assert case.origin in PAGE and case.note in PAGE
        assert f"images/case_{name.replace('-', '_')}.svg" in PAGE


@pytest.mark.parametrize("name", CASES)
def test_case_study_finds_no_slower_plan_and_predicts_the_published_time(name: str):
    row, case = ROWS[name], CASES[name]
    assert md.Plan.from_dict(row["recipe"]["plan"]) == case.recipe
    assert row["found"]["seconds"] <= row["recipe"]["seconds"]
    low, high = row["recipe"]["interval"]
    assert case.rate is None or low <= row["published_seconds"] <= high
    assert row["found"]["peak_bytes"] <= md.machine(case.machine).hbm
