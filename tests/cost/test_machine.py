"""Machine files: those of the package, where the user's are found, and every way in which one can be malformed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from meshdsl.cost.machine import MachineError, machine, machines

PACKAGED = (
    "a100-dgx", "a100-dgx-40gb", "a100-p4de", "b200", "h100", "h100-a3", "h200", "mi300x",
    "tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x", "v100-p3dn",
)  # fmt: skip
FOLDER = Path(__file__).parents[2] / "meshdsl" / "cost" / "machines"

GOOD = """
title = "a machine"
device = "GPU"
vector = 1e12
hbm = 8e9
hbm_bandwidth = 1e11
launch = 1e-6
efficiency = [[1e6, 0.1], [1e9, 0.5], [1e10, 0.9]]
[peak]
bfloat16 = 1e13
[network]
launch = 1e-5
[[network.level]]
kind = "switch"
axes = { gpu = 8 }
bandwidth = 1e10
[[network.measured]]
kind = "all_reduce"
group = [8]
points = [[1e6, 1e-4], [1e7, 1e-3]]
[sources]
hbm = "made up"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the user's own machines."""
    monkeypatch.setenv("MESHDSL_MACHINES", str(tmp_path))
    return tmp_path


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_machine(name: str):
    """It loads, says where every number comes from, and is short."""
    found = machine(name)
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    numbers = {"peak", "vector", "hbm", "hbm_bandwidth", "launch", "efficiency"}
    levels = {f"network.{axis}" for level in found.network.levels for axis in level.axes}
    torus = {f"network.{axis}" for level in found.network.levels if level.kind == "torus" for axis in level.axes}
    assert numbers <= set(found.sources)
    assert levels - torus <= set(found.sources)
    assert not torus or "network.torus" in found.sources
    assert not found.network.tables or "network.measured" in found.sources
    assert len(text.splitlines()) < 110
    assert all(0 < fraction < 1 for _, fraction in found.efficiency)
    for key in ("tile", "reached", "mode", "uncertainty", "network.combine"):
        table = tomllib.loads(text)
        stated = table["network"] if key.startswith("network.") else table
        given = stated.get(key.removeprefix("network."), {})
        needed = [f"mode.{mode}" for mode in given] if key == "mode" else [key] if given else []
        assert set(needed) <= set(found.sources), key
    for mode in tomllib.loads(text).get("mode", {}):
        assert machine(f"{name}:{mode}").name == f"{name}:{mode}"
    assert found.name == name and Path(found.file) == FOLDER / f"{name}.toml"


def test_the_packaged_machines_are_package_data():
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "cost/machines/*.toml" in project["tool"]["setuptools"]["package-data"]["meshdsl"]
    assert sorted(file.stem for file in FOLDER.glob("*.toml")) == sorted(PACKAGED)
    assert machines() == tuple(sorted(PACKAGED))


def test_a_device_is_what_jax_calls_one():
    """A core of TPU v2 and v3 (half a chip), a chip from v4 on."""
    assert [machine(f"tpu-{v}").device for v in ("v2", "v3", "v4", "v5e")] == ["core", "core", "chip", "chip"]
    assert machine("tpu-v3").peak_of("bfloat16") * 2 == 123e12
    assert machine("tpu-v3").network.levels[0].axes == {"core": 2}
    assert machine("tpu-v3").hbm < 16 * 2**30


def test_a_file_of_the_users(folder: Path):
    file = written(folder)
    mine = machine(file)
    assert mine == machine("mine") == machine(str(file))
    assert mine.name == "mine" and "mine" in machines()
    assert (mine.overlap_slowdown, mine.uncertainty) == (1.13, 0.15)
    assert mine.sources == {"hbm": "made up"}


def test_the_users_machine_stands_before_the_packaged_one(folder: Path):
    written(folder).rename(folder / "h100.toml")
    assert machine("h100").title == "a machine"


def test_efficiency_between_and_outside_its_points(folder: Path):
    mine = machine(written(folder))
    assert [mine.matmul_efficiency(f) for f in (1.0, 1e6, 1e9, 1e10, 1e20)] == [0.1, 0.1, 0.5, 0.9, 0.9]
    assert mine.matmul_efficiency(10**7.5) == pytest.approx(0.3)
    assert mine.matmul_seconds(1e9, "bfloat16") == pytest.approx(1e9 / (1e13 * 0.5))
    assert mine.matmul_seconds(0, "bfloat16") == 0


