"""The picture of plans by time and memory: the front, and every plan inside the drawing."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from meshdsl.cost.report.tradeoff import HEIGHT, WIDTH, TradeoffPoint, pareto, tradeoff


@pytest.mark.parametrize("seed", range(20))
def test_tradeoff_draws_the_front_and_every_plan_inside(seed: int):
    rng = random.Random(seed)
    points = [TradeoffPoint(rng.uniform(1, 3), rng.uniform(1e9, 9e9), f"plan <{i}>") for i in range(rng.randint(1, 40))]
    front = pareto(points)
    for p in points:
        beaten = any(q.seconds <= p.seconds and q.peak_bytes <= p.peak_bytes and q[:2] != p[:2] for q in points)
        assert (p in front) is not beaten
    svg = ET.fromstring(tradeoff(points, rng.choice([5e9, 1e12, 1.0])))
    circles = list(svg.iter("circle"))
    assert len(circles) == len([p for p in points if p.seconds <= 12]) and sum(
        c.attrib["class"] == "kernel-matmul" for c in circles
    ) == len(front)
    assert all(0 <= float(c.attrib["cx"]) <= WIDTH and 0 <= float(c.attrib["cy"]) <= HEIGHT for c in circles)
