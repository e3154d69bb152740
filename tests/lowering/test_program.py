"""Programs: their printed form, their collectives, and the shardings of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.ir import Op, Scan, walk
from meshdsl.models.mlp import mlp
from meshdsl.models.transformer import lm

spec = md.spec
MLP = mlp.replace(batch=64, io=32, hidden=16)


def printed(text: object) -> str:
    """The text without the line of this file that asked for an optimizer's operations."""
    return re.sub(r"(test_program.py):\d+", r"\1", str(text))


def sent(f: Callable[..., Any], mesh: str, layout: Any, *args: Any) -> list[str]:
    """The collectives of a program, each as `all_reduce(sum) over rows [2, 4]`."""
    records = md.compile(f, mesh, layout).program(*args).collectives
    return [f"{r.op} {list(r.shape)}" + (f" x{r.count}" if r.count > 1 else "") for r in records]


@pytest.mark.parametrize("name", ["data_model", "three_d"])
def test_the_two_layer_train_step_prints(name: str, golden: Callable[[str, str], None]) -> None:
    program = md.compile(MLP.train_step(), *MLP.layouts[name]).program(*MLP.specs())
    golden(f"mlp_{name}", printed(program))


def test_every_stage_of_the_two_layer_step_prints(golden: Callable[[str, str], None]) -> None:
    history = md.compile(MLP.train_step(), *MLP.layouts["data"]).history(*MLP.specs())
    golden("mlp_history", printed(history))


def test_the_number_of_instructions_does_not_grow_with_devices() -> None:
    def instructions(mesh: str) -> int:
        workload = mlp.replace(batch=4096, io=64, hidden=128)
        step = md.compile(workload.train_step(), mesh, "batch:rows; hidden:cols")
        return sum(1 for _ in walk(step.program(*workload.specs())))

    assert instructions("rows:2 cols:4") == instructions("rows:64 cols:32")


LM = lm.replace(batch=4, length=8, vocab=18, layers=3, d_model=8, heads=4, d_head=2, d_ff=8)


def loops(layout: str, remat: bool | str) -> list[Any]:
    """The forward and the backward loop over the layers, in a program's equations."""
    workload = LM.replace(remat=remat)
    program = md.compile(workload.train_step(), *workload.layouts[layout]).program(*workload.specs())
    return [eqn for eqn in program.eqns if str(eqn.op) == "scan"]


def kinds(loop: Any) -> list[str]:
    return [str(eqn.op) for eqn in loop.control.body.eqns if not isinstance(eqn.op, Op)]


@pytest.mark.parametrize(
    ("layout", "kept"), [("empty", 1), ("data", 1), ("model", 2), ("data_model", 2), ("sequence", 6)]
)
def test_what_is_kept_is_not_sent_again(layout: str, kept: int) -> None:
    _, plain = loops(layout, False)
    _, again = loops(layout, True)
    forward, backward = loops(layout, "collectives")
    assert sorted(kinds(backward)) == sorted(kinds(plain))
    assert len(kinds(again)) == len(kinds(plain)) + (layout in ("model", "data_model", "sequence"))
    assert len(forward.outs) == 1 + kept


def test_what_is_kept_by_name_is_not_computed_again() -> None:
    def f(w: md.Tensor, x: md.Tensor, policy: Any) -> md.Tensor:
        def layer(x: md.Tensor, w: md.Tensor) -> Any:
            y = md.name(md.einsum(md.exp(x), w, out="b d"), "y")
            return md.name(md.sin(md.rename(y, d="c")), "z"), None

        return md.sum(md.scan(md.checkpoint(layer, policy), x, w, over="t")[0])

    def backward(policy: Any) -> list[str]:
        step = md.compile(md.grad(lambda w, x: f(w, x, policy)), "r:2", "c:r")
        program = step.program(spec("t:3 c:4 d:4"), spec("b:2 c:4"))
        (loop,) = [eqn for eqn in program.eqns if eqn.backward and eqn.control is not None]
        assert isinstance(loop.control, Scan)
        return [str(eqn.op) for eqn in loop.control.body.eqns]

    assert backward("nothing").count("einsum") == 3
    assert backward("names:y,z").count("einsum") == backward(("y",)).count("einsum") == 2
    assert backward("names:z").count("einsum") == 3
    with pytest.raises(
        md.ShapeError,
        match=r"policy of md.checkpoint has 'q', but the function names no such value\n.*\n  names .*: y, z",
    ):
        backward("names:y,q")
    for wrong in ("everything", "names:", ()):
        with pytest.raises(md.ShapeError, match=r"md\.checkpoint has no policy"):
            md.checkpoint(md.sin, wrong)


