"""A measured machine file reads back, and appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshdsl.cost.machine import MachineError, machine
from meshdsl.cost.network import KINDS, place
from meshdsl.layouts import Mesh
from meshdsl.tools.compilers import calibrate as module
from meshdsl.tools.compilers.bench import Bench, BenchPlan
from meshdsl.tools.compilers.calibrate import calibrate
from tests.conftest import optimizing

TINY = BenchPlan((8, 32), (2,), 2**12, (2**8, 2**12), 1e-4, 0.1, 1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, optimizing():
        patch.setattr(module, "QUICK", TINY)
        path = calibrate(tmp_path_factory.mktemp("machines") / "new" / "here.toml", said.append, devices=2, quick=True)
    return path, said


def test_the_file_is_a_machine(measured: tuple[Path, list[str]]) -> None:
    path, said = measured
    found = machine(path)
    assert found.name == "here" and found.asynchronous == () and found.network.size == 2
    assert found.hbm_bandwidth > 1e6 and found.vector > 1e6 and found.peak_of("float32") > 1e6
    assert max(fraction for _, fraction in (*found.efficiency, *found.convolution)) == 1
    assert {table.kind for table in found.network.tables} == set(KINDS)
    assert found.sources["peak"].startswith("measured on 20")
    assert list(path.parent.iterdir()) == [path]
    assert len(said) == 4 + len(KINDS) and all(said)
    placement = place(found.network, Mesh("rows:2"))
    for kind in KINDS:
        small, large = (placement.seconds(kind, ["rows"], size) for size in (2**10, 2**20))
        assert 0 < small <= large


def test_a_name_finds_it(measured: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDSL_MACHINES", str(measured[0].parent))
    assert machine("here").file == str(measured[0])


def test_a_convolution_may_be_faster_than_every_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on a busy computer."""
    monkeypatch.setattr(module, "QUICK", TINY)
    monkeypatch.setattr(module, "conv_rate", lambda *_: (1e6, 1e20))
    found = machine(calibrate(tmp_path / "cpu.toml", lambda _: None, devices=2, quick=True))
    assert found.peak_of("float32") == 1e20 and found.convolution == ((1e6, 1.0),)


def test_too_few_devices(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"calibration needs 64 CPU devices; JAX has 8\n  call md.host_devices"):
        calibrate(tmp_path / "cpu.toml", devices=64)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is not a file"):
        calibrate(tmp_path)


def test_an_interrupted_calibration_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.toml"
    path.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "seconds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(path, lambda _: None, quick=True)
    monkeypatch.undo()
    monkeypatch.setattr(module, "_document", lambda *_: "new")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(path, lambda _: None, quick=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
