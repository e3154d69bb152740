"""A search finds what looking at every layout finds, and says so truthfully."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.report.schema import SCHEMA_VERSION
from meshdsl.search import plans
from meshdsl.search.space import meshes


def two_layers(params: dict[str, Any], x: Any) -> Any:
    """A training step: the gradients of a two-layer network, and the update."""

    def loss(params: dict[str, Any]) -> Any:
        h = md.relu(md.einsum(x, params["w"], out="batch hidden"))
        return md.mean(md.square(md.einsum(h, params["v"], out="batch io") - x))

    grads = md.grad(loss)(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}


TWO_LAYERS = (
    {"w": md.spec("io:64 hidden:256"), "v": md.spec("hidden:256 io:64")},
    md.spec("batch:128 io:64"),
)


def attention(x: Any, w: Any) -> Any:
    """Layers of attention without a value projection, in a scan; its rows are kept."""

    def layer(x: Any, w: Any) -> Any:
        q = md.einsum(x, w, out="batch length heads head")
        k = md.rename(q, length="memory")
        weights = md.softmax(md.einsum(q, k, out="batch heads length memory"), "memory")
        y = md.einsum(weights, k, out="batch length heads head")
        x = x + md.einsum(y, w, out="batch length model")
        return x, md.sum(x, "model")

    return md.scan(layer, x, w, over="layer")


ATTENTION = (md.spec("batch:4 length:8 model:16"), md.spec("layer:3 model:16 heads:4 head:4"))


def mixture(batch: int, group: int, model: int, experts: int, inner: int, capacity: int) -> tuple[Any, tuple[Any, ...]]:
    """A mixture of experts with dispatch by einsums, as Mesh-TensorFlow has it, and the types of its arguments."""
    choice, slot = md.Dim("choice", experts), md.Dim("capacity", capacity)  # a choice is an expert, never split

    def layer(x: Any, gate: Any, wi: Any, wo: Any) -> Any:
        scores = md.softmax(md.einsum(x, gate, out="batch group choice"), "choice")
        chosen, index = md.top_k(scores, "choice", md.Dim("k", 2))
        weights = md.einsum(chosen, md.one_hot(index, choice, "float32"), out="batch group choice")
        mask = md.cast(weights > 0, "float32")
        place = md.cast(md.cumsum(mask, "group", exclusive=True), "int32")
        dims = (*place.dims, slot)
        here = md.broadcast(place, dims) == md.broadcast(md.iota(slot, "int32"), dims)
        dispatch = md.cast(here, "float32") * md.broadcast(mask, dims)
        combine = dispatch * md.broadcast(weights, dims)
        sent = md.einsum(x, dispatch, out="batch choice capacity model")
        sent = md.rename(sent, batch="sent", choice="experts")
        h = md.relu(md.einsum(sent, wi, out="sent experts capacity inner"))
        back = md.rename(md.einsum(h, wo, out="sent experts capacity model"), sent="batch", experts="choice")
        return md.einsum(back, combine, out="batch group model")

    args = (
        md.spec(f"batch:{batch} group:{group} model:{model}"),
        md.spec(f"model:{model} choice:{experts}"),
        md.spec(f"experts:{experts} model:{model} inner:{inner}"),
        md.spec(f"experts:{experts} inner:{inner} model:{model}"),
    )
    return layer, args


experts, EXPERTS = mixture(batch=8, group=8, model=16, experts=8, inner=32, capacity=4)

CASES = {
    "two layers, 2x2": (two_layers, TWO_LAYERS, "rows:2 cols:2", None),
    "two layers, 2x4": (two_layers, TWO_LAYERS, "rows:2 cols:4", None),
    "attention": (attention, ATTENTION, "rows:2 cols:2", ("batch", "length", "heads")),
    "attention, keys split": (attention, ATTENTION, "rows:2 cols:2", ("batch", "length", "memory", "heads")),
    "experts": (experts, EXPERTS, "all:4", ("batch", "sent", "experts", "choice", "model", "inner")),
}
SLOW = ("two layers, 2x4", "attention, keys split")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]


@functools.cache
def all_layouts(case: str) -> list[tuple[md.Layout, md.Report]]:
    """Every legal layout of a case with its report, found without the search."""
    f, args, mesh, dims = CASES[case]
    compiled = md.compile(f, mesh, "")
    graph = compiled.graph(*args)
    axes = list(md.Mesh(mesh).axes)
    sizes = {d.name: d.size for v in graph.ins for d in v.dims}
    for eqn in graph.eqns:
        for v in (*eqn.outs, *(v for sub in eqn.graphs().values() for e in sub.eqns for v in e.outs)):
            for d in v.dims:
                sizes[d.name] = max(d.size, sizes.get(d.name, 0))
    dims = [d for d in sizes if sizes[d] > 1 and (dims is None or d in dims)]
    cuts = [c for n in range(len(axes) + 1) for c in itertools.combinations(axes, n)]
    found = []
    for picks in itertools.product(*([c for c in cuts if md.Mesh(mesh).count(c) <= sizes[d]] for d in dims)):
        layout = md.Layout({d: c for d, c in zip(dims, picks, strict=True) if c})
        try:
            found.append((layout, compiled.under(mesh, layout).cost(*args, machine="tpu-v5e")))
        except md.LayoutError:
            continue
    return found


@pytest.mark.parametrize("case", NAMES)
def test_a_search_finds_what_brute_force_finds(case: str):
    f, args, mesh, dims = CASES[case]
    brute = all_layouts(case)
    found = md.search(f, *args, mesh=mesh, dims=dims, plans=300)
    outcomes = sorted({(r.seconds, r.peak_bytes, r.wire_bytes) for _, r in brute})
    entries = [found.best, *found.runners_up]
    assert {e.outcome for e in entries} == set(outcomes[:5]) or found.best.outcome not in outcomes[:5]
    near = [layout for layout, report in brute if report.seconds <= 1.01 * outcomes[0][0]]
    assert found.best.layout in near
    assert axes_of(found.best.layout) == min(map(axes_of, near)), "of plans within 1 %, the simplest"

    counts = found.counts
    assert found.complete and counts.estimated == counts.illegal + counts.costed
    assert counts.costed == len(brute)
    assert found.bound == outcomes[0][0] and found.gap == 1 - found.bound / found.best.seconds


def axes_of(layout: md.Layout) -> int:
    """How complex a layout is."""
    return sum(map(len, layout.rules.values()))


def test_a_limit_is_kept():
    f, args, mesh, _ = CASES["two layers, 2x2"]
    brute = all_layouts("two layers, 2x2")
    sizes = sorted({report.peak_bytes for _, report in brute})
    for limit in sizes[:: max(1, len(sizes) // 4)]:
        found = md.search(f, *args, mesh=mesh, limit=limit)
        assert found.best.peak_bytes <= limit and found.best.fits
        assert found.bound == min(r.seconds for _, r in brute if r.peak_bytes <= limit)
        assert found.best.seconds <= 1.01 * found.bound
    with pytest.raises(md.LayoutError) as error:
        md.search(f, *args, mesh=mesh, limit=sizes[0] - 1)
    assert "no plan costed fits" in str(error.value) and "the smallest needs" in str(error.value)


def test_an_entry_is_what_compile_says():
    f, args, mesh, dims = CASES["attention"]
    found = md.search(f, *args, mesh=mesh, dims=dims)
    for entry in (found.best, *found.runners_up):
        report = md.compile(f, entry.mesh, entry.layout).cost(*args, machine="tpu-v5e")
        assert (report.seconds, report.peak_bytes, report.wire_bytes) == (
            entry.seconds,
            entry.peak_bytes,
            entry.wire_bytes,
        )
        assert entry.report.seconds == entry.seconds


def test_fixed_rules_and_dims():
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", layout="batch:rows")
    assert all(entry.layout.axes("batch") == ("rows",) for entry in (found.best, *found.runners_up))
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", dims="io")
    assert {d for e in (found.best, *found.runners_up) for d in e.layout.rules} <= {"io"}


def test_every_mesh_of_a_number_of_devices():
    assert [str(mesh) for mesh in meshes(6)] == ["x:6", "x:2 y:3", "x:3 y:2"]
    found = md.search(two_layers, *TWO_LAYERS, devices=4)
    single = [md.search(two_layers, *TWO_LAYERS, mesh=mesh).best.seconds for mesh in ("x:4", "x:2 y:2")]
    assert found.best.seconds == min(single) and found.counts.meshes == 2


def test_one_text_and_one_dict():
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2")
    text, plain = str(found), found.to_dict()
    assert (
        "the best plan" in text
        and re.search("every plan is costed: [0-9]+ candidates, [0-9]+ illegal, [0-9]+ costed exactly", text)
        and "next:" in text
    )
    assert plain["schema_version"] == SCHEMA_VERSION and plain["best"]["layout"] == str(found.best.layout)
    assert plain["counts"]["costed"] == found.counts.costed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "a search takes a mesh or a number of devices, one of the two"),
        ({"mesh": "a:2", "devices": 2}, "a search takes a mesh or a number of devices, one of the two"),
        ({"mesh": []}, "at least one mesh"),
        ({"devices": 0}, "a mesh has at least 1 device, got 0"),
        ({"mesh": "a:2", "dims": "hiden"}, "did you mean 'hidden'"),
        ({"mesh": "a:2", "dims": "io", "layout": "io:a"}, "dim 'io' has a fixed rule"),
        ({"mesh": "a:2", "layout": "hidden:a io:a"}, "every plan is illegal"),
        ({"mesh": "a:100000"}, "the machine has at most"),
    ],
)
def test_bad_input(options: dict[str, Any], text: str):
    with pytest.raises(md.LayoutError) as error:
        md.search(two_layers, *TWO_LAYERS, **options)
    assert text in str(error.value)


def test_experts_and_batch_share_an_axis_where_auto_mtf_does_not_find_it():
    """auto_mtf cannot split batch and experts over one axis, and returns batch and the experts' hidden dim."""
    layer, args = mixture(batch=8, group=256, model=256, experts=8, inner=1024, capacity=64)

    def gradients(x: Any, *params: Any) -> Any:
        return md.grad(lambda params: md.mean(md.square(layer(x, *params))))(params)

    def sent(layout: str) -> float:
        program = md.compile(gradients, "all:8", layout).program(*args)
        return sum(record.wire_bytes * record.count for record in program.collectives) // 4  # elements, one device

    theirs, ours = sent("batch:all inner:all"), sent("batch:all experts:all")
    assert ours < theirs / 4  # 48.4 and 11.7 million in their report
    fast = md.search(gradients, *args, mesh="all:8")
    assert fast.best.layout.axes("batch") == fast.best.layout.axes("experts") == ("all",)
    assert fast.best.wire_bytes // 4 <= ours


