"""Collectives that a compiler combines: which ones, and how long their operands are held."""

from __future__ import annotations

import graphlib
import random
from collections import Counter
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.combining import Part, combined_sums, groups
from meshdsl.cost.fusion import Send, steps
from meshdsl.cost.liveness import Lives
from meshdsl.ir import Var
from meshdsl.models.transformer import lm
from meshdsl.targets import MemoryRules


def grouped(order: str, edges: dict[str, str], limit: float = 10.0) -> list[str]:
    """The groups of items 'aA...', where letters in upper and lower case are of one kind and have one byte."""
    found = groups(list(order), lambda item: Part(item.lower(), 1.0, limit), lambda item: list(edges.get(item, "")))
    return ["".join(item for item, _ in group) for group in found]


def test_items_of_one_kind_are_combined_up_to_the_limit() -> None:
    assert grouped("abAB", {}) == ["aA", "bB"]
    assert grouped("aAbB", {}, limit=1) == ["a", "A", "b", "B"]


def test_an_item_that_depends_on_its_group_begins_another() -> None:
    assert grouped("aA", {"a": "A"}) == ["a", "A"]
    assert grouped("abA", {"a": "b", "b": "A"}) == ["a", "b", "A"]


def test_groups_do_not_depend_on_each_other_in_a_circle() -> None:
    """b waits for a, and A for B: with a and A as one, and b and B as one, each would wait for the other."""
    assert grouped("abBA", {"a": "b", "B": "A"}) == ["a", "bB", "A"]
    assert grouped("BaAb", {"a": "b", "B": "A"}) == ["B", "aA", "b"]


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_stay_without_circles(seed: int) -> None:
    draw = random.Random(seed)
    items = list(range(14))
    readers = {i: [j for j in items[i + 1 :] if draw.random() < 0.15] for i in items}
    kinds = [draw.choice("abc-") for _ in items]
    found = groups(items, lambda i: None if kinds[i] == "-" else Part(kinds[i], 1.0, 4.0), lambda i: readers[i])
    group_of: dict[int, Any] = {item: ("group", k) for k, group in enumerate(found) for item, _ in group}
    needs: dict[Any, set[Any]] = {group_of.get(i, i): set() for i in items}
    for i in items:
        for j in readers[i]:
            needs[group_of.get(j, j)].add(group_of.get(i, i))
    graphlib.TopologicalSorter(needs).prepare()  # raises for a circle
    assert sorted(group_of) == [i for i in items if kinds[i] != "-"]
    assert all(len(group) <= 4 for group in found)


@pytest.mark.parametrize("layout", ["data", "model", "data_model", "sequence"])
def test_every_value_is_made_once_and_before_it_is_read(layout: str) -> None:
    workload = lm.replace(batch=16, length=64, vocab=64, layers=3, d_model=64, heads=8, d_head=8, d_ff=256)
    program = md.compile(workload.train_step(), *lm.layouts[layout]).program(*workload.specs())
    before = steps(program)
    after = combined_sums(program, before, 2**27)
    assert combined_sums(program, before, 0.0) == list(before)
    fewer = sum(isinstance(step, Send) for step in before) - sum(isinstance(step, Send) for step in after)
    assert fewer > 0 or layout == "model", "gradients are summed together, but not one after the other"
    for side in ("reads", "writes"):
        assert Counter(v for step in after for v in getattr(step, side)) == Counter(
            v for step in before for v in getattr(step, side)
        )
    computed = {v for step in before for v in step.writes}
    made: set[Var] = set()
    for step in after:
        assert made.issuperset(computed.intersection(step.reads)), step
        made.update(step.writes)


def test_the_operand_of_a_combined_sum_waits_for_the_others() -> None:
    def f(x: md.Tensor, y: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        first = md.cumsum(md.sum(md.cumsum(x, "b"), "a"), "b")
        return first, md.cumsum(md.sum(md.cumsum(y, "b"), "a"), "b")

    program = md.compile(f, "x:2", "a:x").program(md.spec("a:16 b:16"), md.spec("a:16 b:16"))
    alone, together = (Lives(program, frozenset(), {}, MemoryRules(combines=n)) for n in (0.0, 2.0**27))
    each = ["cumsum", "sum", "all_reduce", "cumsum"]
    assert [label for label, *_ in alone.moments] == ["arguments", *each, *each, "results"]
    both = ["cumsum", "sum", "cumsum", "sum", "all_reduce", "cumsum", "cumsum"]
    assert [label for label, *_ in together.moments] == ["arguments", *both, "results"]
    first_sum = [min(t.last for t in lives.tensors if t.name == "sum") for lives in (alone, together)]
    assert first_sum == [2, 4], "held until the other sum is there"
