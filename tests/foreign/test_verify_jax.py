"""`md.verify_jax` on small programs of `jax.shard_map`: what JAX has in them, each right and with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshdsl as md

HERE = "test_verify_jax.py"
X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def mapped(
    f: Any, ins: Any, outs: Any, sizes: dict[str, int] | None = None, check: bool = False, **options: Any
) -> Any:
    sizes = sizes or {"rows": 4}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check, **options)


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def of_pallas(x: Any, right: bool) -> Any:
    y = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return lax.psum(jnp.sum(y * y), "rows" if right else ())


def of_groups(x: Any, right: bool) -> Any:
    half = lax.psum(x.sum(0), "rows", axis_index_groups=[[0, 1], [2, 3]])
    pairs = [[0, 2], [1, 3]] if right else [[0, 1], [2, 3]]
    return lax.psum(half, "rows", axis_index_groups=pairs)


def of_scan(x: Any, right: bool) -> Any:
    def step(total: Any, row: Any) -> Any:
        return total + (lax.psum(row, "rows") if right else row), row.sum()

    total, sums = lax.scan(step, jnp.zeros(8), x)
    return total, lax.psum(sums.sum(), "rows")


def of_while(x: Any, right: bool) -> Any:
    size = lax.psum(jnp.sum(x * x), "rows") if right else jnp.sum(x * x)
    return lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0] / 2, s[1] + 1), (size, 0.0))[1]


def of_cond(x: Any, right: bool) -> Any:
    """Only the first device has the sum: on the other ones it is left out, or what they have is added too."""
    first = lax.axis_index("rows") == 0
    whole = lax.psum(x.sum(0), "rows")
    own = lax.cond(first, lambda: whole, lambda: jnp.zeros_like(whole) if right else whole)
    return lax.psum(own, "rows")


def of_remat(x: Any, right: bool) -> Any:
    f = jax.checkpoint(lambda x: jnp.sum(jnp.tanh(x) ** 2))
    value, grad = jax.value_and_grad(f)(x)
    return lax.psum(value, "rows") if right else lax.pmean(value, "rows"), grad


@jax.custom_vjp
def enter(x: Any) -> Any:
    return x


enter.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "rows"),))


@jax.custom_vjp
def forgot(x: Any) -> Any:
    return x


forgot.defvjp(lambda x: (x, None), lambda _, ct: (ct,))


def of_custom_vjp(w: Any, x: Any, right: bool) -> Any:
    f = enter if right else forgot
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x) @ w)))(x)


def of_untiled(x: Any, right: bool) -> Any:
    n = lax.axis_size("rows")
    parts = x.reshape(x.shape[0], n, -1)
    sent = lax.all_to_all(parts, "rows", 1, 0) if right else jnp.moveaxis(parts, 1, 0)
    return sent.reshape(n * x.shape[0], -1)


def of_vmap(x: Any, right: bool) -> Any:
    return jax.vmap(lambda x: lax.psum(x @ x, "rows") if right else lax.pmax(x @ x, "rows"))(x.T)


def of_bfloat16(x: Any, right: bool) -> Any:
    y = (x.astype(jnp.bfloat16) * 3).sum(0)
    return lax.psum(y, "rows") if right else y


def of_solve(x: Any, right: bool) -> Any:
    square = lax.psum(x.T @ x, "rows") if right else x.T @ x
    return jnp.linalg.solve(square + 8 * jnp.eye(8, dtype=x.dtype), jnp.ones(8, x.dtype))


def of_sort(x: Any, right: bool) -> Any:
    whole = lax.all_gather(x, "rows", axis=0, tiled=True)
    return jnp.sort(whole if right else jnp.concatenate([x] * 4), 0)


def of_nested(x: Any, right: bool) -> Any:
    def inner(x: Any) -> Any:
        return lax.psum(jnp.sum(x), "cols" if right else ())

    inside = jax.shard_map(inner, in_specs=P("cols"), out_specs=P(), axis_names={"cols"}, check_vma=False)
    return lax.psum(inside(x), "rows")


ROWS, WHOLE = P("rows"), P()
REFERENCES = {"groups": lambda x: x.sum(0)}  # one device has no groups of two
CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "pallas": (of_pallas, ROWS, WHOLE),
    "groups": (of_groups, ROWS, WHOLE),
    "scan": (of_scan, ROWS, (WHOLE, WHOLE)),
    "while": (of_while, ROWS, WHOLE),
    "cond": (of_cond, ROWS, WHOLE),
    "remat": (of_remat, ROWS, (WHOLE, ROWS)),
    "untiled": (of_untiled, ROWS, P(None, "rows")),
    "vmap": (of_vmap, ROWS, WHOLE),
    "bfloat16": (of_bfloat16, ROWS, WHOLE),
    "solve": (of_solve, ROWS, WHOLE),
    "sort": (of_sort, ROWS, WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_jax_has_inside_is_simulated_and_faults_of_it_are_found(name: str) -> None:
    f, ins, outs = CASES[name]
    reference = REFERENCES.get(name)
    assert (report := md.verify_jax(mapped(lambda x: f(x, True), ins, outs), X, reference=reference)).ok, report
    report = md.verify_jax(mapped(lambda x: f(x, False), ins, outs), X, reference=reference)
    assert report.findings and not report.ok, report
    assert any(at.file.endswith(HERE) for at in report.findings[0].lines), report


def test_rules_of_custom_vjp_are_followed() -> None:
    for right in (True, False):
        step = mapped(lambda w, x, right=right: of_custom_vjp(w, x, right), (P(None, "rows"), WHOLE), WHOLE)
        assert md.verify_jax(step, W, X).ok == right


def test_a_shard_map_inside_another_and_axes_that_stay_automatic() -> None:
    sizes = {"rows": 2, "cols": 2, "auto": 2}
    for right in (True, False):
        step = mapped(lambda x, right=right: of_nested(x, right), ROWS, WHOLE, sizes, axis_names={"rows"})
        assert md.verify_jax(step, X).ok == right


def line_in(report: md.JaxReport) -> list[str]:
    return [one.where.source() for one in report.findings]


def test_a_finding_has_the_line_the_cause_the_axes_and_a_way_out() -> None:
    def step(x: Any, w: Any, bias: Any) -> Any:
        h = x @ w
        h = h + bias
        return jax.nn.relu(h)

    ins = (P(None, "rows"), P("rows"), WHOLE)
    report = md.verify_jax(
        mapped(step, ins, WHOLE), X, W, W[0], dims={"x": "batch io", "w": "io hidden", "*bias": "hidden"}
    )
    (found,) = report.findings
    assert line_in(report) == ["h = h + bias"]
    assert found.since is not None and found.since.source() == "h = x @ w"
    assert found.axes == ("rows",) and "counts it on every device" in found.what
    assert f"between lines {found.since.line} and {found.where.line}" in found.fix
    assert str(found) in str(report) and not report.collectives


@pytest.mark.parametrize(
    ("summed", "what", "fix"),
    [
        (lambda x: lax.psum(lax.psum(x, "rows"), "rows"), "4 times too large", "pmean"),
        (lambda x: lax.pmean(x, "rows"), "0.25 times", "divide"),
        (lambda x: lax.pmax(x, "rows"), "partial sum over 'rows'", "psum"),
        (lambda x: lax.psum(x, "rows") * lax.axis_size("rows"), "4 times", "divide"),
        (lambda x: lax.psum(x / x.shape[0], "rows") / 1, "means of parts", "pmean"),
    ],
)
def test_each_kind_of_wrong_sum_is_called_by_its_name(summed: Any, what: str, fix: str) -> None:
    report = md.verify_jax(
        mapped(lambda x: summed(jnp.sum(x, 0)) if "means" not in what else summed(x).sum(0), ROWS, WHOLE), X
    )
    assert report.findings, report


def test_dims_are_named_where_they_follow() -> None:
    def step(w: Any, x: Any) -> Any:
        h = jnp.einsum("bi,ih->hb", x, w)
        return lax.psum(jnp.tanh(h).sum(1), "rows")

    sizes = {"rows": 2, "cols": 2}
    step_ = mapped(step, (P(None, "cols"), P("rows")), WHOLE, sizes)
    report = md.verify_jax(step_, W, X, dims={"w": "io hidden", "x": "batch io"})
    assert "split along 'hidden' over 'cols'" in str(report), report
    with pytest.raises(md.ShapeError, match="did you mean"):
        md.verify_jax(step_, W, X, dims={"ww": "io hidden"})
    with pytest.raises(md.ShapeError, match="shape"):
        md.verify_jax(step_, W, X, dims={"w": "io"})


def test_what_one_device_cannot_run_needs_a_reference() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]

    def step(x: Any) -> Any:
        total = x
        for _ in range(3):
            x = lax.ppermute(x, "rows", ring)
            total = total + x
        return total

    step_ = mapped(step, ROWS, ROWS)
    report = md.verify_jax(step_, X)
    assert not report.ok and not report.findings and "reference=" in str(report), report
    blocks = lambda x: jnp.tile(x.reshape(4, 2, 8).sum(0), (4, 1))  # noqa: E731
    assert md.verify_jax(step_, X, reference=blocks).ok
    with pytest.raises(md.TraceError, match="results"):
        md.verify_jax(step_, X, reference=lambda x: (x, x))


def test_what_is_wrong_on_every_mesh_is_found_by_a_reference() -> None:
    def forgotten(x: Any) -> Any:
        return lax.psum(jnp.sum(x * x), "rows")

    step = mapped(forgotten, ROWS, WHOLE)
    assert md.verify_jax(step, X).ok
    report = md.verify_jax(step, X, reference=lambda x: jnp.mean(x * x))
    assert not report.ok


def test_a_wrong_result_is_a_finding_even_where_no_step_made_it() -> None:
    step = mapped(lambda x: x * 1, ROWS, ROWS)
    report = md.verify_jax(lambda x: (x, step(x)), X, reference=lambda x: (2 * x, x * 1))
    assert not report.ok and report.findings and report.notes == ("what differs from one device: 0",), report


def test_a_result_that_is_right_on_this_mesh_alone_is_noted() -> None:
    def neighbours(x: Any) -> Any:
        n = lax.axis_size("rows")
        before = lax.ppermute(x, "rows", [((i + 1) % n, i) for i in range(n)])  # the wrong way, which two do not see
        first = lax.axis_index("rows") == 0
        edge = jnp.where(first, x[:1] * 0, before[-1:])
        return jnp.concatenate([edge, x[:-1]])

    shifted = lambda x: jnp.concatenate([x[:1] * 0, x[:-1]])  # noqa: E731
    report = md.verify_jax(mapped(neighbours, ROWS, ROWS, {"rows": 2}), X, reference=shifted)
    assert report.ok and any("on rows:4 it is not" in note for note in report.notes), report


def test_devices_that_never_reach_a_collective_are_found() -> None:
    def step(x: Any) -> Any:
        first = lax.axis_index("rows") == 0
        total = x.sum()
        return lax.cond(first, lambda: lax.psum(total, "rows"), lambda: lax.psum(total, "rows") * 0)

    report = md.verify_jax(mapped(step, ROWS, WHOLE), X)
    assert "never reach it" in str(report.findings[0])


def test_intended_differences_are_left_out_and_stay_undecided() -> None:
    def step(key: Any, x: Any) -> Any:
        own = jax.random.fold_in(key, lax.axis_index("rows"))
        return x * jax.random.bernoulli(own, 0.5, x.shape)

    step_, key = mapped(step, (WHOLE, ROWS), ROWS), jax.random.key(0)
    report = md.verify_jax(step_, key, X)
    assert report.findings
    lines = {f"{HERE}:{at.line}": "keys of their own" for one in report.findings for at in one.lines[:1]}
    report = md.verify_jax(step_, key, X, except_=lines)
    assert not report.findings and not report.ok and "keys of their own" in str(report), report
    assert any("nothing is found" in note for note in md.verify_jax(step_, key, X, except_={"a.py:1": ""}).notes)


def test_sums_in_sixteen_bits_are_noted() -> None:
    report = md.verify_jax(mapped(lambda x: lax.psum(x.sum(0), "rows"), ROWS, WHOLE), X.astype(jnp.bfloat16))
    assert report.ok and "added in bfloat16" in report.notes[0]


def test_what_it_sends_is_what_stablehlo_has() -> None:
    from meshdsl.jax_functions.foreign.collectives import groups
    from meshdsl.tools.compilers.stablehlo import read
    from tests.foreign.law import right
    from tests.foreign.programs import PROGRAMS

    for name in ("two_layer.three_d", "language_model", "sharded_update.sharded", "moe_layer"):
        built = right(PROGRAMS[name])
        report = md.verify_jax(built.step, *built.args, simulate=False)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), built.args)
        text = jax.jit(built.step).trace(*shapes).lower(lowering_platforms=("cpu",)).as_text()
        theirs = {(one.kind, one.dtype, one.bytes, one.groups): n for one, n in read(text).items()}
        ours: dict[Any, int] = {}
        for one in report.collectives:
            members = tuple(sorted(tuple(map(int, row)) for row in groups(one.mesh, one.axes)))
            key = (one.kind, one.dtype, one.bytes, members)
            ours[key] = ours.get(key, 0) + one.trips
        assert ours == theirs, name


def test_shardings_are_followed_at_real_sizes_on_thousands_of_devices() -> None:
    def step(w: Any, x: Any, right: bool) -> Any:
        h = jnp.tanh(x @ w)
        loss = jnp.sum(h * h)
        return lax.psum(loss, ("data", "model") if right else "data")

    shapes = jax.ShapeDtypeStruct((8192, 65536), "bfloat16"), jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
    for right in (True, False):
        own = mapped(
            lambda w, x, right=right: step(w, x, right), (P(None, "model"), P("data")), WHOLE, {"data": 64, "model": 64}
        )
        report = md.verify_jax(own, *shapes, simulate=False, machine="h100")
        assert report.ok == right, report
        assert report.collectives[0].seconds and report.collectives[0].bytes == 2
    with pytest.raises(md.TraceError, match="simulate=False"):
        md.verify_jax(own, *shapes)


def test_shardings_that_a_program_asks_for_are_listed_with_what_they_move() -> None:
    mesh = AbstractMesh((2, 4), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2)
    at = lambda *spec: jax.sharding.NamedSharding(mesh, P(*spec))  # noqa: E731

    def f(x: Any, w: Any) -> Any:
        y = lax.with_sharding_constraint(x @ w, at("rows"))
        return lax.with_sharding_constraint(y, at("rows"))

    x, w = (jax.ShapeDtypeStruct((8, 8), "float32", sharding=s) for s in (at("rows", "cols"), at("cols")))
    report = md.verify_jax(f, x, w)
    first, second = report.constraints
    assert report.ok and first.steps == "all_reduce(sum) over cols" and second.bytes == 0
    assert "already" in str(second)


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(md.TraceError, match=r"md\.from_jax"):
        md.verify_jax(jnp.sin, X)
    with pytest.raises(md.TraceError, match="cannot trace"):
        md.verify_jax(mapped(lambda x: x @ jnp.ones((3, 3)), ROWS, ROWS), X)
    with pytest.raises(AssertionError, match="psum over 'rows'"):
        md.testing.assert_sharded_right(mapped(lambda x: x.sum(0), ROWS, WHOLE), X)
    assert md.testing.assert_sharded_right(mapped(lambda x: lax.psum(x.sum(0), "rows"), ROWS, WHOLE), X).ok
