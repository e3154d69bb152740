"""The differences between two layouts are the differences between the collectives of their programs."""

from __future__ import annotations

import json

import meshdsl as md
from meshdsl.cost.report.compare import Comparison, changes, compare, sendings
from meshdsl.cost.report.report import Report
from meshdsl.errors.tables import WIDTH

X, W = md.spec("batch:4096 io:4096"), md.spec("io:4096 hidden:4096")


def product(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    return md.sum(md.tanh(md.dot(x, w, "io")))


def report(layout: str, mesh: str = "rows:2 cols:4", limit: float | None = None) -> Report:
    return md.compile(product, mesh, layout).cost(X, W, limit=limit)


def test_a_layout_does_not_differ_from_itself():
    assert changes(report("batch:rows io:cols"), report("batch:rows io:cols")) == []


def test_collectives_that_appear_disappear_and_change():
    one, other = report("io:cols"), report("batch:rows io:cols")
    found = {(change.what, str(change.before), str(change.after)) for change in changes(one, other)}
    assert ("resized", "1 all_reduce 67.11 MB cols", "1 all_reduce 33.55 MB cols") in found
    assert ("appears", "None", "1 all_reduce 4 B rows") in found
    back = {change.what for change in changes(other, one)}
    assert back == {"resized", "disappears"}
    moved = changes(report("io:cols"), report("io:rows"))
    assert [change.what for change in moved] == ["becomes"]


def test_changes_account_for_all_exposed_communication():
    one, other = report("io:cols hidden:rows"), report("batch:rows hidden:cols")
    difference = other.exposed - one.exposed
    assert abs(sum(change.seconds for change in changes(one, other)) - difference) < 1e-12
    assert sum(s.count for s in sendings(one)) == sum(r.count for r in one.program.collectives)


def test_the_best_is_the_fastest_that_fits():
    fast, small = report("batch:rows"), report("batch:rows,cols")
    assert compare({"a": fast, "b": small}).best == "b"
    tight = report("batch:rows", limit=1e6)
    assert compare({"a": tight, "b": report("io:cols")}).best == "b"
    assert compare({"a": tight}).best is None
    assert "none of them fits" in str(compare({"a": tight, "b": tight}))


def test_the_text_and_the_json():
    found = compare({"summed": report("io:cols"), "data": report("batch:rows,cols")}, {"odd": "cannot\nbecause"})
    text = str(found)
    assert "* data" in text and "odd is illegal\n  cannot\n  because" in text
    assert "from summed to data" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    record = found.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["differences"]["data"][0]["before"]["dims"] == ["io"]
    assert record["best"] == "data"
    assert compare({}, {"odd": "cannot"}).to_dict()["differences"] == {}
    assert repr(found) == "<Comparison of summed, data, odd; best data>"
    assert isinstance(found, Comparison) and "summed, data, odd" in found._repr_html_()
