"""The ledger against texts: the lowered one, and the compiler's. The compiler itself runs in test_tpu_compiler.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

import meshdsl as md
from meshdsl.models.mlp import mlp
from meshdsl.tools.compilers import aot
from meshdsl.tools.compilers.diff import changes
from meshdsl.tools.compilers.hlo import performed
from meshdsl.tools.compilers.stablehlo import groups_of, read

MLP = mlp.replace(batch=64, io=32, hidden=128)
SPECS = md.spec("batch:8 io:16"), md.spec("io:16 hidden:32")
STEP = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:2 cols:4", "io:cols batch:rows")
SUM = STEP.program(*SPECS)  # one all_reduce of float32[4, 32] over cols


def looped(x: md.Tensor) -> md.Tensor:
    return md.scan(lambda total, _: (total + md.sum(total, "a"), None), x, None, over=md.Dim("t", 5))[0]


LOOP = md.compile(looped, "rows:2 cols:4", "a:cols")
ROWS = md.spec("a:8")


def test_the_program_states_what_is_emitted() -> None:
    for mesh, layout in MLP.layouts.values():
        step = md.compile(MLP.train_step(), mesh, layout)
        found = md.verify(step.lower(*MLP.specs()).as_text(), step.program(*MLP.specs()))
        assert isinstance(found, md.Verification) and found.equal, str(found)
        assert found.count == len(step.program(*MLP.specs()).collectives)
        assert json.loads(json.dumps(found.to_dict()))["equal"] is True


def test_a_loop_counts_its_trips() -> None:
    found = md.verify(LOOP.lower(ROWS).as_text(), LOOP.program(ROWS))
    assert found.equal and found.count == 5 and found.bytes == 5 * 4


# the groups along cols and along rows, as JAX 0.10 and JAX 0.12 write them
LISTED = "dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>"
LISTED_ROWS = "dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>"
BY_AXES = 'axis_ref<name = "cols">', 'axis_ref<name = "rows">'
TAMPERED: dict[str, tuple[Callable[[str], str], str]] = {
    "another dtype": (lambda text: text.replace("f32>", "f64>"), "float64 1024 bytes"),
    "another size": (lambda text: text.replace("x32xf32>", "x31xf32>"), "float32 496 bytes"),
    "another reduction": (lambda text: text.replace("stablehlo.add", "stablehlo.maximum"), "all_reduce max"),
    "other groups": (lambda text: text.replace(LISTED, LISTED_ROWS).replace(*BY_AXES), "(0, 4), (1, 5)"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_differs_is_named(name: str) -> None:
    change, said = TAMPERED[name]
    text = STEP.lower(*SPECS).as_text()
    assert change(text) != text, "the lowered text is written in another way now"
    found = md.verify(change(text), SUM)
    assert not found.equal and not found.matched
    assert [(one.stated, one.emitted) for one in sorted(found.mismatched, key=lambda one: one.emitted)] == [
        (1, 0),
        (0, 1),
    ]
    assert said in str(found) and "stated 1 times, emitted 0" in str(found)


MODULE = """
sdy.mesh @mesh = <["rows"=2, "cols"=4]>
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
  %y = "stablehlo.all_reduce"(%x) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = {}, use_global_device_ids}}> ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }}) : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}}"""


@pytest.mark.parametrize("axes", ["cols", "rows", "cols rows", "rows cols"])
def test_groups_are_lists_or_axes_of_a_mesh(axes: str) -> None:
    """In every version of JAX, whichever form it writes itself."""
    groups = groups_of(axes.split(), md.Mesh("rows:2 cols:4"))
    listed = f"dense<{[*map(list, groups)]}> : tensor<{len(groups)}x{len(groups[0])}xi64>"
    refs = ", ".join(f'#stablehlo.axis_ref<name = "{axis}">' for axis in axes.split())
    by_axes = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{refs}]>"
    assert read(MODULE.format(listed)) == read(MODULE.format(by_axes))
    assert [one.groups for one in read(MODULE.format(listed))] == [groups]


def test_a_collective_too_few_or_too_many_is_named() -> None:
    text = LOOP.lower(ROWS).as_text()
    assert str(md.verify(text, SUM)).count("stated") == 2
    (one,) = md.verify(re.sub(r"dense<5> : tensor<i", "dense<4> : tensor<i", text), LOOP.program(ROWS)).mismatched
    assert (one.stated, one.emitted) == (5, 4)


HLO = """HloModule m
%cond (p: (s32[], f32[4])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%scatter.all-reduce-scatter (a: bf16[8,4]) -> bf16[2,4] {
  %a = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %r = bf16[8,4]{1,0} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %s = bf16[2,4]{1,0} dynamic-slice(%r), dynamic_slice_sizes={2,4}
}
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %start = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), replica_groups=[2,4]<=[2,4], dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %x)
}
ENTRY %main (x: f32[4], y: f32[2], z: bf16[8,4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %z = bf16[8,4]{1,0} parameter(2)
  %both = (f32[4]{0}, f32[2]{0}) all-reduce(%x, %y), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %f = bf16[2,4]{1,0} fusion(%z), kind=kCustom, calls=%scatter.all-reduce-scatter
  %t = (s32[], f32[4]{0}) tuple(%zero, %x)
  %w = (s32[], f32[4]{0}) while(%t), condition=%cond, body=%body
  %p = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %g = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def test_the_compilers_collectives_are_read() -> None:
    found = {(one.kind, one.count): one for one in performed(HLO)}
    assert set(found) == {("all_reduce", 1), ("reduce_scatter", 1), ("all_gather", 6), ("permute", 1)}
    merged = found["all_reduce", 1]
    assert (merged.arrays, merged.bytes, merged.dtype) == (2, 24, "float32")
    assert merged.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    gathered = found["all_gather", 6]
    assert gathered.asynchronous and gathered.bytes == 64 and gathered.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["reduce_scatter", 1].bytes == 64 and found["reduce_scatter", 1].dtype == "bfloat16"
    assert found["permute", 1].groups == ((0, 1), (1, 0))


FUSED = """HloModule m
%begin (a: f32[4]) -> (f32[4], f32[8]) {
  %a = f32[4] parameter(0)
  %g = f32[8] all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
  ROOT %c = (f32[4], f32[8]) custom-call(%a, %g), custom_call_target="AsyncCollectiveStart"
}
%async_collective_fusion (a: f32[4]) -> f32[8] {
  %a = f32[4] parameter(0)
  ROOT %g = f32[8] all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
}
ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4] parameter(0)
  %s = (f32[4], f32[8]) fusion(%x), kind=kCustom, calls=%begin
  %k = f32[8] fusion(%x), kind=kOutput, calls=%async_collective_fusion
  ROOT %d = f32[8] fusion(%x), kind=kCustom, calls=%async_collective_fusion
}
"""


def test_what_goes_between_slices_is_read() -> None:
    text = """ENTRY %main (x: f32[4,2]) -> f32[4,2] {
  %x = f32[4,2] parameter(0)
  %t = token[] after-all()
  %s = (bf16[4,2]{1,0:T(8,128)}, u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %d = token[] send-done(%s), channel_id=2, is_host_transfer=true
  ROOT %r = (bf16[4,2], u32[], token[]) recv(%t), channel_id=1, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
}"""  # noqa: E501
    (found,) = performed(text)
    assert (found.kind, found.bytes, found.groups, found.asynchronous) == ("all_reduce", 16, (), True)
    assert str(found) == "1 x asynchronous all_reduce bfloat16 16 bytes between slices"


def test_a_collective_spread_over_kernels_counts_once() -> None:
    (found,) = performed(FUSED)
    assert (found.kind, found.count, found.asynchronous, found.bytes) == ("all_gather", 1, True, 32)


SPARSE_CORE = """HloModule m
%called (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
}
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %s = ((f32[4]), f32[4]) call-start(%x), async_execution_thread="sparsecore", to_apply=%called
  ROOT %d = f32[4] call-done(%s)
}
"""


def test_a_collective_on_a_sparse_core_is_asynchronous() -> None:
    (found,) = performed(SPARSE_CORE)
    assert (found.kind, found.count, found.asynchronous, found.bytes) == ("all_reduce", 1, True, 16)
    (found,) = performed(SPARSE_CORE.replace("call-start", "call"))
    assert not found.asynchronous


def test_a_loop_of_unknown_trips_is_not_counted_silently() -> None:
    (found,) = [one for one in performed(HLO.replace("direction=LT", "direction=NE")) if one.kind == "all_gather"]
    assert (found.count, found.bounded) == (1, False)


def test_a_text_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(md.InternalError, match="no ENTRY"):
        performed("")
    with pytest.raises(md.InternalError, match="groups"):
        performed(HLO.replace("replica_groups=[4,2]<=[2,4]T(1,0)", "replica_groups=?"))


def test_what_the_compiler_changed_is_said_in_words() -> None:
    step = md.compile(MLP.train_step(), "rows:2 cols:4", "batch:rows")
    program = step.program(*MLP.specs())
    (sent,) = {(one.axes, one.dtype.name) for one in program.collectives}
    bytes_of = sum(one.bytes for one in program.collectives)
    shape = f"f32[{bytes_of // 4}]{{0}}"
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n  %x = SHAPE parameter(0)\n"
    text += "  %r = SHAPE KIND(%x), replica_groups=GROUPS\n}"
    text = text.replace("SHAPE", shape).replace("GROUPS", "{{4,0},{1,5},{2,6},{3,7}}")
    assert sent == (("rows",), "float32")
    (merged,) = changes(program, performed(text.replace("KIND", "all-reduce")))
    assert (merged.kind, merged.axes, merged.performed, merged.words) == (
        "all_reduce",
        "rows",
        1,
        "several are sent as one",
    )
    reduced, scattered = changes(program, performed(text.replace("KIND", "reduce-scatter")))
    assert "became a reduce_scatter" in reduced.words and scattered.words == "the compiler made these"
    (none,) = changes(program, ())
    assert none.performed == 0 and "found not to be needed" in none.words
    (widened,) = changes(program, performed(text.replace("KIND", "all-reduce").replace("f32", "f64")))
    assert "sent as float64, stated float32" in widened.words


def test_a_reduce_scatter_that_becomes_an_all_reduce() -> None:
    step = md.compile(lambda x, w: md.shard(md.dot(x, w, "io"), {"batch": "cols"}), "cols:4", "io:cols")
    program = step.program(*SPECS)
    assert program.collectives[0].kind == "reduce_scatter"
    text = "ENTRY %m (x: f32[8,32]) -> f32[4] {\n  %x = f32[8,32]{1,0} parameter(0)\n"
    text += "  %r = f32[8,32]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}\n}"
    words = {one.kind: one.words for one in changes(program, performed(text))}
    assert words["reduce_scatter"] == "1 became an all_reduce and a slice, which sends twice as much"
    assert words["all_reduce"] == "1 were a reduce_scatter in the program"


@pytest.mark.parametrize("topology", ["v5e:4x4", "tpu", "tpu:", "cuda:h100"])
def test_a_topology_without_a_platform_is_refused(topology: str) -> None:
    with pytest.raises(md.CompilerError, match="for example tpu:v5e:4x4"):
        md.compile_for(topology, SUM)


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(md.CompilerError, match="there are: ''"):
        md.compile_for("tpu:v5e:2x4", SUM, effort="O9")


def test_without_the_compiler_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(md.CompilerError, match=r"pip install 'jax\[tpu\]' 'flatbuffers"):
        md.compile_for("tpu:v5e:2x4", SUM)


def test_what_does_not_fit_is_a_result() -> None:
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.30G) "
    message += "exceeds available HBM (15.75G)."
    found = aot.refused("tpu:v5e:2x4", {"devices": 8, "order": "", "error": message})
    assert not found.fits and found.memory is None
    assert found.over == pytest.approx(1.55 * 2**30, rel=1e-6)
    assert str(found) == "does not fit on tpu:v5e:2x4: it needs 18.58 GB of one device, 1.66 GB too many"
    with pytest.raises(md.CompilerError, match="failed: INTERNAL"):
        aot.refused("tpu:v5e:2x4", {"devices": 8, "order": "", "error": "INTERNAL: no"})
