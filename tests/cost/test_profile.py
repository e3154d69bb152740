"""Profiles: what a kernel's time is kept by, interpolation, the file, and times measured on this computer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.cost.fusion import Kernel
from meshdsl.cost.kernel_form import form_of
from meshdsl.cost.ledger import ledger
from meshdsl.cost.profile import Form, KernelProfile, Point, load_profile
from meshdsl.lowering.program import Program
from meshdsl.tools.cli import main
from meshdsl.tools.compilers.profiler import BenchPlan, measure

TINY = BenchPlan(seconds=3e-3, limit=0.3, rounds=1)
EMPTY = KernelProfile("chip", "cpu", "0.10.2", "2026-01-02", 3, {})


def forms(program: Program) -> list[Form]:
    return [form_of(step, program) for step in ledger(program).steps if isinstance(step, Kernel)]


def product(x: str, w: str, dim: str) -> list[Form]:
    step = md.compile(lambda x, w: md.relu(md.dot(x, w, dim)) * 3, "rows:2", f"{x.partition(':')[0]}:rows")
    return forms(step.program(md.spec(x), md.spec(w)))


def test_a_form_has_no_names_and_no_sizes() -> None:
    (one,) = product("batch:8 io:16", "io:16 hidden:32", "io")
    (renamed,) = product("b:8 k:16", "k:16 n:32", "k")
    (larger,) = product("batch:8 io:16", "io:16 hidden:64", "io")
    (transposed,) = product("batch:8 io:16", "hidden:32 io:16", "io")
    assert one == renamed and one.text == larger.text != transposed.text and one.sizes != larger.sizes
    assert one.sizes[:4] == (4, 16, 16, 32)  # of one device


def test_times_between_two_measured_sizes_are_interpolated() -> None:
    points = tuple(Point((n,), float(n), 1e-6 * n) for n in (64, 1024))
    profile = dataclasses.replace(EMPTY, kernels={"exp(float32[a]) float32[a]": points})
    form = Form("exp(float32[a]) float32[a]", (64,))
    assert profile.seconds(form, 64.0) == profile.exact(form) == 64e-6
    between = dataclasses.replace(form, sizes=(256,))
    assert profile.seconds(between, 256.0) == pytest.approx(256e-6) and profile.exact(between) is None
    assert profile.seconds(dataclasses.replace(form, sizes=(2048,)), 2048.0) is None
    assert profile.seconds(Form("log(float32[a]) float32[a]", (64,)), 64.0) is None


def test_the_file_reads_back_and_merges(tmp_path: Path) -> None:
    first = dataclasses.replace(EMPTY, kernels={'a "quoted" form': (Point((1, 2), 4.0, 1e-6), Point((), 1.0, 2e-6))})
    second = dataclasses.replace(EMPTY, kernels={'a "quoted" form': (Point((1, 2), 4.0, 3e-6),), "b": ()})
    merged = first.merged(second)
    assert merged.exact(Form('a "quoted" form', (1, 2))) == 3e-6 and merged.exact(Form('a "quoted" form', ())) == 2e-6
    file = tmp_path / "profile.toml"
    file.write_text(merged.to_toml(), encoding="utf-8")
    assert load_profile(file) == dataclasses.replace(merged, file=str(file))
    for text, problem in (
        ("", "is malformed; .*\n  device: missing\n  platform: missing\n"),
        ("=", "is not TOML"),
        (
            merged.to_toml().replace("3.000000e-06", "-1.0"),
            r"kernel\[0\].points\[0\]\[2\] must be a number above 0, got -1.0",
        ),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(md.MachineError, match=problem):
            load_profile(file)
    with pytest.raises(md.MachineError, match="meshdsl doctor --profile"):
        md.machine("tpu-v5e", profile=tmp_path / "missing.toml")


def test_measured_kernels_replace_the_roofline() -> None:
    def step(params: dict[str, md.Tensor], x: md.Tensor) -> dict[str, md.Tensor]:
        grads = md.grad(lambda p: md.mean(md.square(md.softmax(md.dot(x, p["w"], "io"), "hidden"))))(params)
        return {"w": params["w"] - 0.1 * grads["w"]}

    specs = {"w": md.spec("io:64 hidden:32")}, md.spec("batch:64 io:64")
    compiled = md.compile(step, "rows:2", "batch:rows")
    said: list[str] = []
    profile = reduce(KernelProfile.merged, measure([compiled.program(*specs)], TINY, said.append))
    assert said and profile.platform == "cpu" and sum(map(len, profile.kernels.values())) >= 3
    chip = md.machine("tpu-v5e")
    slow = dataclasses.replace(profile, kernels={text: tuple(dataclasses.replace(p, seconds=1.0) for p in points)
                                                 for text, points in profile.kernels.items()})  # fmt: skip
    report = compiled.cost(*specs, machine=dataclasses.replace(chip, profile=slow))
    assert report.coverage.exact >= 3 and report.timeline.compute >= report.coverage.exact
    assert report.lower_bound <= report.seconds
    text = " ".join(str(report).split())
    assert "kernels have measured times" in text and "the profile is of cpu devices" in text
    assert json.loads(json.dumps(report.to_dict()))["profile"]["exact"] == report.coverage.exact
    none = compiled.cost(*specs, machine=dataclasses.replace(chip, profile=EMPTY))
    plain = compiled.cost(*specs, machine=chip)
    assert none.seconds == plain.seconds and none.coverage.exact == 0 and plain.to_dict()["profile"] is None


def test_measured_products_grow_with_their_size() -> None:
    step = md.compile(lambda x, w: md.dot(x, w, "io"), "rows:1", "batch:rows")
    programs = [step.program(md.spec(f"batch:{n} io:256"), md.spec("io:256 hidden:256")) for n in (8, 512)]
    (points,) = reduce(KernelProfile.merged, measure(programs, TINY, lambda _: None)).kernels.values()
    small, large = sorted(points, key=lambda point: point.work)
    assert large.seconds > 4 * small.seconds  # 64 times the work: nothing is hoisted out of the loop


def test_a_profile_that_is_stopped_keeps_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rounds = tmp_path / "profile.toml", iter((1e-3, 2e-3))

    def measured(*_: object) -> float:
        try:
            return next(rounds)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("meshdsl.tools.compilers.profiler._per_trip", measured)
    assert main(["doctor", "--profile", "models/mlp.py:mlp", "--mesh", "rows:1", "--quick", "--out", str(out)]) == 130
    assert sorted(p.seconds for each in load_profile(out).kernels.values() for p in each) == [1e-3, 2e-3]


def test_a_search_takes_measured_times() -> None:
    """The layout that is the fastest by the machine's figures is slow by the profile, and no bound holds."""
    args = md.spec("batch:8192 io:1024"), md.spec("io:1024 hidden:1024")
    step = md.compile(lambda x, w: md.dot(x, w, "io"), "all:2", "batch:all")
    (form,) = forms(step.program(*args))
    profile = dataclasses.replace(EMPTY, kernels={form.text: (Point(form.sizes, 1.0, 1.0),)})
    machine = dataclasses.replace(md.machine("tpu-v5e"), profile=profile)
    assert str(md.search(step, *args, mesh="all:2").best.layout) == "batch:all"
    found = md.search(step, *args, mesh="all:2", machine=machine)
    assert str(found.best.layout) == "hidden:all" and found.gap == 0
    assert found.best.seconds == step.under("all:2", "hidden:all").cost(*args, machine=machine).seconds
    few = md.search(step, *args, mesh="all:2", machine=machine, plans=1)
    assert (few.bound, few.gap) == (0, 1)


@pytest.mark.slow
def test_doctor_writes_and_extends_a_profile(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshdsl", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    out = str(tmp_path / "profile.toml")
    workload = (
        "models/mlp.py:mlp",
        "--layout",
        "batch:rows",
        "--mesh",
        "rows:2",
        "--set",
        "hidden=64",
        "--set",
        "io=32",
    )
    first = run("doctor", "--profile", *workload, "--set", "batch=16", "--quick", "--out", out)
    assert first.returncode == 0, first.stderr
    second = run("doctor", "--profile", *workload, "--set", "batch=64", "--quick", "--out", out, "--json")
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout)
    assert told["kernels"] > told["forms"]
    report = run("analyze", *workload, "--set", "batch=32", "--profile", out, "--json")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["profile"]["interpolated"]
    refused = run("doctor", "--layout", "batch:rows")
    assert refused.returncode == 2 and "--layout has no effect without --profile" in refused.stderr
