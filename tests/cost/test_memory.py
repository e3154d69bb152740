"""Liveness by hand on small programs, and laws on large ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import meshdsl as md
from meshdsl.cost.memory import CATEGORIES, Memory
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm

KB = 1024  # of float32[16, 16]
X = md.spec("a:16 b:16")
LM = lm.replace(batch=16, length=64, vocab=64, layers=3, d_model=64, heads=4, d_head=16, d_ff=256)


def of(
    f: Callable[..., Any], *specs: Any, mesh: str = "x:1", layout: str = "", donated: tuple[int, ...] = ()
) -> Memory:
    program = md.compile(f, mesh, layout).program(*specs)
    return checked(md.memory(program, donated=[program.ins[i] for i in donated]))


def checked(found: Memory) -> Memory:
    """The laws that hold for every program."""
    assert found.peak == found.at.bytes == max(moment.bytes for moment in found.profile)
    assert sum(found.by_category.values()) == found.peak == sum(held.bytes for held in found.by_tensor)
    assert [moment.index for moment in found.profile] == list(range(len(found.profile)))
    first, last = found.profile[0], found.profile[-1]
    assert (first.op, last.op) == ("arguments", "results")
    assert first.bytes == last.bytes == min(moment.bytes for moment in found.profile)
    kept = [n for name, n in zip(CATEGORIES, last.by_category, strict=True) if name in CATEGORIES[4:]]
    assert not any(kept), "at the end only arguments and results are left"
    sizes = [held.bytes for held in found.by_tensor]
    assert sizes == sorted(sizes, reverse=True)
    json.dumps(found.to_dict())
    return found


def held(found: Memory) -> dict[str, int]:
    return {name: n for name, n in found.by_category.items() if n}


def twice(x: md.Tensor, w: md.Tensor) -> md.Tensor:
    """Two products one after the other, with what stays inside a kernel between them."""
    return md.einsum(md.relu(md.einsum(x, w, out="a c")), w, out="a b")


W = md.spec("b:16 c:16")


def test_a_value_is_held_from_its_kernel_to_its_last_reader() -> None:
    found = of(twice, X, W)
    assert held(found) == {"inputs": 2 * KB, "results": KB, "temporaries": KB}
    assert [moment.bytes // KB for moment in found.profile] == [3, 4, 4, 3]  # arguments, einsum with relu, einsum, end


def test_a_device_holds_its_block() -> None:
    assert of(twice, X, W, mesh="x:4", layout="a:x").peak == KB + 3 * KB // 4
    split = of(twice, X, W, mesh="x:4", layout="c:x")
    assert split.peak == KB + KB // 4 + KB + KB // 4 + KB  # x, w, result, relu's, partial sum


def test_a_collective_holds_its_operand() -> None:
    found = of(lambda x, w: md.einsum(x, w, out="a c"), X, W, mesh="x:4", layout="b:x")
    assert held(found) == {"inputs": KB // 2, "results": KB, "collective buffers": KB}
    assert found.at.op == "einsum"


def test_elementwise_results_take_the_place_of_what_they_are_made_of() -> None:
    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        y = md.cumsum(x, "a")
        return md.cumsum(md.cumsum(y + md.sum(y, "b"), "b"), "a")

    assert of(f, X, W).peak == 2 * KB + KB + 2 * KB  # two at a time: the sum of both is where y was
    kept = of(
        lambda x, w: (lambda y: md.cumsum(md.cumsum(y + w, "a"), "b") + y)(md.cumsum(x, "a")), X, md.spec("a:16 b:16")
    )
    assert kept.peak == 2 * KB + KB + 3 * KB  # y is read again


def test_a_result_takes_the_place_of_a_donated_argument() -> None:
    def step(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        return w - md.einsum(md.transpose(x, "b a"), x, out="b a") * 0.1

    w = md.spec("b:16 a:16")
    plain, donated = of(step, w, X), of(step, w, X, donated=(0,))
    assert held(plain)["results"] == KB and "results" not in held(donated)
    assert plain.peak == donated.peak + KB


def test_a_donated_argument_that_is_read_later_keeps_its_place() -> None:
    def step(w: md.Tensor, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        new = md.cumsum(w, "b")
        return new, md.einsum(md.cumsum(md.einsum(new, x, out="b c"), "c"), w, out="a c")

    specs = md.spec("b:16 a:16"), md.spec("a:16 c:16")
    found = of(step, *specs, donated=(0,))
    assert of(step, *specs).peak == found.peak + KB - KB  # a place of its own either way, until w has been read


def test_a_donated_argument_of_another_type_gives_no_place() -> None:
    found = of(lambda x: md.cast(md.cumsum(x, "a"), "bfloat16"), X, donated=(0,))
    assert held(found)["results"] == KB // 2


def test_a_scan_holds_its_stack_its_carry_and_one_trip() -> None:
    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(carry: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            inner = md.cumsum(md.einsum(carry, row, out="a c"), "c")
            return md.einsum(inner, row, out="a b"), md.sum(inner, "c")

        carry, ys = md.scan(body, x, w, over="t")
        return md.sum(carry) + md.sum(ys)

    found = of(f, X, md.spec("t:8 b:16 c:16"))
    stack, trip = 8 * 16 * 4, 2 * KB  # the product and its sums
    assert found.peak == KB + 8 * KB + 4 + KB + stack + trip
    assert sum(moment.op == "cumsum" for moment in found.profile) == 1  # one trip stands for all
    assert of(f, X, md.spec("t:16 b:16 c:16")).peak == found.peak + 8 * KB + stack


def gradients(model: str, trips: int = 8) -> Memory:
    """A loop whose carry is multiplied, and whose other result is a product of the same operands."""

    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(carry: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            inner = md.cumsum(md.einsum(carry, row, out="a c"), "a")
            return md.einsum(inner, row, out="a b"), md.einsum(inner, carry, out="c b")

        return md.scan(body, x, w, over="t")

    return of(
        f, md.spec("a:64 b:16"), md.spec([md.Dim("t", trips), *md.spec("b:16 c:256").dims]), mesh="x:2", layout=model
    )


def test_a_carry_that_goes_from_loop_to_loop_is_held_once() -> None:
    def step(c, row):
        return c * row, None

    def two_loops(x, rows):
        c, _ = md.scan(step, md.exp(x), rows, over="layer")
        c, _ = md.scan(step, c, rows, over="layer")
        return md.sum(c)

    program = md.compile(two_loops, "rows:1", "").program(md.spec("batch:1000"), md.spec("layer:4"))
    assert md.memory(program).peak == 4000 + 16 + 4 + 4000


def test_the_carry_of_a_loop_with_collectives_is_computed_first() -> None:
    """The operand of the other product is then held beside the collective's."""
    moments = [moment.op for moment in gradients("c:x").profile]
    body = moments[moments.index("cumsum") :]
    assert body[:4] == ["cumsum", "einsum", "all_reduce", "einsum"], body