def test_search_of_few_plans_says_how_much_better_another_layout_can_be():
    """The most promising plan is the answer; the bound holds for the one that a whole search finds."""
    whole = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2")
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", plans=1)
    assert whole.complete and not found.complete and found.counts.costed == 1
    assert found.bound <= whole.best.seconds <= found.best.seconds <= 1.01 * whole.best.seconds
    assert found.gap == 1 - found.bound / found.best.seconds > 0
    assert "plans estimated, 1 costed exactly" in str(found) and f"{found.gap:.0%} less than the best plan" in str(
        found
    )
    assert found.to_dict()["gap"] == found.gap and whole.bound == whole.best.seconds


def test_search_interrupted_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    def interrupt(progress: Any) -> None:
        if progress.counts.costed == 8:
            raise KeyboardInterrupt

    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", progress=interrupt)
    assert found.stopped == "an interrupt" and found.counts.costed and found.gap > 0

    def at_once(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans.PlanSearch, "every", at_once)
    with pytest.raises(KeyboardInterrupt):
        md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2")


def test_search_reports_progress():
    seen: list[Any] = []
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", progress=seen.append)
    assert len(seen) > 10 and seen[-1].best.seconds == found.best.seconds
    assert "costed" in str(seen[-1])
    assert [p.bound for p in seen] == sorted(p.bound for p in seen)


