"""Overrides: the choice is what looking at every combination finds, and what is said of it is true."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors.units import show_bytes
from meshdsl.layouts import layout as layouts
from meshdsl.search import overrides as module
from meshdsl.search.eliminate import Tables
from meshdsl.search.interacting import interacting_inputs
from meshdsl.search.parameters import parameters


def step(params: dict[str, Any], state: dict[str, Any], x: Any) -> Any:
    """A training step of a two-layer network with momentum."""

    def loss(params: dict[str, Any]) -> Any:
        h = md.relu(md.einsum(x, params["w"], out="batch hidden"))
        return md.mean(md.square(md.einsum(h, params["v"], out="batch io") - x))

    grads = md.grad(loss)(params)
    state = {"m": {name: 0.9 * m + grads[name] for name, m in state["m"].items()}}
    return {name: p - 0.1 * state["m"][name] for name, p in params.items()}, state


def three(params: dict[str, Any], x: Any) -> Any:
    """A chain of three products, and its update."""
    loss = lambda p: md.mean(md.square(md.dot(md.dot(md.dot(x, p["a"], "i"), p["b"], "j"), p["c"], "k")))  # noqa: E731
    grads = md.grad(loss)(params)
    return {name: p - 0.1 * grads[name] for name, p in params.items()}


WEIGHTS = {"w": md.spec("io:256 hidden:1024"), "v": md.spec("hidden:1024 io:256")}
STEP = (WEIGHTS, {"m": WEIGHTS}, md.spec("batch:64 io:256"))
THREE = (
    {"a": md.spec("i:512 j:256"), "b": md.spec("j:256 k:512"), "c": md.spec("k:512 l:256")},
    md.spec("batch:64 i:512"),
)
CASES = {
    "two layers": (step, STEP, "rows:2 cols:2", "batch:rows", ("w", "v"), (0, 1)),
    "a chain": (three, THREE, "rows:4", "batch:rows", ("a", "b", "c"), (0,)),
}


def brute(f: Any, args: Any, mesh: str, layout: str, names: Any, donate: Any) -> list[md.Report]:
    """The report of every legal combination of splits, made without the search."""
    axes = list(md.Mesh(mesh).axes)
    each = []
    for name in names:
        dims = [d.name for d in args[0][name].dims]
        sets = [s for n in range(len(axes) + 1) for s in itertools.combinations(axes, n)]
        picks = [dict(zip(dims, two, strict=True)) for two in itertools.product(sets, repeat=2)]
        each.append([p for p in picks if len({a for s in p.values() for a in s}) == sum(map(len, p.values()))])
    compiled, found = md.compile(f, mesh, "", donate=donate), []
    for picks in itertools.product(*each):
        given = {n: {d: s for d, s in p.items() if s} for n, p in zip(names, picks, strict=True)}
        try:
            with_them = md.Layout(layout, overrides={n: rules for n, rules in given.items() if rules})
            found.append(compiled.under(mesh, with_them).cost(*args, machine=ADDITIVE))
        except md.LayoutError:
            continue
    return found


V5E = md.machine("tpu-v5e")
# a compiler that combines collectives joins those of any parameters, so that times do not add up
ADDITIVE = dataclasses.replace(V5E, network=dataclasses.replace(V5E.network, combine={}))


@pytest.fixture(scope="module")
def reports() -> dict[str, list[md.Report]]:
    return {
        name: brute(f, args, mesh, layout, names, donate)
        for name, (f, args, mesh, layout, names, donate) in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("objective", "limits"),
    [("seconds", ("none", "middle", "least")), ("peak_bytes", ("none",)), ("wire_bytes", ("middle",))],
)
def test_the_choice_is_that_of_brute_force(case: str, objective: str, limits: tuple[str, ...], reports: Any):
    f, args, mesh, layout, _, donate = CASES[case]
    compiled = md.compile(f, mesh, "", donate=donate)
    sizes = sorted({report.peak_bytes for report in reports[case]})
    for limit in ({"none": math.inf, "middle": sizes[len(sizes) // 2], "least": sizes[0]}[name] for name in limits):
        found = md.search_overrides(
            compiled,
            *args,
            mesh=mesh,
            layout=layout,
            limit=limit,
            objective=objective,
            choices=None,
            machine=ADDITIVE,
        )
        fit = [report for report in reports[case] if report.peak_bytes <= limit]
        assert getattr(found.best, objective) == min(getattr(report, objective) for report in fit)
        assert found.best.fits and found.best.peak_bytes <= limit
        again = compiled.under(mesh, found.best.layout).cost(*args, machine=ADDITIVE)
        assert (again.seconds, again.peak_bytes) == (found.best.seconds, found.best.peak_bytes)
        assert found.gap >= 0 and f"gap {found.gap:.2%}" in str(found)


def test_where_nothing_fits_the_least_memory_is_named(reports: Any):
    f, args, mesh, layout, _, donate = CASES["a chain"]
    least = min(report.peak_bytes for report in reports["a chain"])
    compiled = md.compile(f, mesh, "", donate=donate)
    with pytest.raises(md.LayoutError, match=f"needs {show_bytes(least)}"):
        md.search_overrides(compiled, *args, mesh=mesh, layout=layout, limit=least - 1, choices=None)


def test_more_memory_than_there_is_becomes_less():
    """Overrides can make a layout fit into memory; optimizer state follows its parameter."""
    compiled = md.compile(step, "rows:4", "batch:rows", donate=(0, 1))
    whole = compiled.cost(*STEP)
    found = md.search_overrides(compiled, *STEP, mesh="rows:4", layout="batch:rows", limit=0.8 * whole.peak_bytes)
    assert not found.before.fits and found.best.fits and found.source == "chosen"
    program = compiled.under("rows:4", found.best.layout).program(*STEP)
    split = {v.name: v.sharding for v in program.ins}
    assert found.overrides
    for name in found.overrides:
        assert split[f"params/{name}"] == split[f"state/m/{name}"] and split[f"params/{name}"].split
    assert "over" not in str(found).partition("its program costs")[2]


def test_tables_that_miss_what_meets_are_found_out(monkeypatch: pytest.MonkeyPatch):
    """Without any pair measured the sum is wrong and says so; the answer is still a real program within the limit."""
    f, args, mesh, layout, _, donate = CASES["two layers"]
    compiled = md.compile(f, mesh, "", donate=donate)
    full = md.search_overrides(compiled, *args, mesh=mesh, layout=layout, choices=None, limit=2.5e6)
    assert full.counts.pairs == 1 and full.error == pytest.approx(0, abs=1e-9)
    monkeypatch.setattr(module, "interacting_inputs", lambda *_: set())
    blind = md.search_overrides(compiled, *args, mesh=mesh, layout=layout, choices=None, limit=2.5e6)
    assert blind.counts.pairs == 0 and blind.counts.programs < full.counts.programs
    assert blind.best.fits and full.best.seconds <= blind.best.seconds
    assert blind.chosen is not None and blind.error is not None and abs(blind.error) > 0.05
    assert blind.error == pytest.approx(blind.predicted / blind.chosen.seconds - 1)
    assert f"the sum was {blind.error:+.2%} off" in str(blind)


def test_what_does_not_fit_after_all_is_not_the_answer(monkeypatch: pytest.MonkeyPatch):
    """Tables that promise less memory than the programs take: another program is the answer, and the text says so."""
    f, args, mesh, layout, _, donate = CASES["two layers"]
    compiled = md.compile(f, mesh, "", donate=donate)
    true = Tables.within
    picked: list[tuple[int, ...]] = []

    def wrong(tables: Tables, cap: float) -> Any:
        found = true(tables, cap) if picked else true(tables, math.inf)
        picked.append(found.picks)
        return found

    limit = 2.5e6
    monkeypatch.setattr(Tables, "within", wrong)
    found = md.search_overrides(compiled, *args, mesh=mesh, layout=layout, choices=None, limit=limit)
    assert found.chosen is not None and found.chosen.peak_bytes > limit and len(picked) == 2
    assert found.source == "measured" and found.best.peak_bytes <= limit
    assert "over the limit" in str(found) and "not taken: another program" in str(found)


def test_fewer_choices_are_said_to_be_fewer():
    f, args, mesh, layout, _, donate = CASES["two layers"]
    compiled = md.compile(f, mesh, "", donate=donate)
    one = md.search_overrides(compiled, *args, mesh=mesh, layout=layout, choices=1)
    every = md.search_overrides(compiled, *args, mesh=mesh, layout=layout, choices=None)
    assert one.counts.choices == 2 and one.counts.choices + one.counts.left_out == every.counts.choices
    assert "left out" in str(one) and "left out" not in str(every)
    assert one.to_dict()["counts"]["programs"] < every.to_dict()["counts"]["programs"]


def test_overrides_that_are_there_stay():
    given = md.Layout("batch:rows", overrides={"w": {"hidden": "cols"}})
    compiled = md.compile(step, "rows:2 cols:2", "", donate=(0, 1))
    found = md.search_overrides(compiled, *STEP, mesh="rows:2 cols:2", layout=given, objective="peak_bytes")
    assert found.best.layout.for_path("params/w")["hidden"][:1] == ("cols",)
    assert found.best.peak_bytes < found.before.peak_bytes


@pytest.mark.parametrize("seed", range(40))
def test_elimination_is_exact(seed: int):
    draw = random.Random(seed)
    n = draw.randint(1, 5)
    sizes = [draw.randint(1, 4) for _ in range(n)]

    def table(*shape: int) -> np.ndarray:
        values = np.array([draw.randint(-9, 9) for _ in range(2 * math.prod(shape))], float).reshape(2, *shape)
        values[:, np.array([draw.random() < 0.1 for _ in range(math.prod(shape))]).reshape(shape)] = math.inf
        values.reshape(2, -1)[:, 0] = 0  # to keep everything is possible
        return values

    pairs = [pair for pair in itertools.combinations(range(n), 2) if draw.random() < 0.6]
    tables = Tables([table(size) for size in sizes], {(i, j): table(sizes[i], sizes[j]) for i, j in pairs})
    every = [tables.amounts(picks) for picks in itertools.product(*map(range, sizes))]
    assert tables.amounts(tables.least())[0] == min(cost for cost, _ in every)
    assert tables.amounts(tables.least(2.0, 3.0)) in [
        (c, m) for c, m in every if 2 * c + 3 * m == min(2 * c + 3 * m for c, m in every)
    ]
    loads = sorted({load for _, load in every if math.isfinite(load)})
    for cap in loads:
        capped, best = tables.within(cap), min(cost for cost, load in every if load <= cap)
        cost, load = tables.amounts(capped.picks)
        assert load <= cap and capped.bound - 1e-9 <= best <= cost
    assert tables.amounts(tables.within(loads[0] - 1).picks)[1] == loads[0]


def test_inputs_meet_inside_loops_and_around_them():
    """A layer has three products; the last weight interacts with the first one only around the loop."""

    def f(x: Any, w: Any, v: Any, t: Any, u: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            for each in weights:
                x = md.rename(md.dot(x, each, "a"), b="a")
            return x, x

        return md.dot(md.scan(layer, x, (w, v, t), over="layer")[0], u, "a")

    weight = md.spec("layer:2 a:4 b:4")
    graph = md.compile(f, "all:1").graph(md.spec("n:2 a:4"), weight, weight, weight, md.spec("a:4 c:4"))
    names = {v: i for i, v in enumerate(graph.ins)}
    around = {(0, 3), (1, 3)}  # what the carry starts from and what it comes back as lie alike
    assert interacting_inputs(graph, names) == {(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), *around}


def test_a_path_in_a_path_is_told_apart():
    """`bias` also ends in `deep/bias`: the override names full paths then."""

    def f(params: Any, x: Any) -> Any:
        grads = md.grad(lambda p: md.sum(md.square(x + p["bias"] + p["deep"]["bias"])))(params)
        return {"bias": grads["bias"], "deep": {"bias": grads["deep"]["bias"]}}

    args = {"bias": md.spec("a:4"), "deep": {"bias": md.spec("a:4")}}, md.spec("n:4 a:4")
    graph = md.compile(f, "rows:2").graph(*args)
    with pytest.raises(md.LayoutError, match="no override names params/bias alone"):
        parameters(graph, ["bias", "deep/bias"], None)
    found = parameters(graph, ["0/bias", "0/deep/bias"], None)
    paths = [v.name for v in graph.ins]
    for each in found:
        hit = {path for path in paths for p in each.patterns if layouts.matches(path, p)}
        assert hit == {each.path}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "batch:nowhere"}, "axis 'nowhere'"),
        ({"layout": "batch:rows io:rows"}, "cannot split dim"),
        ({"objective": "speed"}, "nothing can be searched for by 'speed'"),
        ({"choices": 0}, "at least 1 choice"),
        ({"tensors": "u"}, "tensors='u' matches no input"),
        ({"tensors": ""}, "tensors= is empty"),
        ({"machine": "abacus"}, "abacus"),
    ],
)
def test_bad_input(options: dict[str, Any], text: str):
    with pytest.raises(md.MeshdslError) as error:
        md.search_overrides(step, *STEP, **{"mesh": "rows:2 cols:2", "layout": "batch:rows", **options})
    assert text in str(error.value)


def test_a_function_that_updates_nothing_has_no_parameter_unless_named():
    def forward(x: Any, w: Any) -> Any:
        return md.dot(x, w, "io")

    args = md.spec("batch:64 io:256"), md.spec("io:256 hidden:1024")
    with pytest.raises(md.LayoutError, match="no input comes back among the results"):
        md.search_overrides(forward, *args, mesh="rows:2", layout="batch:rows")
    found = md.search_overrides(forward, *args, mesh="rows:2", layout="batch:rows", tensors="w", objective="peak_bytes")
    assert found.counts.tensors == 1 and found.best.peak_bytes <= found.before.peak_bytes