@pytest.mark.parametrize(
    ("layout", "remat", "carry_first"),
    [
        pytest.param("data", True, True, id="sums of gradients only"),
        pytest.param("data_model", False, True, id="a sum of the forward pass is stored"),
        pytest.param("data_model", True, False, id="a sum of the forward pass runs again"),
    ],
)
def test_gradients_of_weights_wait_unless_a_sum_runs_again(layout: str, remat: bool, carry_first: bool) -> None:
    """The carry of the backward loop ends with the residual sum of a layer; products for gradients come after it."""
    mesh, rules = lm.layouts[layout]
    workload = LM.replace(remat=remat, heads=8, d_head=8)
    step = md.compile(workload.train_step(), mesh, rules, weight_update=md.WeightUpdate("sharded", regather=True))
    profile = md.memory(step.program(*workload.specs())).profile
    body = [moment.op for moment in profile if moment.backward and "transformer.py:7" in str(moment.where)]
    carry = len(body) - body[::-1].index("add")
    assert ("einsum" in body[carry:]) == carry_first, body


def test_an_elementwise_kernel_of_a_loop_runs_with_its_first_reader() -> None:
    """Its operands are held until then: compilers make one kernel of the two."""

    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(carry: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            both = md.cumsum(carry, "a") * md.cumsum(carry, "b")
            other = md.cumsum(md.einsum(carry, row, out="a c"), "c")
            total = md.sum(both * md.rename(other, c="b"), "b")
            return md.cumsum(md.rename(md.einsum(both, row, out="a c"), c="b"), "b"), total

        return md.scan(body, x, w, over="t")

    moments = [moment.op for moment in of(f, X, md.spec("t:8 b:16 c:16")).profile]
    at = moments.index("multiply")
    assert moments[at - 1 : at + 2] == ["cumsum", "multiply", "sum"] and "einsum" in moments[:at], moments


def test_a_loop_of_one_trip_is_inlined() -> None:
    """Its results are no stacks, and need no buffers before the loop begins."""
    moments = [moment.op for moment in gradients("", trips=1).profile]
    assert "scan" not in moments and moments.count("cumsum") == 1


def gated(x: md.Tensor, w: md.Tensor, v: md.Tensor, keep: bool) -> tuple[md.Tensor, ...]:
    """A product of two factors that two products read, and, if it is a result, memory as well."""
    left, right = md.cumsum(md.einsum(x, w, out="a c"), "a"), md.cumsum(md.einsum(x, v, out="a c"), "a")
    both = left * right
    results = md.einsum(both, w, out="a b"), md.einsum(both, x, out="c b")
    return (*results, both) if keep else results


def test_products_compute_their_elementwise_operands_again() -> None:
    """Two products that alone read a value both compute it, so its operands stay in memory until both have run."""
    specs = md.spec("a:16 b:16"), W, W
    moments = {keep: of(partial(gated, keep=keep), *specs) for keep in (False, True)}
    assert [moment.op for moment in moments[False].profile].count("multiply") == 0
    assert [moment.op for moment in moments[True].profile].count("multiply") == 1
    last = [moment for moment in moments[False].profile if moment.op == "einsum"][-1]
    assert last.bytes == 3 * KB + 2 * KB + 2 * KB  # arguments, results, the two factors


def saved_weights(layers: int) -> Memory:
    """A loop over layers of attention, whose weights a later loop may read."""

    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            k = md.rename(md.einsum(h, row, out="batch length out"), length="memory", out="io")
            weights = md.cast(md.softmax(md.einsum(k, h, out="batch memory length"), "memory"), "bfloat16")
            return md.cast(md.einsum(weights, k, out="batch length io"), "float32"), weights

        return md.scan(body, x, w, over="t")

    w = md.spec([md.Dim("t", layers), *md.spec("io:4 out:4").dims])
    return of(f, md.spec("batch:2 length:64 io:4"), w)


def test_a_loop_writes_the_weights_of_attention_into_their_stack() -> None:
    """The products of a trip read them there."""
    weights, found = 2 * 64 * 64 * 2, saved_weights(4)
    assert [held.bytes for held in found.by_tensor].count(4 * weights) == 1
    held = {moment.op: moment.bytes for moment in found.profile}
    assert held["cast"] - held["results"] < 3 * weights, "the exponentials take 2"


def test_a_softmax_whose_readers_read_the_stack_stores_no_scores() -> None:
    """Its kernel computes them and writes the weights into the stack."""

    def f(x: md.Tensor, w: md.Tensor) -> Any:
        def body(h: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
            k = md.rename(h * row, length="memory")
            weights = md.cast(md.softmax(md.einsum(k, h, out="batch memory length"), "memory"), "bfloat16")
            return md.cast(md.einsum(weights, k, out="batch length io"), "float32"), weights

        return md.scan(body, x, w, over="t")

    program = md.compile(f, "x:1", "").program(md.spec("batch:2 length:4096 io:4"), md.spec("t:2 io:4"))
    scores = 2 * 4096 * 4096 * 4
    sizes = [[held.bytes for held in md.memory(program, machine=name).by_tensor] for name in ("h100", "tpu-v5e")]
    assert [tensors.count(scores) for tensors in sizes] == [2, 1], "the stack; on a GPU, also the scores"


@pytest.mark.parametrize("out", [16, 64])
def test_a_grouped_product_needs_sorted_rows_or_results(out: int) -> None:
    """Whichever are larger: the other ones take the place of the result until it is written."""

    def f(x: md.Tensor, w: md.Tensor, i: md.Tensor) -> md.Tensor:
        return md.grouped_dot(x, w, i, by="expert", over="io")

    w = md.spec([*md.spec("expert:4 io:32").dims, md.Dim("out", out)])
    found = of(f, md.spec("token:64 io:32"), w, md.spec("token:64", "int32"))
    arguments, result = 64 * 32 * 4 + 4 * 32 * out * 4 + 64 * 4, 64 * out * 4
    assert found.peak == arguments + result + max(64 * 32 * 4, result)


def test_of_a_conditional_the_larger_arm_counts() -> None:
    def f(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def small(x: md.Tensor) -> md.Tensor:
            return x + 1.0

        def large(x: md.Tensor) -> md.Tensor:
            return md.cumsum(md.einsum(md.cumsum(x, "a"), w, out="a c"), "a") + 1.0

        return md.cond(md.sum(x) > 0, small, lambda x: md.rename(large(x), c="b"), x)

    # the predicate, and of the large arm two values at a time beside the place of the result
    assert of(f, X, W).peak == 2 * KB + KB + 1 + 2 * KB


def test_a_while_loop_holds_its_carry_and_one_trip() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        return md.while_loop(lambda x: md.sum(x) > 1.0, lambda x: md.cumsum(x, "a") * 0.5, x)

    assert of(f, X).peak == pytest.approx(3 * KB, abs=64)  # argument, carry, sums


def test_categories_come_from_paths_or_from_the_caller() -> None:
    step = md.compile(LM.train_step(), "x:2", "batch:x")
    program = step.program(*LM.specs())
    found = checked(md.memory(program))
    first = dict(zip(CATEGORIES, found.profile[0].by_category, strict=True))
    sizes = {
        kind: sum(program.local_bytes(v) for v in program.ins if v.name.startswith(kind))
        for kind in ("params", "state", "batch")
    }
    assert [first["parameters"], first["optimizer state"], first["inputs"]] == list(sizes.values())
    named = checked(md.memory(program, categories=dict.fromkeys(program.ins, "parameters")))
    assert named.by_category["parameters"] == sum(sizes.values()) and named.peak == found.peak


def test_the_peak_names_tensors_with_their_lines() -> None:
    program = md.compile(LM.train_step(), "x:2", "batch:x").program(*LM.specs())
    found = md.memory(program)
    names = {one.name: one for one in found.by_tensor}
    assert names["params/embed"].shape == (64, 64) and names["params/embed"].bytes == 64 * 64 * 4
    saved = [one for one in found.by_tensor if one.category == "saved activations"]
    assert saved and all(str(one.where).startswith("models/transformer.py:") for one in saved)
    assert str(found).startswith(f"peak {found.peak / 1e6:.2f} MB at ")


def test_rematerialisation_lowers_the_peak() -> None:
    peaks = []
    for remat in (False, True):
        workload = LM.replace(remat=remat, layers=8)
        program = md.compile(workload.train_step(), "x:2", "batch:x").program(*workload.specs())
        peaks.append(checked(md.memory(program)).by_category["saved activations"])
    assert peaks[1] < peaks[0] / 3


@pytest.mark.parametrize(
    ("keys", "group", "mesh", "arrays"),
    [
        pytest.param(2048, "", "x:1", 1, id="few keys"),
        pytest.param(4096, "", "x:1", 2, id="many keys"),
        pytest.param(8192, "", "x:1", 2, id="the largest softmax with a kernel"),
        pytest.param(16384, "", "x:1", 1, id="more keys"),
        pytest.param(4096, "group:2", "x:1", 1, id="grouped queries"),
        pytest.param(8192, "", "x:2", 1, id="other devices have half of the keys"),
    ],
)
def test_scores_of_many_keys_are_stored_beside_their_exponentials(
    keys: int, group: str, mesh: str, arrays: int
) -> None:
    """The kernels of a softmax of few keys compute the exponentials again, those of many keys read them."""

    def attend(q: md.Tensor, k: md.Tensor) -> md.Tensor:
        weights = md.softmax(md.einsum(k, q, out=f"batch heads {group[:5]} memory length"), "memory")
        return md.einsum(weights, k, out=f"batch heads {group[:5]} length head")

    q = md.spec(f"batch:2 heads:1 {group} length:8 head:1")
    found = of(
        attend, q, md.spec(f"batch:2 heads:1 memory:{keys} head:1"), mesh=mesh, layout="memory:x" * (mesh != "x:1")
    )
    size = 2 * keys * 8 * 4 * (2 if group else 1) // int(mesh[2:])
    large = [held.name for held in found.by_tensor if held.bytes == size]
    assert len(large) == arrays, found


@pytest.mark.parametrize(("batch", "arrays"), [(2, 2), (1, 1)])
def test_logits_are_stored_beside_their_exponentials(batch: int, arrays: int) -> None:
    def loss(x: md.Tensor, w: md.Tensor, targets: md.Tensor) -> md.Tensor:
        return md.sum(md.nn.softmax_cross_entropy(md.einsum(x, w, out="batch length vocab"), targets, "vocab"))

    x = md.spec([md.Dim("batch", batch), *md.spec("length:8 io:2").dims])
    found = of(loss, x, md.spec("io:2 vocab:8192"), md.spec([*x.dims[:2]], "int32"))
    large = [held.name for held in found.by_tensor if held.bytes == batch * 8 * 8192 * 4]
    assert len(large) == arrays, found


@pytest.mark.parametrize("workload", [mlp, LM, LM.replace(remat=True)], ids=["mlp", "lm", "remat"])
def test_every_layout_holds_at_least_its_arguments(workload: md.Workload) -> None:
    for mesh, layout in workload.layouts.values():
        program = md.compile(workload.train_step(), mesh, layout).program(*workload.specs())
        donated = [v for v in program.ins if not v.name.startswith("batch")]
        plain, saved = checked(md.memory(program)), checked(md.memory(program, donated=donated))
        assert plain.peak > saved.peak >= sum(map(program.local_bytes, program.ins))


def test_a_deep_model_on_many_devices_takes_no_time() -> None:
    workload = lm.replace(layers=64, batch=512)
    program = md.compile(workload.train_step(), "rows:256 cols:8", lm.layouts["sequence"][1]).program(*workload.specs())
    start = time.perf_counter()
    checked(md.memory(program))
    assert time.perf_counter() - start < 2  # 0.02 s on an idle machine