def test_two_consumers_share_one_gather() -> None:
    both = sent(lambda x: (md.rename(x, a="z"), md.replicate(x)), "r:4", "a:r", spec("a:8 b:4"))
    assert both == ["all_gather a over r [2, 4]"]


def test_two_pending_sums_are_one_all_reduce() -> None:
    def f(x: Any, w: Any, y: Any, v: Any) -> Any:
        return md.relu(md.einsum(x, w, out="b o") + md.einsum(y, v, out="b o"))

    shapes = [spec("b:8 k:8"), spec("k:8 o:4"), spec("b:8 l:12"), spec("l:12 o:4")]
    assert sent(f, "r:4", "k:r l:r", *shapes) == ["all_reduce(sum) over r [8, 4]"]


def test_a_sum_over_two_split_dims_is_one_all_reduce() -> None:
    f = lambda x: md.sum(md.square(x))  # noqa: E731  a sentence of its own
    assert sent(f, "r:2 c:4", "a:r b:c", spec("a:8 b:8")) == ["all_reduce(sum) over c,r []"]


def test_a_pending_sum_whose_consumer_is_split_is_a_reduce_scatter() -> None:
    def f(a: Any, b: Any) -> Any:
        return md.relu(md.einsum(md.prefer(a, "k"), b, out="m n"))

    assert sent(f, "r:4", "k:r m:r", spec("k:8 m:8"), spec("k:8 n:4")) == ["reduce_scatter m over r [8, 4]"]


