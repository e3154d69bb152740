"""Claims: a new dim takes its axis if no other dim of the tensor has it; two dims that both come with it conflict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.programs import same_bits

E = md.Dim("E", 8)
NEW: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "broadcast": lambda x: md.broadcast(x, "G E:8") * 2,
    "one_hot": lambda x: md.one_hot(md.cast(x, "int32"), E),
    "stack": lambda x: md.stack([x] * 8, E),
    "rename": lambda x: md.rename(md.broadcast(x, "G m:8"), m="E"),
    "unflatten": lambda x: md.unflatten(md.broadcast(x, "G m:16"), "m", "E:8 n:2"),
    "top_k": lambda x: md.top_k(md.broadcast(x, "G m:16"), "m", E)[0],
    "vmap": lambda x: md.vmap(lambda k: x * k, over="E")(md.iota(E, dtype="float64")),
    "local": lambda x: md.local(lambda x: md.broadcast(x, "E:8 G"), x, out="E:8 G"),
    "loop": lambda x: md.scan(lambda c, _: (c, md.broadcast(x, "G E:8")), 0.0, None, over="t:2")[1],
}


@pytest.mark.parametrize("by", ["an annotation", "the layout"])
@pytest.mark.parametrize("name", NEW)
def test_claims_of_a_new_dim_leave_a_taken_axis(name: str, by: str) -> None:
    def f(x: md.Tensor) -> md.Tensor:
        return NEW[name](md.shard(x, {"G": "d"}) if by == "an annotation" else x)

    x = md.tensor(np.arange(6.0), "G")
    step = md.compile(f, "d:4", "E:d" if by == "an annotation" else "G:d; E:d")
    assert same_bits(md.simulate(step.program(x), x), [f(x).numpy()])
    assert same_bits([step(x).numpy()], [f(x).numpy()])


def test_claims_of_existing_dims_conflict_and_name_a_free_axis() -> None:
    """An axis is free if nothing claims it, whether by a rule, an override or an annotation."""
    x, w = md.spec("i:8 k:8"), md.spec("k:8 j:8")
    ways: list[tuple[Any, Any]] = [
        (md.Layout("i:x; j:x"), lambda x, w: md.einsum(x, w, out="i j")),
        (md.Layout("", overrides={"x": "i:x", "w": "j:x"}), lambda x, w: md.einsum(x, w, out="i j")),
        (md.Layout("j:x"), lambda x, w: md.einsum(md.shard(x, {"i": "x"}), w, out="i j")),
        (md.Layout("j:x; k:z", overrides={"x": "i:x k:z"}), lambda x, w: md.einsum(x, w, out="i j")),
    ]
    for layout, f in ways:
        free = "'y'" if "z" in str(layout) else "'y', 'z'"
        with pytest.raises(md.LayoutError, match=rf"cannot split dim 'j' over mesh axis 'x'(.*\n)*.*\(free: {free}\)"):
            md.compile(f, "x:2 y:2 z:2", layout).program(x, w)


def test_claims_of_a_new_dim_win_if_the_model_prefers_it() -> None:
    def f(x: md.Tensor) -> md.Tensor:
        return md.prefer(md.broadcast(md.shard(x, {"G": "d"}), "G:8 E:8"), "E")

    program = md.compile(f, "d:8", "E:d").program(md.spec("G:8"))
    (made,) = [eqn.outs[0] for eqn in program.eqns if str(eqn.op) == "broadcast"]
    assert made.sharding.axes("E") == ("d",)


def test_claims_of_gshard_algorithm_2() -> None:
    """Groups of tokens by annotations, experts by the layout; the gates keep the groups (GShard, Algorithm 2)."""

    def moe(x: md.Tensor, gate: md.Tensor, wi: md.Tensor, wo: md.Tensor) -> md.Tensor:
        x = md.shard(x, {"G": "d"})
        gates = md.softmax(md.einsum(x, gate, out="G S E"), "E")
        routing = md.nn.moe.route(gates, tokens="S", experts="E", capacity=md.Dim("C", 4), router="top2")
        sent = md.shard(md.einsum(md.cast(routing.dispatch, "float64"), x, out="E G C M"), {"E": "d"})
        y = md.einsum(md.relu(md.einsum(sent, wi, out="E G C H")), wo, out="G E C M")
        return md.einsum(routing.combine, md.shard(y, {"G": "d"}), out="G S M")

    dims = ["G:8 S:16 M:6", "M:6 E:8", "E:8 M:6 H:12", "E:8 H:12 M:6"]
    rng = np.random.default_rng(0)
    xs = [md.tensor(rng.normal(size=[d.size for d in md.dims(each)]), md.dims(each)) for each in dims]
    step = md.compile(moe, "d:8", md.Layout("E:d", overrides={"gate": "E:"}))
    sent = [str(record.op) for record in step.program(*xs).collectives]
    assert sent == ["all_to_all G -> E over d", "all_to_all E -> G over d", "all_gather G over d"]
    np.testing.assert_allclose(step(*xs).numpy(), moe(*xs).numpy(), rtol=1e-10, atol=1e-12)