def test_search_with_sharded_updates_looks_at_everything():
    compiled = md.compile(two_layers, "rows:2", "", weight_update="sharded")
    found = md.search(compiled, *TWO_LAYERS, mesh="rows:2")
    assert found.complete and found.gap == 0
    again = compiled.under("rows:2", found.best.layout).cost(*TWO_LAYERS)
    assert (again.seconds, again.peak_bytes) == (found.best.seconds, found.best.peak_bytes)


def test_search_of_many_layouts_ends_with_a_gap() -> None:
    whole = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2")
    found = md.search(two_layers, *TWO_LAYERS, mesh="rows:2 cols:2", plans=10)
    assert found.best.seconds == whole.best.seconds and 0 < found.bound <= whole.best.seconds
    assert found.gap > 0 and not found.complete and found.counts.costed <= 10


def test_search_undoes_what_saves_less_than_a_hundredth() -> None:
    """A layout with a rule that hardly helps is not what a search returns, also if it is the fastest."""

    def step(x: Any, w: Any, small: Any) -> Any:
        return md.dot(md.relu(md.dot(x, w, "io")), w, "hidden"), small * 2

    args = md.spec("batch:8192 io:1024"), md.spec("io:1024 hidden:4096"), md.spec("window:8 height:4096")
    found = md.search(step, *args, mesh="all:8", plans=8)
    fastest = min((found.best, *found.runners_up), key=lambda each: each.seconds)
    assert found.best.layout == md.Layout("batch:all") and found.best.seconds > fastest.seconds
    assert len(fastest.layout.rules) == 2 and found.best.seconds <= 1.01 * fastest.seconds
