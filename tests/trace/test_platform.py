"""md.platform: what it returns while a function is traced."""

from __future__ import annotations

import pytest

import meshdsl as md


class Chip:
    """A device of another platform; nothing runs on it."""

    platform = "tpu"


def ask(x: md.Tensor) -> md.Tensor:
    return {"cpu": md.exp, "tpu": md.tanh, "gpu": md.sin}[md.platform()](x)


def traced(compiled: md.Compiled) -> str:
    return str(compiled.graph(md.spec("batch:8")).eqns[0].op)


def test_platform_is_that_of_the_machine_else_of_the_devices_else_the_backend() -> None:
    chips = md.Mesh("rows:2").on([Chip(), Chip()])
    assert md.platform() == "cpu"
    assert traced(md.compile(ask, "rows:2")) == "exp"
    assert traced(md.compile(ask, chips)) == "tanh"
    assert traced(md.compile(ask, chips, machine="h100")) == "sin"
    assert md.platform() == "cpu"


def test_platform_of_another_mesh_traces_again() -> None:
    compiled = md.compile(ask, "rows:2")
    assert traced(compiled) == "exp"
    assert traced(compiled.under(md.Mesh("rows:2").on([Chip(), Chip()]), "")) == "tanh"
    assert traced(compiled) == "exp"


def test_platform_machine_that_decides_nothing_is_refused() -> None:
    with pytest.raises(md.LayoutError, match="machine='tpu-v5e' has no effect"):
        md.compile(md.exp, "rows:2", machine="tpu-v5e").program(md.spec("batch:8"))