def looped(stacked: bool) -> Callable[..., Any]:
    """A loss over five layers with one weight, or with a weight each, and its gradient."""

    def layer(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.rename(md.relu(md.einsum(x, w, out="batch o")), o="i")

    def loss(w: md.Tensor, x: md.Tensor) -> md.Tensor:
        if stacked:
            return md.sum(md.scan(lambda c, w: (layer(c, w), None), x, w, over="layer")[0])
        return md.sum(md.scan(lambda c, _: (layer(c, w), None), x, None, over=md.Dim("layer", 5))[0])

    return md.value_and_grad(loss)


def test_the_gradient_of_a_loop_constant_is_reduced_once_after_the_loop() -> None:
    found = sent(looped(stacked=False), "r:4", "batch:r", spec("i:8 o:8"), spec("batch:8 i:8"))
    assert found == ["all_reduce(sum) over r []", "all_reduce(sum) over r [8, 8]"]


def test_the_gradients_of_stacked_weights_are_reduced_together_after_the_loop() -> None:
    found = sent(looped(stacked=True), "r:4", "batch:r", spec("layer:5 i:8 o:8"), spec("batch:8 i:8"))
    assert found == ["all_reduce(sum) over r []", "all_reduce(sum) over r [5, 8, 8]"]


def test_a_sum_that_the_body_needs_is_reduced_in_every_trip() -> None:
    found = sent(looped(stacked=True), "r:4", "i:r", spec("layer:5 i:8 o:8"), spec("batch:8 i:8"))
    assert any(one.endswith(" x5") for one in found), found


def test_a_sum_that_a_loop_carries_is_no_part_of_a_backward_pass() -> None:
    def accumulated(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        def add(total: md.Tensor, part: md.Tensor) -> tuple[md.Tensor, None]:
            return total + md.einsum(part, w, out="batch hidden"), None

        return md.scan(add, md.zeros("batch:8 hidden:2"), x, over="chunk")[0]

    program = md.compile(accumulated, "cols:4", "io:cols").program(
        md.spec("chunk:3 batch:8 io:4"), md.spec("io:4 hidden:2")
    )
    (sum_after_the_loop,) = program.collectives
    assert str(sum_after_the_loop.cause) == "sum carried by the loop"
    assert "(backward)" not in str(program)


def test_axes_of_size_one_send_nothing() -> None:
    args = MLP.specs()
    one = sent(MLP.train_step(), "rows:1 cols:4 planes:1", "batch:rows; hidden:cols; io:planes", *args)
    assert one == sent(MLP.train_step(), "cols:4", "hidden:cols", *args)
    assert sent(MLP.train_step(), "rows:1", "batch:rows", *args) == []


@pytest.mark.parametrize("names", [(), ("batch",), ("batch", "model"), ("model",), ("length",)])
def test_prefer_of_other_dims_leaves_a_reduce_scatter(names: tuple[str, ...]) -> None:
    """The layers of Megatron with positions split between them: the sum goes to the positions that it is added to."""

    def block(x: md.Tensor, w: md.Tensor, v: md.Tensor) -> md.Tensor:
        h = md.prefer(md.einsum(x, w, out="batch length d_ff"), "d_ff")
        y = md.einsum(h, v, out="batch length model")
        return md.tanh(x + (md.prefer(y, *names) if names else y))

    x, w, v = (md.spec(dims) for dims in ("batch:4 length:8 model:6", "model:6 d_ff:16", "d_ff:16 model:6"))
    program = md.compile(block, "rows:2 cols:2", "batch:rows; length:cols; d_ff:cols").program(x, w, v)
    assert [record.kind for record in program.collectives] == ["all_gather", "reduce_scatter"]


def test_prefer_moves_tokens_to_experts_and_back_by_all_to_all() -> None:
    def dispatch(x: Any, w: Any, to: Any) -> Any:
        to = md.prefer(to, "group")
        inputs = md.prefer(md.einsum(x, to, out="group expert place model"), "expert")
        hidden = md.prefer(md.relu(md.einsum(inputs, w, out="group expert place hidden")), "group")
        return md.einsum(hidden, to, out="group token hidden")

    shapes = [
        spec("group:8 token:4 model:4"),
        spec("expert:8 model:4 hidden:4"),
        spec("group:8 token:4 expert:8 place:2"),
    ]
    assert sent(dispatch, "r:4", "group:r expert:r", *shapes) == [
        "all_to_all group -> expert over r [2, 8, 2, 4]",
        "all_to_all expert -> group over r [8, 2, 2, 4]",
    ]


def fsdp(params: dict[str, md.Tensor], x: md.Tensor) -> Any:
    def loss(params: dict[str, md.Tensor]) -> md.Tensor:
        h = md.relu(md.einsum(md.prefer(x, "batch"), params["w"], out="batch hidden"))
        return md.sum(md.square(md.einsum(h, params["v"], out="batch out")))

    return md.value_and_grad(loss)(params)


def test_weights_split_on_the_batch_axis_are_gathered_and_their_gradients_scattered() -> None:
    params = {"w": spec("io:16 hidden:8"), "v": spec("hidden:8 out:4")}
    layout = md.Layout("batch:r", overrides={"w": {"io": "r"}, "v": {"hidden": "r"}})
    assert sent(fsdp, "r:4", layout, params, spec("batch:64 io:16")) == [
        "all_gather io over r [4, 8]",
        "all_gather hidden over r [2, 4]",
        "all_reduce(sum) over r []",
        "reduce_scatter hidden over r [8, 4]",
        "reduce_scatter io over r [16, 8]",
    ]


def test_shard_and_replicate_lay_a_tensor_so() -> None:
    f = lambda x: md.relu(md.replicate(md.relu(md.shard(x, {"a": "c", "b": "r"}))))  # noqa: E731
    program = md.compile(f, "r:2 c:4", "a:r").program(spec("a:8 b:8"))
    shardings = [repr(eqn.outs[0].sharding) for eqn in program.eqns if eqn.op.name == "relu"]
    assert shardings == ["{a:c b:r}", "{}"]
    assert repr(program.ins[0].sharding) == repr(program.outs[0].sharding) == "{a:r}"


def test_arguments_and_results_lie_as_the_layout_says() -> None:
    step = md.compile(lambda x, w: (md.einsum(x, w, out="a c"), md.sum(x)), "r:2 c:4", "a:r,c; b:")
    x, w = md.tensor(np.ones((10, 3)), "a b"), md.tensor(np.ones((3, 5)), "b c")
    product, total = step(x, w)
    mesh = step.mesh.bind()
    assert product.stored.shape == (16, 5)  # ten rows on eight devices are stored as sixteen
    assert product.stored.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(("r", "c"))), 2)
    assert total.stored.sharding.is_fully_replicated
    assert product.numpy().shape == (10, 5)


def test_a_result_is_an_argument_as_it_lies() -> None:
    double = md.compile(lambda x: 2 * x, "r:8", "a:r")
    first = double(md.tensor(np.arange(10.0), "a"))
    assert (double(first).numpy() == 4 * np.arange(10)).all()
    assert double._for([first])[0].arrays([first])[0] is first.stored