MODES = """
[mode.compiled]
operation = 2e-6
hbm_bandwidth = 5e10
[mode.flash]
attention = 0.4
uncertainty = { compute = 0.1, launch = 0.3, network = 0.2 }
[sources]
"""


def test_modes_replace_figures(folder: Path):
    file = written(folder, ("[sources]\n", MODES.lstrip()))
    plain, compiled, both = (machine(name) for name in (file, f"{file}:compiled", "mine:compiled,flash"))
    assert (plain.operation, plain.attention, plain.hbm_bandwidth) == (0, 0, 1e11)
    assert (compiled.operation, compiled.attention, compiled.hbm_bandwidth) == (2e-6, 0, 5e10)
    assert (both.operation, both.attention, both.hbm_bandwidth, both.name) == (2e-6, 0.4, 5e10, "mine:compiled,flash")
    assert (plain.half_width("launch"), both.half_width("launch")) == (0.15, 0.3)
    with pytest.raises(MachineError, match="has no mode 'compilde'; did you mean 'compiled'"):
        machine("mine:compilde")
    with pytest.raises(MachineError, match="has no mode 'compiled'; there are none\n  add a table"):
        machine(f"{written(folder)}:compiled")


def test_products_are_padded_to_tiles_and_slower_in_some_dtypes(folder: Path):
    eight_bits = ("bfloat16 = 1e13", "bfloat16 = 1e13\nint8 = 2e13\n[reached]\nint8 = 0.5")
    mine = machine(written(folder, eight_bits, ("[peak]", "tile = 128\n[peak]")))
    assert mine.padded(10, 64, 64) == (16, 128, 128) and mine.padded(256, 1, 129) == (8, 256, 256)
    assert mine.matmul_seconds(1e9, "int8") == pytest.approx(mine.matmul_seconds(1e9, "bfloat16"))
    assert machine(written(folder)).padded(10, 64, 63) == (10, 64, 63)


def test_a_dtype_without_a_peak(folder: Path):
    mine = machine(written(folder))
    with pytest.raises(MachineError, match="'mine' gives no peak for float32; there are: bfloat16\n  add float32"):
        mine.peak_of("float32")
    other = machine(written(folder, ("bfloat16 = 1e13", "bfloat16 = 1e13\nother = 1e12")))
    assert (other.peak_of("float64"), other.peak_of("bfloat16")) == (1e12, 1e13)


def test_an_unknown_machine():
    with pytest.raises(MachineError, match="no machine is called 'h10'; did you mean 'h100'\\? there are: a100-dgx, "):
        machine("h10")


