"""Searches choose no axes for dims that users did not write, and tables print no empty columns."""

import meshdsl as md
from meshdsl.cost.report.html import Cell, sortable
from meshdsl.errors.tables import table
from meshdsl.search.space import space


def test_search_leaves_out_private_dims() -> None:
    optimizer = md.optim.with_clipping(md.optim.sgd(0.1), 1.0)
    params = {"w": md.spec("io:8 hidden:8")}
    step = md.compile(lambda params, state: optimizer.update(params, state, params), "x:2", "")
    graph = step.graph(params, md.eval_shape(optimizer.init, params))
    assert not [d for d in space(graph).sizes if "__" in d or d == "magnitude"]


def test_table_leaves_out_columns_without_text() -> None:
    assert table(["a", "", "b"], [["1", "", "2"], ["3", "", "4"]], "<<>") == "  a  b\n  1  2\n  3  4"


def test_html_table_leaves_out_columns_without_text() -> None:
    shown = sortable(["a", "rate", "b"], [[Cell("1"), Cell(""), Cell("2", 2.0)]])
    assert "rate" not in shown and shown.count("<td") == shown.count("<th>") == 2