def test_compile_unrolls_loops_and_refuses_to_unroll_nothing() -> None:
    def layers(x: md.Tensor, w: md.Tensor) -> md.Tensor:
        return md.scan(lambda h, row: (md.tanh(h * row), None), x, w, over="layer")[0]

    x, w = md.spec("batch:4"), md.spec("layer:3 batch:4")
    program = md.compile(layers, "rows:2", "batch:rows", unroll=True).program(x, w)
    assert [str(eqn.op) for eqn in program.eqns] == 3 * ["index", "multiply", "tanh"]
    with pytest.raises(md.LayoutError, match="unroll=True has no effect"):
        md.compile(md.tanh, "rows:2", "batch:rows", unroll=True).program(x)


def test_compiled_refuses_a_donated_tensor_that_is_used_again() -> None:
    step = md.compile(lambda x: x + 1, "r:2", "a:r", donate=0)
    first = step(md.tensor(np.arange(4.0), "a"))
    step(first)
    with pytest.raises(md.ShapeError, match="argument x was donated to an earlier call"):
        step(first)


def test_donated_memory_is_taken_over() -> None:
    step = md.compile(MLP.train_step(), *MLP.layouts["data_model"], donate=(0, 1))
    specs = MLP.specs()
    program = step.program(*specs)
    owned = sum(program.local_bytes(v) for v in program.ins if v.name.startswith(("params", "state")))
    assert step.lower(*specs).compile().memory_analysis().alias_size_in_bytes == owned
    kept = md.compile(MLP.train_step(), *MLP.layouts["data_model"])
    assert kept.lower(*specs).compile().memory_analysis().alias_size_in_bytes == 0


def test_donated_arguments_are_gone_and_the_others_stay() -> None:
    mesh, layout = MLP.layouts["data_model"]
    params, state = md.compile(MLP.init, mesh, layout)(md.random.key(0))
    batch = {name: md.tensor(jnp.ones((64, 32), jnp.float32), "batch io") for name in ("x", "target")}
    step = md.compile(MLP.train_step(), mesh, layout, donate=(0, 1))
    after, _, metrics = step(params, state, batch)
    assert all(x.stored.is_deleted() for x in jax.tree_util.tree_leaves(params))
    assert not batch["x"].stored.is_deleted()
    assert np.isfinite(metrics["loss"].numpy())
    assert {path: x.stored.sharding for path, x in after.items()}.keys() == params.keys()


def test_a_pending_maximum_stays_whole_when_it_is_finished() -> None:
    """A sum may end as a reduce-scatter; a maximum would be cut for nothing, and gathered again."""

    def shifted(x: Any) -> Any:
        x = md.prefer(x, "vocab")
        return x - md.stop_gradient(md.max(x, "vocab"))

    assert sent(shifted, "c:4", "length:c vocab:c", spec("length:8 vocab:8")) == ["all_reduce(max) over c [8]"]


def test_a_dim_that_does_not_divide_by_the_axes_it_inherits_is_whole() -> None:
    """A merged dim takes over the axes of its first; a slice of it has no padding for them."""
    program = md.compile(lambda x: md.slice(md.flatten(x, "a b", "c"), "c", 0, 12), "r:5", "a:r").program(
        spec("a:5 b:8")
    )
    x = np.arange(40.0, dtype=np.float32).reshape(5, 8)
    assert (md.simulate(program, x)[0] == np.arange(12)).all()


@pytest.mark.parametrize("fill", [0, 7])
def test_padding_of_an_empty_split_dim_is_all_fill(fill: int) -> None:
    pad = md.compile(lambda x: md.pad(x, "a", 1, 3, value=fill), "r:4", "a:r")
    empty = md.tensor(np.zeros((0, 2), np.float32), "a b")
    assert (pad(empty).numpy() == np.full((4, 2), fill)).all()
    assert (md.simulate(pad.program(empty), empty)[0] == fill).all()


def test_program_with_a_convolution_prints():
    """A convolution's parameter `kernel` is its dims; an attention's is the kernel that computes it."""
    x, w = md.spec("batch:4 h:8 c:2"), md.spec("kh:3 c:2 o:2")
    program = md.compile(lambda x, w: md.conv(x, w, {"h": "kh"}, "batch h o"), "rows:2", "batch:rows").program(x, w)
    assert " = conv x w " in str(program)