# (what is changed, what the error says of it)
WRONG = {
    "missing": (("hbm = 8e9\n", ""), "hbm: missing"),
    "missing table": (("[peak]\nbfloat16 = 1e13\n", ""), "peak: missing"),
    "unknown": (("hbm_bandwidth", "hbm_bandwith"), "hbm_bandwith: unknown key; did you mean 'hbm_bandwidth'?"),
    "unknown in a level": (("bandwidth = 1e10", "bandwidth = 1e10\nhop = 1"), "network.level[0].hop: unknown key;"),
    "unknown in the network": (("[network]\nlaunch", "[network]\nlunch"), "network.lunch: unknown key; did you mean"),
    "text for a number": (("hbm = 8e9", 'hbm = "8 GB"'), "hbm must be a number above 0, got '8 GB'"),
    "negative": (("launch = 1e-6", "launch = -1e-6"), "launch must be a number from 0, got -1e-06"),
    "not finite": (("vector = 1e12", "vector = inf"), "vector must be a number above 0, got inf"),
    "a truth": (("vector = 1e12", "vector = true"), "vector must be a number above 0, got True"),
    "number for a text": (('"a machine"', "3"), "title must be text, got 3"),
    "no such dtype": (("bfloat16 = 1e13", "bfloat = 1e13"), "peak.bfloat: no dtype has this name"),
    "no dtype": (("bfloat16 = 1e13", ""), "peak: at least one dtype is needed"),
    "fraction": (("0.9]", "1.5]"), "efficiency[2][1] must be a number above 0 and at most 1, got 1.5"),
    "order": (("[1e10, 0.9]", "[1e8, 0.9]"), "efficiency: the first numbers of its pairs must increase"),
    "no pairs": (("[1e6, 0.1], ", "3, "), "efficiency[0] must be a list of 2 values, got 3"),
    "device": (('device = "GPU"', 'device = "Gpu"'), "device: unknown 'Gpu'; there are: chip, core, GPU, CPU device"),
    "level kind": (('"switch"', '"swich"'), "network.level[0].kind: unknown 'swich'; did you mean 'switch'?"),
    "level axes": (("{ gpu = 8 }", "{ gpu = 8, node = 2 }"), "network.level[0].axes: a switch has one axis, got"),
    "level size": (("{ gpu = 8 }", "{ gpu = 0 }"), "network.level[0].axes.gpu must be an integer from 1, got 0"),
    "level bandwidth": (("bandwidth = 1e10", ""), "network.level[0].bandwidth: missing"),
    "wrap": (("bandwidth = 1e10", "bandwidth = 1e10\nwrap = 4"), "network.level[0].wrap: only the axes of a torus"),
    "levels": (("[[network.level]]", "[network.level]"), "network.level must be a list, each a table, got a table"),
    "same axis": (
        ("{ gpu = 8 }", '{ gpu = 8 }\nbandwidth = 1\n[[network.level]]\nkind = "switch"\naxes = { gpu = 2 }'),
        "network.level: two levels have a hardware axis 'gpu'",
    ),
    "table kind": (("all_reduce", "allreduce"), "network.measured[0].kind: unknown 'allreduce'; did you"),
    "table group": (("[8]\n", "[16]\n"), "network.measured[0].group: 16 devices in a level of 8"),
    "table levels": (("[8]\n", "[8, 2]\n"), "network.measured[0].group: devices in each of the 1 levels"),
    "table faster": (("[1e7, 1e-3]", "[1e7, 1e-5]"), "network.measured[0].points: more bytes take less time; smooth"),
    "table order": (("[1e7, 1e-3]", "[1e6, 1e-3]"), "network.measured[0].points: the first numbers of"),
    "table without points": (("points", "pints"), "network.measured[0].points: missing"),
    "sources": (('hbm = "made up"', "hbm = 3"), "sources.hbm must be text, got 3"),
    "regimes": (("[peak]", "uncertainty = { compute = 0.1, wire = 1 }\n[peak]"), "uncertainty.wire: unknown 'wire';"),
    "regime missing": (("[peak]", "uncertainty = { compute = 0.1 }\n[peak]"), "missing for launch, network"),
    "combine": (("[network]", "[network]\ncombine = { gather = 1 }"), "network.combine.gather: unknown 'gather';"),
    "reached": (("[peak]", "[reached]\nfloat = 0.5\n[peak]"), "reached.float: no dtype has this name"),
    "mode": (("[sources]", "[mode.mine]\nhbbm = 1\n[sources]"), "mode.mine.hbbm: unknown key; did you mean 'hbm'?"),
    "asynchronous": (("[peak]", 'asynchronous = ["gather"]\n[peak]'), "asynchronous[0]: unknown 'gather'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda name: name.replace(" ", "_"))
def test_malformed(case: str, folder: Path):
    change, said = WRONG[case]
    file = written(folder, change)
    with pytest.raises(MachineError) as error:
        machine(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)


def test_every_problem_at_once(folder: Path):
    changes = ("hbm = 8e9", "hbm = 0"), ("vector = 1e12", "vecto = 1e12"), ('"switch"', '"ring_road"')
    with pytest.raises(MachineError) as error:
        machine(written(folder, *changes))
    first, *problems = error.value.args[0].splitlines()
    assert first == f"the machine file {folder / 'mine.toml'} has something wrong"
    assert [re.split(":| must", problem)[0].strip() for problem in problems] == [
        "vecto",
        "vector",
        "hbm",
        "network.level[0].kind",
    ]


def test_two_tables_of_one_group(folder: Path):
    table = GOOD[GOOD.index("[[network.measured]]") : GOOD.index("[sources]")]
    with pytest.raises(MachineError, match=r"network.measured: two tables are of all_reduce over \[8\]; keep one"):
        machine(written(folder, ("[sources]", table + "[sources]")))


def test_files_that_cannot_be_read(folder: Path):
    with pytest.raises(MachineError, match=r"there is no machine file .*none\.toml; the names known are: a100-dgx"):
        machine(folder / "none.toml")
    (folder / "bad.toml").write_text("title = ", encoding="utf-8")
    with pytest.raises(MachineError, match=r"bad.toml is not TOML: Invalid value"):
        machine("bad")
    (folder / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MachineError, match=r"bytes.toml is not TOML: byte 0 is not UTF-8"):
        machine("bytes")
