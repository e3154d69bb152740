"""The figures read from the TPU compiler's text: its estimates of cycles, and groups of devices along mesh axes."""

from __future__ import annotations

import pytest

from meshdsl.tools.compilers.hlo import estimated_cycles, performed

LOOP = """HloModule m
%fused (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %n = f32[4] negate(%a), backend_config={"estimated_cycles":"999"}
}
%cond (p: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(6)
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %f = f32[4] fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[4]) tuple(%i, %f)
}
ENTRY %main (x: f32[4]) -> (s32[], f32[4]) {
  %x = f32[4] parameter(0)
  %c = f32[4] copy(%x), backend_config={"estimated_cycles":"3"}
  %t = (s32[], f32[4]) tuple(%zero, %c)
  ROOT %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body
}
"""


def test_estimated_cycles_counts_fusions_once_and_loop_bodies_per_trip() -> None:
    assert estimated_cycles(LOOP) == 3 + 6 * 10
    assert estimated_cycles(LOOP.replace("direction=LT", "direction=NE")) is None, "unknown trips"


BRANCHES = """HloModule m
%short (x: f32[4]) -> f32[4] {
  ROOT %c = f32[4] copy(%x), backend_config={"estimated_cycles":"5"}
}
%long (x: f32[4]) -> f32[4] {
  %c = f32[4] copy(%x), backend_config={"estimated_cycles":"5"}
  ROOT %d = f32[4] copy(%c), backend_config={"estimated_cycles":"6"}
}
ENTRY %main (i: s32[], x: f32[4]) -> f32[4] {
  ROOT %r = f32[4] conditional(%i, %x, %x), branch_computations={%short, %long}
}
"""


def test_estimated_cycles_of_a_conditional_are_those_of_its_longest_branch() -> None:
    assert estimated_cycles(BRANCHES) == 11


GROUPS = {
    "mesh['a'=2,'b'=4] {'a'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=2,'b'=4] {'b'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=4] {'a','b'}": (tuple(range(8)),),
    "mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=8] {'a':(2)4}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
}


@pytest.mark.parametrize("written", GROUPS)
def test_performed_reads_groups_along_mesh_axes(written: str) -> None:
    text = "ENTRY %m (x: f32[4]) -> f32[4] {\n  %x = f32[4] parameter(0)\n"
    (one,) = performed(f"{text}  ROOT %r = f32[4] all-reduce(%x), replica_groups={written}, to_apply=%add\n}}")
    assert one.groups == GROUPS[written]
