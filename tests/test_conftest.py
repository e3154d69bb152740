"""The environment that the other tests take for granted."""

from pathlib import Path

import jax

from tests.conftest import compare_golden


def test_conftest_has_eight_cpu_devices_and_64_bits():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    assert jax.numpy.asarray(1.0).dtype == "float64"


def test_golden_reports_writes_and_then_agrees(tmp_path: Path):
    path = tmp_path / "deep" / "name.txt"
    missing = compare_golden(path, "a\nb", update=False)
    assert missing is not None and "no golden file name.txt" in missing and "--update-golden" in missing

    assert compare_golden(path, "a\nb", update=True) is None
    assert path.read_text() == "a\nb\n"
    assert compare_golden(path, "a\nb\n", update=False) is None

    changed = compare_golden(path, "a\nc", update=False)
    assert changed is not None and "-b\n+c" in changed
